"""Model presets: small ones for CPUs, and published shapes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from layout_tuner.documents.reading import nearest, read_mapping, shown
from layout_tuner.errors import ModelShapeInvalidError
from layout_tuner.search_spaces.models.model_shape import ModelShape

_FIELDS: Final = {
    "layers": "num_layers",
    "hidden": "hidden_size",
    "ffn": "ffn_hidden_size",
    "heads": "num_heads",
    "kv_heads": "num_kv_heads",
    "seq": "seq_length",
    "vocab": "vocab_size",
    "tied": "tied_embeddings",
    "base": "rotary_base",
    "experts": "num_experts",
    "per_token": "experts_per_token",
    "width": "moe_ffn_hidden_size",
}
"""The names of fields in this table's rows, which are shorter than those of `ModelShape`."""


def _shape(family: str, name: str, **fields: Any) -> ModelShape:
    named = {_FIELDS.get(field, field): value for field, value in fields.items()}
    return ModelShape.from_mapping({"family": family, "name": name, **named})


_gpt: Final = partial(_shape, "gpt", seq=2048, vocab=51200)
_llama: Final = partial(_shape, "llama", seq=8192, vocab=128256)
_mixtral: Final = partial(_llama, kv_heads=8, seq=4096, base=1e6, experts=8, per_token=2)
_qwen3: Final = partial(
    _llama,
    kv_heads=4,
    head_dim=128,
    qk_norm=True,
    seq=4096,
    vocab=151936,
    base=1e6,
    experts=128,
    per_token=8,
)

_SHAPES: Final = (
    # For a few CPU cores. Untied, so that a pipeline gives the same bits as one process.
    _gpt("tiny", layers=4, hidden=128, heads=4, seq=128, vocab=1024, tied=False),
    _llama("tiny-llama", layers=4, hidden=128, ffn=384, heads=4, kv_heads=2, seq=128, vocab=1024),
    _gpt("small", layers=8, hidden=256, heads=8, seq=256, vocab=4096, tied=False),
    _llama("small-llama", layers=8, hidden=256, ffn=768, heads=8, kv_heads=4, seq=256, vocab=4096),
    _llama(
        "tiny-moe",
        layers=4,
        hidden=128,
        heads=4,
        kv_heads=2,
        seq=128,
        vocab=1024,
        qk_norm=True,
        width=128,
        experts=8,
        per_token=2,
    ),
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
    # Mixtures of experts, from their config.json files; sequences of 4,096 tokens.
    _mixtral("mixtral-8x7b", layers=32, hidden=4096, heads=32, width=14336, vocab=32000),
    _mixtral("mixtral-8x22b", layers=56, hidden=6144, heads=48, width=16384, vocab=32768),
    _qwen3("qwen3-30b-a3b", layers=48, hidden=2048, heads=32, width=768),
    _qwen3("qwen3-235b-a22b", layers=94, hidden=4096, heads=64, width=1536),
    _llama(
        "gpt-oss-120b",
        layers=36,
        hidden=2880,
        heads=64,
        kv_heads=8,
        seq=4096,
        vocab=201088,
        base=150000.0,
        head_dim=64,
        attention_window=128,
        full_attention_every=2,
        lacks="biases, attention sinks, the clamped SwiGLU, and YaRN's scaling of rotary positions",
        width=2880,
        experts=128,
        per_token=4,
    ),
)

MODEL_PRESETS: Final[Mapping[str, ModelShape]] = {shape.name: shape for shape in _SHAPES}


def model_preset(name: str) -> ModelShape:
    """The model preset of a name; ModelShapeInvalidError with all of them for another name."""
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
    if "config" in values:
        raise ModelShapeInvalidError.of_field(
            "config",
            f"config={shown(values['config'])} names a file, which only commands and the Python client "
            "read: give the campaign's file to them, or store the model with `layout-tuner model put`",
        )
    if "preset" not in values:
        return ModelShape.from_mapping(values)
    preset = values.pop("preset")
    if not isinstance(preset, str):
        raise ModelShapeInvalidError(f"preset={shown(preset)} is not the name of a model")
    base = model_preset(preset)
    if not values:
        return base
    changed = base.to_mapping() | {"name": f"{preset}-custom"} | values
    if base.num_experts and not base.num_dense_layers and "ffn_hidden_size" not in values:
        del changed["ffn_hidden_size"]  # it is that of the experts, which may have changed
    return ModelShape.from_mapping(changed)
