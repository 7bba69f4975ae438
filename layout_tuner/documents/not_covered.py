"""Known words of the field that documents may contain: not covered, or called otherwise here.

The table "What is covered" of README.md lists what is covered.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Final

_CAPACITY: Final = "experts that drop tokens over a capacity"

_NOT_COVERED: Final[Mapping[str, str]] = (
    dict.fromkeys(("capacity_factor", "moe_expert_capacity_factor"), _CAPACITY)
    | dict.fromkeys(("param_offload", "cpu_offload"), "offloading of weights")
    | dict.fromkeys(("fp4", "mxfp4", "int8"), "types of 4 and 8 bits beside those of precision")
    | dict.fromkeys(("lora", "lora_rank", "peft"), "fine-tuning with adapters")
    | dict.fromkeys(("dualpipe", "zbv"), "pipeline schedules that fold the stages")
    | dict.fromkeys(("t5", "bert", "vit", "encoder_layers"), "models other than decoders")
)
"""What is not covered, by word; endings such as `_parallel_size` are left out."""

_OTHER_NAMES: Final[Mapping[str, str]] = (
    dict.fromkeys(("tensor", "tensor_model", "tensor_model_parallel"), "tp")
    | dict.fromkeys(("g_intra_c", "tensor_columns"), "tp_columns")
    | dict.fromkeys(("pipeline", "pipeline_model"), "pp")
    | dict.fromkeys(("data",), "dp")
    | dict.fromkeys(("fsdp", "fsdp2", "hsdp", "zero3"), "zero_stage")
    | dict.fromkeys(("zero_optimization", "sharding_strategy"), "zero_stage")
    | dict.fromkeys(("context", "ring_attention", "ulysses", "ds_sequence"), "cp")
    | dict.fromkeys(("expert", "expert_model"), "ep")
    | dict.fromkeys(("expert_tensor", "expert_tensor_model"), "etp")
    | dict.fromkeys(("virtual_pipeline", "virtual_pipeline_model", "interleave"), "vpp")
    | dict.fromkeys(("num_virtual_stages_per_pipeline_rank",), "vpp")
    | dict.fromkeys(("num_distributed_optimizer_instances",), "zero_replicas")
    | dict.fromkeys(("zero_bubble", "gpipe", "pp_engine"), "schedule")
    | dict.fromkeys(("pipeline_schedule", "pipeline_parallel_schedule"), "schedule")
    | dict.fromkeys(("per_device_train_batch",), "micro_batch_size")
    | dict.fromkeys(("autotp",), "tp")
    | dict.fromkeys(("use_tp_pp_dp_mapping", "mesh_order", "rank_mapping"), "rank_order")
    | dict.fromkeys(("account_for_embedding_in_pipeline_split",), "pipeline_split")
    | dict.fromkeys(("account_for_loss_in_pipeline_split",), "pipeline_split")
    | dict.fromkeys(("mbs", "local_batch", "train_micro_batch_size_per_gpu"), "micro_batch_size")
    | dict.fromkeys(("gbs", "train_batch"), "global_batch_size")
    | dict.fromkeys(("gas", "gradient_accumulation_steps"), "num_microbatches")
    | dict.fromkeys(("activation_checkpointing", "recompute_granularity"), "recompute")
    | dict.fromkeys(("dtype", "mixed_precision", "fp8_format"), "precision")
    | dict.fromkeys(("mixtral", "qwen_moe", "qwen3_moe", "deepseek", "deepseek_v3"), "llama")
    | {"mla": "kv_lora_rank", "mamba": "layer_kinds"}
)
"""The names that documents of this program use, by those of trainers.

Those of a model's fields are in `search_spaces/models/foreign_words.py`.
"""

_SAID_OTHERWISE: Final[Mapping[str, str]] = {
    "num_layers_per_virtual_pipeline_stage": "vpp = num_layers / pp / this number",
    "use_distributed_optimizer": "zero_stage: 1",
    "data_parallel_sharding_strategy": "zero_stage: 2 for optim_grads, 3 for optim_grads_params",
    "recompute_activations": "recompute: selective",
    "deepspeed_activation_checkpointing": "recompute: full",
    **dict.fromkeys(
        ("data_parallel_shard", "data_shard", "dp_shard"),
        "dp, which is this number times that of replicas, with zero_stage: 3",
    ),
    **dict.fromkeys(
        ("data_parallel_replicate", "data_replicate", "dp_replicate"),
        "dp; beside shards, as zero_replicas",
    ),
    "bf16": "precision: bf16",
    "fp16": "precision: fp16",
}
"""What documents of this program say, by words of trainers with other values."""

_ENDINGS: Final = ("_size", "_degree", "_parallel", "_parallelism")


def known_word(name: object) -> str:
    """The end of a message about a word that is known and not accepted; empty: it is not known."""
    for word in _forms(name):
        if word in _NOT_COVERED:
            return f' ({_NOT_COVERED[word]}: not covered, see "What is covered" in README.md)'
        if word in _SAID_OTHERWISE:
            return f" (here it is said as {_SAID_OTHERWISE[word]})"
        if word in _OTHER_NAMES:
            return f" (here it is called {_OTHER_NAMES[word]!r})"
    return ""


def our_name(name: str, known: Collection[str]) -> str:
    """Which of the `known` names has what trainers call so; empty: none."""
    names = (_OTHER_NAMES.get(word, word) for word in _forms(name))
    return next((ours for ours in names if ours in known), "")


def _forms(name: object) -> Iterator[str]:
    """A word in lower case with underscores, and the same without one ending after the other."""
    word = name[:80].lower().lstrip("-").replace("-", "_") if isinstance(name, str) else ""
    for _ in range(len(_ENDINGS)):
        yield word
        word = next((word.removesuffix(end) for end in _ENDINGS if word.endswith(end)), word)
