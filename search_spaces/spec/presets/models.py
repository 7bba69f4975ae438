"""Model presets: small ones for CPUs, and published shapes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from search_spaces.documents.reading import nearest, read_mapping, shown
from search_spaces.errors import ModelShapeInvalidError
from search_spaces.spec.model_shape import ROTARY_BASE, ModelShape


def _gpt(
    name: str,
    *,
    layers: int,
    hidden: int,
    heads: int,
    seq: int = 2048,
    vocab: int = 51200,
    tied: bool = True,
) -> ModelShape:
    return ModelShape(
        name=name,
        family="gpt",
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=4 * hidden,
        num_heads=heads,
        num_kv_heads=heads,
        seq_length=seq,
        vocab_size=vocab,
        tied_embeddings=tied,
    )


def _llama(
    name: str,
    *,
    layers: int,
    hidden: int,
    ffn: int,
    heads: int,
    kv_heads: int,
    seq: int = 8192,
    vocab: int = 128256,
    tied: bool = False,
    base: float = ROTARY_BASE,
) -> ModelShape:
    return ModelShape(
        name=name,
        family="llama",
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_heads=heads,
        num_kv_heads=kv_heads,
        seq_length=seq,
        vocab_size=vocab,
        tied_embeddings=tied,
        rotary_base=base,
    )


_SHAPES: Final = (
    # For a few CPU cores. Untied, so that a pipeline gives the same bits as one process.
    _gpt("tiny", layers=4, hidden=128, heads=4, seq=128, vocab=1024, tied=False),
    _llama("tiny-llama", layers=4, hidden=128, ffn=384, heads=4, kv_heads=2, seq=128, vocab=1024),
    _gpt("small", layers=8, hidden=256, heads=8, seq=256, vocab=4096, tied=False),
    _llama("small-llama", layers=8, hidden=256, ffn=768, heads=8, kv_heads=4, seq=256, vocab=4096),
    # GPT-3's small and XL shapes (arXiv:2005.14165, table 2.1; XL with Megatron's 16 heads).
    _gpt("gpt-125m", layers=12, hidden=768, heads=12),
    _gpt("gpt-1.3b", layers=24, hidden=2048, heads=16),
    # The three of arXiv:2312.12705, table I.
    _gpt("gpt-22b", layers=48, hidden=6144, heads=48),
    _gpt("gpt-175b", layers=96, hidden=12288, heads=96),
    _gpt("gpt-1t", layers=128, hidden=25600, heads=128),
    # Llama 3.2 1B and 3B, Llama 2 7B, Llama 3 8B and 70B (rope_theta of their config.json files).
    _llama("llama-1b", layers=16, hidden=2048, ffn=8192, heads=32, kv_heads=8, tied=True, base=5e5),
    _llama("llama-3b", layers=28, hidden=3072, ffn=8192, heads=24, kv_heads=8, tied=True, base=5e5),
    _llama(
        "llama-7b", layers=32, hidden=4096, ffn=11008, heads=32, kv_heads=32, seq=4096, vocab=32000
    ),
    _llama("llama-8b", layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8, base=5e5),
    _llama("llama-70b", layers=80, hidden=8192, ffn=28672, heads=64, kv_heads=8, base=5e5),
)

MODEL_PRESETS: Final[Mapping[str, ModelShape]] = MappingProxyType(
    {shape.name: shape for shape in _SHAPES}
)
"""All model presets by name."""


def model_preset(name: str) -> ModelShape:
    """The model preset of a name.

    Raises:
        ModelShapeInvalidError: it is unknown; the message lists the presets.
    """
    if name not in MODEL_PRESETS:
        raise ModelShapeInvalidError(f"unknown model {shown(name)}{nearest(name, MODEL_PRESETS)}")
    return MODEL_PRESETS[name]


def resolve_model(described: str | Mapping[str, Any]) -> ModelShape:
    """The model that a user described: a preset's name, a shape, or a preset with changes.

    A changed preset without a name is called "PRESET-custom", so that different shapes have
    different names on a leaderboard.

    Raises:
        ModelShapeInvalidError: the preset is unknown, or a field is unknown, missing or impossible.
    """
    if isinstance(described, str):
        return model_preset(described)
    values = read_mapping(described, ModelShapeInvalidError, "the model")
    if "preset" not in values:
        return ModelShape.from_mapping(values)
    preset = values.pop("preset")
    if not isinstance(preset, str):
        raise ModelShapeInvalidError(f"preset={shown(preset)} is not the name of a model")
    base = model_preset(preset)
    if not values:
        return base
    changed = base.to_mapping() | {"name": f"{preset}-custom"} | values
    return ModelShape.from_mapping(changed)
