"""Model presets: small ones for CPUs, and published shapes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Final

from layout_tuner.documents.reading import nearest, read_mapping, shown
from layout_tuner.errors import ModelShapeInvalidError
from layout_tuner.search_spaces.models.layer_kinds import SYMBOLS
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
    "shared": "shared_expert_ffn_hidden_size",
    "dense": "num_dense_layers",
    "window": "attention_window",
    "full_every": "full_attention_every",
    "rotary": "rotary_fraction",
    "score": "router_score",
    "bias": "router_bias",
    "scaling": "router_scaling_factor",
    "mtp": "num_mtp_layers",
    "q_rank": "q_lora_rank",
    "kv_rank": "kv_lora_rank",
    "nope": "qk_nope_head_dim",
    "rope": "qk_rope_head_dim",
    "v_dim": "v_head_dim",
    "gate": "attention_output_gate",
    "sinks": "attention_sinks",
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

_TABLE: Final = """
# For CPUs: latent attention, of which the first layer is dense; windows and every second experts.
tiny-mla  layers=4 hidden=128 ffn=256 heads=4 q_rank=48 kv_rank=32 nope=32 rope=16 v_dim=32 \
  seq=128 vocab=1024 dense=1 experts=8 per_token=2 width=64 shared=64 score=sigmoid \
  router_groups=4 router_topk_groups=2 scaling=2.5
tiny-hybrid  layers=4 hidden=128 ffn=384 heads=4 kv_heads=2 seq=128 vocab=1024 window=32 \
  full_every=4 experts=8 per_token=2 width=128 experts_every=2
# arXiv:2412.19437 and config.json of deepseek-ai/DeepSeek-V3.
deepseek-v3  layers=61 hidden=7168 ffn=18432 heads=128 q_rank=1536 kv_rank=512 nope=128 rope=64 \
  v_dim=128 vocab=129280 dense=3 experts=256 per_token=8 width=2048 shared=2048 score=sigmoid \
  router_groups=8 router_topk_groups=4 bias=true scaling=2.5 mtp=1 | YaRN
# arXiv:2507.20534 and config.json of moonshotai/Kimi-K2-Instruct.
kimi-k2  layers=61 hidden=7168 ffn=18432 heads=64 q_rank=1536 kv_rank=512 nope=128 rope=64 \
  v_dim=128 vocab=163840 base=5e4 dense=1 experts=384 per_token=8 width=2048 shared=2048 \
  score=sigmoid bias=true scaling=2.827 | YaRN
# arXiv:2508.06471 and config.json of zai-org/GLM-4.5 and GLM-4.5-Air.
glm-4.5  layers=92 hidden=5120 ffn=12288 heads=96 kv_heads=8 head_dim=128 qk_norm=true biases=qkv \
  rotary=0.5 vocab=151552 base=1e6 dense=3 experts=160 per_token=8 width=1536 shared=1536 \
  score=sigmoid bias=true scaling=2.5 mtp=1
glm-4.5-air  layers=46 hidden=4096 ffn=10944 heads=96 kv_heads=8 head_dim=128 biases=qkv \
  rotary=0.5 vocab=151552 base=1e6 dense=1 experts=128 per_token=8 width=1408 shared=1408 \
  score=sigmoid bias=true mtp=1
# config.json of Qwen/Qwen3-Next-80B-A3B-Instruct, whose weights hold a depth of MTP besides.
qwen3-next-80b-a3b  layers=48 hidden=2048 heads=16 kv_heads=2 head_dim=256 qk_norm=true gate=true \
  rotary=0.25 linear_num_key_heads=16 linear_num_value_heads=32 linear_key_head_dim=128 \
  linear_value_head_dim=128 vocab=151936 base=1e7 experts=512 per_token=10 width=512 shared=512 \
  shared_expert_gate=true mtp=1 \
  layer_kinds=[{"gated_delta_net+experts":3},"full+experts"]
# config.json of nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16 and Nemotron-3-Super-120B-A12B-BF16.
nemotron-3-nano-30b-a3b  hidden=2688 heads=32 kv_heads=2 head_dim=128 rotary=0.0 \
  mamba_num_heads=64 mamba_head_dim=64 mamba_state_dim=128 mamba_num_groups=8 vocab=131072 \
  experts=128 per_token=6 width=1856 shared=3712 activation=relu2 score=sigmoid bias=true \
  scaling=2.5 pattern=MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME
nemotron-3-super-120b-a12b  hidden=4096 heads=32 kv_heads=2 head_dim=128 rotary=0.0 \
  mamba_num_heads=128 mamba_head_dim=64 mamba_state_dim=128 mamba_num_groups=8 vocab=131072 \
  experts=512 per_token=22 width=2688 expert_latent_size=1024 shared=5376 activation=relu2 \
  score=sigmoid bias=true scaling=5.0 mtp=1 pattern=MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM\
*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME
# config.json of MiniMaxAI/MiniMax-M2.
minimax-m2  layers=62 hidden=3072 heads=48 kv_heads=8 head_dim=128 qk_norm=width rotary=0.5 \
  vocab=200064 base=5e6 experts=256 per_token=8 width=1536 score=sigmoid bias=true mtp=3
# config.json of meta-llama/Llama-4-Scout-17B-16E and Llama-4-Maverick-17B-128E.
llama-4-scout  layers=48 hidden=5120 heads=40 kv_heads=8 vocab=202048 seq=8192 base=5e5 \
  experts=16 per_token=1 width=8192 shared=8192 score=sigmoid | chunks norms_of_scout unrotated \
  pictures
llama-4-maverick  layers=48 hidden=5120 ffn=16384 heads=40 kv_heads=8 vocab=202048 seq=8192 \
  base=5e5 experts=128 per_token=1 width=8192 shared=8192 experts_every=2 score=sigmoid | chunks \
  unrotated pictures
# config.json of allenai/Olmo-3-1125-32B.
olmo-3-32b  layers=64 hidden=5120 ffn=27648 heads=40 kv_heads=8 qk_norm=width vocab=100278 \
  seq=8192 base=5e5 window=4096 full_every=4 | after YaRN
# arXiv:2508.10925 and config.json of openai/gpt-oss-20b.
gpt-oss-20b  layers=24 hidden=2880 heads=64 kv_heads=8 head_dim=64 biases=all sinks=true \
  vocab=201088 base=1.5e5 window=128 full_every=2 experts=32 per_token=4 width=2880 | clamp YaRN
"""
"""A preset a line: fields (4,096 tokens where no other number), then what its shape lacks."""

_LACKS: Final = {
    "YaRN": "YaRN's scaling of rotary positions",
    "chunks": "attention in chunks of 8,192 tokens in three layers of four",
    "unrotated": "layers without rotary positions",
    "norms_of_scout": "norms without weights of queries and keys",
    "pictures": "a tower for pictures",
    "after": "norms after attention and feed-forward in place of before",
    "clamp": "the clamped SwiGLU",
}


def _rows() -> Iterator[ModelShape]:
    for line in _TABLE.replace("\\\n", "").splitlines():
        if not line or line.startswith("#"):
            continue
        before, _, lacks = line.partition("|")
        name, *words = before.split()
        fields: dict[str, Any] = {"seq": 4096}
        for word in words:
            field, _, value = word.partition("=")
            is_text = field in ("score", "biases", "activation", "pattern") or value == "width"
            fields[field] = value if is_text else json.loads(value)
        if symbols := fields.pop("pattern", ""):
            fields |= {"layers": len(symbols), "layer_kinds": [SYMBOLS[each] for each in symbols]}
        yield _llama(name, **fields, lacks=", ".join(_LACKS[each] for each in lacks.split()))


MODEL_PRESETS: Final[Mapping[str, ModelShape]] = {
    shape.name: shape for shape in (*_SHAPES, *_rows())
}


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
    has_dense = any(each.shape.feed_forward == "dense" for each in base.kinds)
    if base.num_experts and not has_dense and "ffn_hidden_size" not in values:
        del changed["ffn_hidden_size"]  # it is that of the experts, which may have changed
    return ModelShape.from_mapping(changed)
