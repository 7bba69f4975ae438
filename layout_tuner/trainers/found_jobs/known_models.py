"""Published models by the names that files of jobs and recipes give them.

A name counts as known when it is spelled like a published one: in any case, with `-`, `_`, `.` or
`p` within numbers, with the organization in front, and with endings such as `-hf` and `-Instruct`
that leave the shape as it is. No other name is taken for one that is like it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from layout_tuner.search_spaces.models.model_presets import MODEL_PRESETS
from layout_tuner.search_spaces.models.model_shape import ModelShape

_LLAMA_3: Final = {"vocab_size": 128256, "rotary_base": 5e5, "seq_length": 8192}
_MISTRAL: Final = {"head_dim": 128, "vocab_size": 131072}
_QWEN: Final = {"vocab_size": 151936, "rotary_base": 1e6, "seq_length": 4096}
_QWEN_2: Final = _QWEN | {"biases": "qkv"}
_QWEN_2_LARGE: Final = _QWEN_2 | {"vocab_size": 152064}
_LATENT: Final = dict.fromkeys(("qk_nope_head_dim", "v_head_dim"), 128) | {"qk_rope_head_dim": 64}
_DEEPSEEK_2: Final = _LATENT | {"kv_lora_rank": 512, "vocab_size": 102400, "num_dense_layers": 1}
_EXPERTS: Final = ("num_experts", "moe_ffn_hidden_size", "shared_expert_ffn_hidden_size")
_GROUPED: Final = {"q_lora_rank": 1536, "router_groups": 8, "router_topk_groups": 3}
_QWEN_3: Final = _QWEN | {"head_dim": 128, "qk_norm": True}
_TIED: Final = {"tied_embeddings": True}

_Widths = tuple[int, int, int, int, int]
"""Layers, hidden size, width of the feed-forward, query heads, key and value heads."""


def _shape(family: str, name: str, widths: _Widths, **fields: Any) -> ModelShape:
    names = ("num_layers", "hidden_size", "ffn_hidden_size", "num_heads", "num_kv_heads")
    stated = dict(zip(names, widths, strict=True))
    defaults = {"seq_length": 4096, "vocab_size": 32000}
    return ModelShape.from_mapping({"family": family, "name": name, **defaults, **stated, **fields})


_llama: Final = partial(_shape, "llama")
_gpt: Final = partial(_shape, "gpt", vocab_size=50257, seq_length=1024)


def _deepseek(name: str, widths: _Widths, experts: tuple[int, int, int], **more: Any) -> ModelShape:
    fields = dict(zip(_EXPERTS, experts, strict=True))
    return _llama(name, widths, **_DEEPSEEK_2, **fields, **more, experts_per_token=6)


_SHAPES: Final = (
    # arXiv:2302.13971, table 2: Llama 1, of sequences of 2,048 tokens.
    _llama("llama1-7b", (32, 4096, 11008, 32, 32), seq_length=2048),
    _llama("llama1-13b", (40, 5120, 13824, 40, 40), seq_length=2048),
    _llama("llama1-65b", (80, 8192, 22016, 64, 64), seq_length=2048),
    # config.json of meta-llama: Llama-2-13b-hf, Llama-2-70b-hf, Llama-3.1-405B.
    _llama("llama2-13b", (40, 5120, 13824, 40, 40)),
    _llama("llama2-70b", (80, 8192, 28672, 64, 8)),
    _llama("llama3.1-405b", (126, 16384, 53248, 128, 8), **_LLAMA_3),
    # config.json of codellama/CodeLlama-34b-hf, TinyLlama/TinyLlama-1.1B-*, 01-ai/Yi-*.
    _llama("codellama-34b", (48, 8192, 22016, 64, 8), rotary_base=1e6),
    _llama("tinyllama1.1b", (22, 2048, 5632, 32, 4), seq_length=2048),
    _llama("yi6b", (32, 4096, 11008, 32, 4), vocab_size=64000, rotary_base=5e6),
    _llama("yi34b", (60, 7168, 20480, 56, 8), vocab_size=64000, rotary_base=5e6),
    # config.json of mistralai: Mistral-7B-v0.1, -v0.2, -v0.3, Nemo-Base-2407, Small-24B-Base-2501.
    _llama("mistral7b-v0.1", (32, 4096, 14336, 32, 8), attention_window=4096),
    _llama("mistral7b-v0.2", (32, 4096, 14336, 32, 8), rotary_base=1e6),
    _llama("mistral7b-v0.3", (32, 4096, 14336, 32, 8), rotary_base=1e6, vocab_size=32768),
    _llama("mistral-nemo-2407", (40, 5120, 14336, 32, 8), **_MISTRAL, rotary_base=1e6),
    _llama("mistral-small24b-2501", (40, 5120, 32768, 32, 8), **_MISTRAL, rotary_base=1e8),
    # config.json of Qwen/Qwen2.5-*; those of Qwen2 at the same sizes have the same shape.
    _llama("qwen2.5-0.5b", (24, 896, 4864, 14, 2), **_QWEN_2, **_TIED),
    _llama("qwen2.5-1.5b", (28, 1536, 8960, 12, 2), **_QWEN_2, **_TIED),
    _llama("qwen2.5-3b", (36, 2048, 11008, 16, 2), **_QWEN_2, **_TIED),
    _llama("qwen2.5-7b", (28, 3584, 18944, 28, 4), **_QWEN_2_LARGE),
    _llama("qwen2.5-14b", (48, 5120, 13824, 40, 8), **_QWEN_2_LARGE),
    _llama("qwen2.5-32b", (64, 5120, 27648, 40, 8), **_QWEN_2_LARGE),
    _llama("qwen2.5-72b", (80, 8192, 29568, 64, 8), **_QWEN_2_LARGE),
    # config.json of Qwen/Qwen3-*.
    _llama("qwen3-0.6b", (28, 1024, 3072, 16, 8), **_QWEN_3, **_TIED),
    _llama("qwen3-1.7b", (28, 2048, 6144, 16, 8), **_QWEN_3, **_TIED),
    _llama("qwen3-4b", (36, 2560, 9728, 32, 8), **_QWEN_3, **_TIED),
    _llama("qwen3-8b", (36, 4096, 12288, 32, 8), **_QWEN_3),
    _llama("qwen3-14b", (40, 5120, 17408, 40, 8), **_QWEN_3),
    _llama("qwen3-32b", (64, 5120, 25600, 64, 8), **_QWEN_3),
    # config.json of deepseek-ai/DeepSeek-V2-Lite and DeepSeek-V2.
    _deepseek("deepseek-v2-lite", (27, 2048, 10944, 16, 16), (64, 1408, 2816)),
    _deepseek(
        "deepseek-v2",
        (60, 5120, 12288, 128, 128),
        (160, 1536, 3072),
        **_GROUPED,
        router_scaling_factor=16.0,
    ),
    # config.json of openai-community: gpt2 to gpt2-xl.
    _gpt("gpt2", (12, 768, 3072, 12, 12)),
    _gpt("gpt2-medium", (24, 1024, 4096, 16, 16)),
    _gpt("gpt2-large", (36, 1280, 5120, 20, 20)),
    _gpt("gpt2-xl", (48, 1600, 6400, 25, 25)),
)

_PRESETS: Final[Mapping[str, str]] = {
    name: preset
    for preset, names in {
        "llama-7b": "llama2-7b",
        "llama-8b": "llama3-8b llama3.1-8b deepseek-r1-distill-llama8b",
        "llama-70b": "llama3-70b llama3.1-70b llama3.3-70b deepseek-r1-distill-llama70b",
        "llama-1b": "llama3.2-1b",
        "llama-3b": "llama3.2-3b",
        "deepseek-v3": "deepseek-r1",
        "glm-4.5": "glm45-355b",
        "glm-4.5-air": "glm45-air-106b",
        "nemotron-3-nano-30b-a3b": "nemotron-3-nano nvidia-nemotron-3-nano-30b-a3b",
        "nemotron-3-super-120b-a12b": "nemotron-3-super nvidia-nemotron-3-super-120b-a12b",
        "llama-4-scout": "llama4-scout-17b-16e llama4-17bx16e",
        "llama-4-maverick": "llama4-maverick-17b-128e llama4-17bx128e",
        "gpt-125m": "gpt3-125m gpt3-126m",
        "gpt-175b": "gpt3-175b",
    }.items()
    for name in names.split()
}
"""Presets by further published names."""

_OWN_NAMES: Final = re.compile(r"(tiny|small|llama-\d+b|gpt-\d).*")
"""Presets whose names are not published, or without the generation: `llama-7b` is Llama 1."""

_SAME: Final[Mapping[str, str]] = {
    "llama3-405b": "llama3.1-405b",  # torchtitan's llama3 of that flavor
    "mistral7b": "mistral7b-v0.1",
    "mistral-nemo12b": "mistral-nemo-2407",
    "codellama34b": "codellama-34b",
    "deepseek-r1-distill-qwen14b": "qwen2.5-14b",
    "deepseek-r1-distill-qwen32b": "qwen2.5-32b",
    **{f"qwen2-{size}": f"qwen2.5-{size}" for size in ("0.5b", "1.5b", "7b", "72b")},
    # Recipes of Megatron-Bridge count millions.
    "qwen2-500m": "qwen2.5-0.5b",
    "qwen2.5-500m": "qwen2.5-0.5b",
    "qwen3-600m": "qwen3-0.6b",
}

_OF_USE: Final = re.compile(
    r"-(base|hf|chat|instruct|it|thinking|fp8|bf16|\d{4}|v0\.1|v0\.3|v1\.0)(?![\w.])"
)
"""Endings that leave a shape as it is, unless the name with them has a shape of its own."""
_FAMILY: Final = re.compile(r"(llama|qwen|mistral|mixtral|gpt|oss|yi|small)-(?=\d)")
_VERSION: Final = re.compile(r"^(llama|qwen)(\d)[-.]?(\d)-(?=\d)")


def _canonical(name: str) -> str:
    """The name in one spelling: `llama3.1-8b`."""
    word = re.split(r"[/\\]", name.strip().rstrip("/\\"))[-1].lower()
    word = re.sub(r"\.ya?ml$", "", re.sub(r"[_\s]+", "-", word))
    word = re.sub(r"(?<=\d)p(?=\d)", ".", word)
    word = re.sub(r"^meta-(?=llama)", "", word)
    word = _FAMILY.sub(r"\1", word)
    return _VERSION.sub(r"\1\2.\3-", word)


_KNOWN: Final[Mapping[str, ModelShape]] = {
    **{shape.name: shape for shape in _SHAPES},
    **{name: MODEL_PRESETS[preset] for name, preset in _PRESETS.items()},
    **{
        _canonical(name): each for name, each in MODEL_PRESETS.items() if not _OWN_NAMES.match(name)
    },
}


def known_model(name: str) -> ModelShape | None:
    """The published shape of a model; None: the name is none that is known.

    The sequence length is that of a pretraining, and not the longest that the model takes; a job
    states its own.
    """
    word = _canonical(name)
    while word not in _KNOWN and word not in _SAME:
        shorter = _OF_USE.sub("", word, count=1)
        if shorter == word:
            return None
        word = shorter
    return _KNOWN[_SAME.get(word, word)]
