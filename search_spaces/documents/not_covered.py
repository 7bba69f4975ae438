"""Known words of the field that documents may contain: not covered, or called otherwise here.

The table "What is covered" of README.md lists what is covered.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

_EXPERTS: Final = "mixture-of-experts models and expert parallelism"
_SHARDED: Final = "ZeRO-2, ZeRO-3 and FSDP"

_NOT_COVERED: Final[Mapping[str, str]] = MappingProxyType(
    dict.fromkeys(("expert", "expert_model", "expert_tensor", "ep", "etp", "moe"), _EXPERTS)
    | dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "experts"), _EXPERTS)
    | dict.fromkeys(("top_k", "moe_router_topk", "num_experts_per_tok", "mixtral"), _EXPERTS)
    | dict.fromkeys(("deepseek", "qwen_moe", "capacity_factor"), _EXPERTS)
    | dict.fromkeys(("fsdp", "fsdp2", "hsdp", "data_shard", "dp_shard", "zero3"), _SHARDED)
    | dict.fromkeys(("zero_stage=2", "zero_stage=3"), _SHARDED)
    | dict.fromkeys(("offload", "cpu_offload", "optimizer_offload"), "offloading to host memory")
    | dict.fromkeys(
        ("fp8", "fp8_format", "mxfp8", "fp4", "nvfp4", "int8"), "fp8 and narrower types"
    )
    | dict.fromkeys(("sliding_window", "attention_window"), "sliding-window attention")
    | dict.fromkeys(("mla", "q_lora_rank", "kv_lora_rank"), "multi-head latent attention")
    | dict.fromkeys(("lora", "lora_rank", "peft"), "fine-tuning with adapters")
    | dict.fromkeys(("zero_bubble", "dualpipe"), "zero-bubble pipeline schedules")
    | dict.fromkeys(("t5", "bert", "vit", "mamba", "encoder_layers"), "models other than decoders")
)
"""What is not covered, by word; endings such as `_parallel_size` are left out."""

_OTHER_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    dict.fromkeys(("tensor", "tensor_model", "tensor_model_parallel"), "tp")
    | dict.fromkeys(("pipeline", "pipeline_model"), "pp")
    | dict.fromkeys(("data", "data_replicate"), "dp")
    | dict.fromkeys(("context", "ring_attention", "ulysses", "ds_sequence"), "cp")
    | dict.fromkeys(("virtual_pipeline", "virtual_pipeline_model", "interleave"), "vpp")
    | dict.fromkeys(("account_for_embedding_in_pipeline_split",), "pipeline_split")
    | dict.fromkeys(("account_for_loss_in_pipeline_split",), "pipeline_split")
    | dict.fromkeys(("mbs", "local_batch", "train_micro_batch_size_per_gpu"), "micro_batch_size")
    | dict.fromkeys(("gbs", "train_batch"), "global_batch_size")
    | dict.fromkeys(("gas", "gradient_accumulation_steps"), "num_microbatches")
    | dict.fromkeys(("activation_checkpointing", "recompute_granularity"), "recompute")
    | dict.fromkeys(("dtype", "mixed_precision"), "precision")
)
"""The names that documents of this program use, by those of trainers."""

_ENDINGS: Final = ("_size", "_degree", "_parallel", "_parallelism")


def known_word(name: object) -> str:
    """The end of a message about a word that is known and not accepted; empty: it is not known."""
    if not isinstance(name, str):
        return ""
    word = name[:80].lower().replace("-", "_")
    for _ in range(len(_ENDINGS)):
        if word in _NOT_COVERED:
            return f' ({_NOT_COVERED[word]}: not covered, see "What is covered" in README.md)'
        if word in _OTHER_NAMES:
            return f" (here it is called {_OTHER_NAMES[word]!r})"
        word = next((word.removesuffix(end) for end in _ENDINGS if word.endswith(end)), word)
    return ""
