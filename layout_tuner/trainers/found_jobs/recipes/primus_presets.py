"""What Primus' own files say of the modules and the models that an experiment names.

The files lie in Primus' tree and not beside the experiment: `primus/configs/modules` and
`primus/configs/models` of AMD-AGI/Primus at fd1eeab. A model there is not always the published one
of its name: its Qwen3 8B has no norms of queries and keys, and its Llama 3.2 1B is not tied.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

_Arguments = dict[str, Any]
"""Values by the names of Megatron-LM's arguments."""

_TRAINER: Final[_Arguments] = {
    "bf16": True,
    "cp_comm_type": "p2p",
    "sequence_parallel": True,
    "use_distributed_optimizer": True,
    "use_flash_attn": True,
    "attention_dropout": 0.1,
    "hidden_dropout": 0.1,
    "untie_embeddings_and_output_weights": True,
    "swiglu": True,
    "moe_router_topk": 2,
    "moe_token_dispatcher_type": "allgather",
    "moe_layer_freq": 1,
    "kv_lora_rank": 32,
    "tokenizer_type": "of the model",  # no size is known of those that the table does not have
}
"""`modules/megatron/trainer_base.yaml`, and `models/megatron/language_model.yaml`."""
MODULES: Final[Mapping[str, _Arguments]] = {
    "pre_trainer": _TRAINER | {"micro_batch_size": 2, "global_batch_size": 16, "seq_length": 1024},
    "sft_trainer": _TRAINER | {"micro_batch_size": 1, "global_batch_size": 128, "seq_length": 2048},
}
"""By the name of the file."""
TORCHTITAN: Final[_Arguments] = {
    "training.local_batch_size": 8,
    "training.seq_len": 2048,
    "activation_checkpoint.mode": "none",
    "compile.enable": True,
    "compile.components": ["model", "loss"],
}
"""Where `modules/torchtitan/pre_trainer.yaml` has another value than torchtitan."""

_LLAMA: Final[_Arguments] = {
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}
_LLAMA_2: Final = _LLAMA | {"vocab_size": 32000}
_LLAMA_3: Final = _LLAMA | {"vocab_size": 128256, "rotary_base": 500000}
_ALLTOALL: Final = {"moe_token_dispatcher_type": "alltoall", "moe_grouped_gemm": True}
_QWEN: Final = _LLAMA | _ALLTOALL | {"rotary_base": 1000000, "moe_permute_fusion": True}
_QWEN_2: Final = _QWEN | {"vocab_size": 151665}
_QWEN_3: Final = _QWEN | {"vocab_size": 151669}
_HEADS: Final = {"qk_layernorm": True, "kv_channels": 128}
_MIXTRAL: Final = _LLAMA_2 | _ALLTOALL | {"rotary_base": 1000000, "num_experts": 8}
_DEEPSEEK: Final = (
    _LLAMA
    | _ALLTOALL
    | _HEADS
    | {"multi_latent_attention": True, "moe_shared_expert_overlap": True}
    | {"tokenizer_type": "DeepSeekV2Tokenizer"}
    | {"moe_permute_fusion": True, "kv_lora_rank": 512, "expert_model_parallel_size": 8}
)
_GPT_OSS: Final = _DEEPSEEK | {"multi_latent_attention": False, "kv_channels": 64}


def _experts(number: int, chosen: int, width: int, shared: int = 0, dense: int = 0) -> _Arguments:
    """Experts of each layer, but of the first dense ones."""
    return {
        "num_experts": number,
        "moe_router_topk": chosen,
        "moe_ffn_hidden_size": width,
        **({"moe_shared_expert_intermediate_size": shared} if shared else {}),
        **({"num_dense_layers": dense} if dense else {}),
    }


def _grouped(chosen: int, scaling: float) -> _Arguments:
    """A latent of queries, and experts in eight groups of which a token takes some."""
    return {
        "q_lora_rank": 1536,
        "moe_router_num_groups": 8,
        "moe_router_group_topk": chosen,
        "moe_router_topk_scaling_factor": scaling,
    }


_WIDTHS: Final = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads")
_MODELS: Final[Mapping[str, tuple[_Arguments, tuple[int, ...]]]] = {
    "llama2_7b": (_LLAMA_2, (32, 4096, 11008, 32)),
    "llama2_13b": (_LLAMA_2, (40, 5120, 13824, 40)),
    "llama2_70b": (_LLAMA_2, (80, 8192, 28672, 64, 8)),
    "llama3_8b": (_LLAMA_3, (32, 4096, 14336, 32, 8)),
    "llama3_70b": (_LLAMA_3, (80, 8192, 28672, 64, 8)),
    "llama3.1_8b": (_LLAMA_3, (32, 4096, 14336, 32, 8)),
    "llama3.1_70b": (_LLAMA_3, (80, 8192, 28672, 64, 8)),
    "llama3.1_405b": (_LLAMA_3, (126, 16384, 53248, 128, 8)),
    "llama3.2_1b": (_LLAMA_3, (16, 2048, 8192, 32, 8)),
    "llama3.2_3b": (_LLAMA_3, (28, 3072, 8192, 24, 8)),
    "llama3.3_70b": (_LLAMA_3, (80, 8192, 28672, 64, 8)),
    "qwen2.5_3b": (_QWEN_2, (36, 2048, 11008, 16, 2)),
    "qwen2.5_7b": (_QWEN_2, (28, 3584, 18944, 28, 4)),
    "qwen2.5_14b": (_QWEN_2, (48, 5120, 13824, 40, 8)),
    "qwen2.5_32b": (_QWEN_2, (64, 5120, 27648, 40, 8)),
    "qwen2.5_72b": (_QWEN_2, (80, 8192, 29568, 64, 8)),
    "deepseek_r1_distill_qwen_1.5b": (_QWEN_2 | {"rotary_base": 10000}, (28, 1536, 8960, 12, 2)),
    "qwen3_4b": (_QWEN_3, (36, 2560, 9728, 32, 8)),
    "qwen3_8b": (_QWEN_3, (36, 4096, 12288, 32, 8)),
    "qwen3_14b": (_QWEN_3, (40, 5120, 17408, 40, 8)),
    "qwen3_32b": (_QWEN_3, (64, 5120, 25600, 64, 8)),
    "qwen3_30b_a3b": (_QWEN_3 | _HEADS | _experts(128, 8, 768), (48, 2048, 6144, 32, 4)),
    "qwen3_235b_a22b": (_QWEN_3 | _HEADS | _experts(128, 8, 1536), (94, 4096, 12288, 64, 4)),
    "qwen3_235b_a22b_4layer": (_QWEN_3 | _HEADS | _experts(128, 8, 1536), (4, 4096, 12288, 64, 4)),
    "mixtral_8x7b_v0.1": (_MIXTRAL, (32, 4096, 14336, 32, 8)),
    "mixtral_8x22b_v0.1": (_MIXTRAL, (56, 6144, 16384, 48, 8)),
    "grok1": (_MIXTRAL, (64, 6144, 32768, 48, 8)),
    "gpt_oss_20b": (_GPT_OSS | _experts(32, 4, 2880, 2880), (24, 2880, 10944, 64, 8)),
    "gpt_oss_120b": (_GPT_OSS | _experts(128, 4, 2880, 2880), (36, 2880, 10944, 64, 8)),
    "deepseek_v2_lite": (_DEEPSEEK | _experts(64, 6, 1408, 2816, 1), (27, 2048, 10944, 16)),
    "deepseek_v2": (
        _DEEPSEEK | _experts(160, 6, 1536, 3072, 1) | _grouped(3, 16.0),
        (60, 5120, 12288, 128),
    ),
    "deepseek_v3": (
        _DEEPSEEK
        | _experts(256, 8, 2048, 2048, 3)
        | _grouped(4, 2.5)
        | {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
        | {"mtp_num_layers": 1, "tokenizer_type": "DeepSeekV3Tokenizer"},
        (61, 7168, 18432, 128),
    ),
}
"""`models/megatron`: the arguments, and layers, hidden size, feed-forward, heads, and key and value
heads where these are grouped. Vocabularies are those of the tokenizers that it names."""


def megatron_model(name: str) -> _Arguments | None:
    """The arguments of a model of `models/megatron`; None: it is not known here."""
    found = _MODELS.get(re.sub(r"\.ya?ml$", "", name.lower()))
    if found is None:
        return None
    more, widths = found
    arguments = {**more, **dict(zip(_WIDTHS, widths, strict=False))}
    if "vocab_size" in arguments:
        arguments["tokenizer_type"] = "NullTokenizer"  # of this size
    if len(widths) > len(_WIDTHS):
        arguments |= {"group_query_attention": True, "num_query_groups": widths[-1]}
    if dense := arguments.pop("num_dense_layers", 0):
        arguments["moe_layer_freq"] = f"([0]*{dense}+[1]*{widths[0] - dense})"
    return arguments


def torchtitan_model(name: str) -> _Arguments | None:
    """Name and flavor of a model of `models/torchtitan`; None: it is not known here."""
    word = re.sub(r"\.ya?ml$", "", name)
    found = re.fullmatch(
        r"(llama3|qwen3|deepseek_v3|gpt_oss|llama4)(?:\.\d)?_(\w[\w.]*?)(-fp8)?", word
    )
    if found is None:
        return None
    family, flavor = found[1], found[2]
    if family == "llama4":
        flavor = flavor.lower()
    elif family != "gpt_oss":
        flavor = flavor.upper()
    converters = {"model.converters": ["quantize.linear.float8"]} if found[3] else {}
    return {"model.name": family, "model.flavor": flavor, **converters}
