"""Megatron-DeepSpeed's pretrain_gpt.py, the trainer of arXiv:2312.12705.

The flags are those of its `megatron/arguments.py`, an older set than Megatron-LM's. DeepSpeed's own
configuration has the batch, the precision and ZeRO.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.trainers.adapter import (
    SHAPE_FIELDS,
    TrainerAdapter,
    TrainerJob,
    TrainerRule,
    lacking_knobs,
    shape_rules,
)
from layout_tuner.trainers.deepspeed import (
    ENGINE_PATHS,
    ENGINE_RULES,
    batch_zero_and_types,
    notes_of_types,
    precision_keys,
)
from layout_tuner.trainers.knobs.deepspeed import DEEPSPEED_KNOBS
from layout_tuner.trainers.log_patterns import LogPatterns
from layout_tuner.trainers.megatron_lm import (
    ARGUMENT_RULES,
    NORM_EPSILON,
    STEP_LINES,
    batch_flags,
    notes,
    parallel_flags,
    recompute_flags,
    shape_flags,
)

CONTEXT_FLAG: Final = "--ds-sequence-parallel-size"
"""The option of cp: Ulysses, which is cp_comm_type=a2a."""
ZERO_FLAG: Final = "--zero-stage"


def _lacking(job: TrainerJob) -> Mapping[str, str]:
    layout = job.layout
    found = lacking_knobs(layout, "DeepSpeed's pipeline", "vpp", "pipeline_split")
    found |= lacking_knobs(layout, "Megatron-DeepSpeed", "zero_replicas")
    if layout.cp > 1 and layout.cp_comm_type != "a2a":
        found["cp_comm_type"] = (
            "Megatron-DeepSpeed has Ulysses alone, cp_comm_type=a2a; without the choice tokens are "
            "exchanged for heads"
        )
    return found


_RULES: Final = (
    *ARGUMENT_RULES,
    *ENGINE_RULES,
    *shape_rules("this Megatron-DeepSpeed", "megatron/arguments.py has no such flag", SHAPE_FIELDS),
    TrainerRule(
        name="flash_precision",
        source="megatron/model/transformer.py, FlashSelfAttention.forward",
        broken=lambda layout, model: model.attention == "fused" and layout.precision == "fp32",
        sentence=lambda *_: (
            "attention=fused with precision=fp32: Megatron-DeepSpeed's flash attention takes 16-bit "
            "numbers alone; search with precision bf16 or fp16"
        ),
    ),
    TrainerRule(
        name="cp_alone",
        source="megatron/core/parallel_state.py, initialize_model_parallel",
        broken=lambda layout, _: layout.cp > 1 and (layout.tp > 1 or layout.pp > 1),
        sentence=lambda layout, _: (
            f"cp={layout.cp} with tp={layout.tp} and pp={layout.pp}: Megatron-DeepSpeed's sequence "
            "parallelism works with neither; export a trial with tp=1 and pp=1, or with cp=1"
        ),
    ),
    TrainerRule(
        name="two_sequence_parallelisms",
        source="megatron/arguments.py, validate_args",
        broken=lambda layout, _: layout.cp > 1 and layout.sequence_parallel,
        sentence=lambda layout, _: (
            f"cp={layout.cp} with sequence_parallel=true: Megatron-DeepSpeed refuses its two "
            "sequence parallelisms together; export a trial with one of them"
        ),
    ),
    TrainerRule(
        name="exchanged_heads",
        source="megatron/model/transformer.py, ParallelAttention",
        broken=lambda layout, model: (
            layout.cp > 1 and model.num_heads % (layout.tp * layout.cp) != 0
        ),
        sentence=lambda layout, model: (
            f"num_heads={model.num_heads} is not divisible by tp*cp="
            f"{layout.tp * layout.cp}, which Megatron-DeepSpeed needs: it exchanges tokens for "
            "heads"
        ),
    ),
)


def _argument_groups(job: TrainerJob) -> list[list[str]]:
    """All but --deepspeed_config, which is the launcher's."""
    layout, model = job.layout, job.model
    groups = [
        *_mesh_flags(layout),
        *batch_flags(layout),
        *shape_flags(model),
        # Its NullTokenizer adds a token of its own to --vocab-size.
        ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(model.vocab_size - 1)],
        *_family_flags(model),
        *recompute_flags(layout),
        ["--seed", str(job.seed + 1)],  # as Megatron-LM it refuses 0
        *_engine_flags(layout),
    ]
    if _is_fused(job):
        groups.append(["--use-flash-attn-v2"])
    return groups + _checkpointing_flags(layout)


def _placement_groups(job: TrainerJob) -> list[list[str]]:
    layout = job.layout
    return [
        *_mesh_flags(layout),
        *batch_flags(layout, with_loss_scale=False),
        *recompute_flags(layout),
        *_engine_flags(layout),
        *_checkpointing_flags(layout),
    ]


def _mesh_flags(layout: Layout) -> list[list[str]]:
    context = [[CONTEXT_FLAG, str(layout.cp)]] if layout.cp > 1 else []
    return [*parallel_flags(layout), *context]


def _engine_flags(layout: Layout) -> list[list[str]]:
    flags = [["--deepspeed", ZERO_FLAG, str(layout.zero_stage)]]
    return flags if layout.pp > 1 else [*flags, ["--no-pipeline-parallel"]]


def _checkpointing_flags(layout: Layout) -> list[list[str]]:
    return [["--deepspeed-activation-checkpointing"]] if layout.recompute == "full" else []


def _is_fused(job: TrainerJob) -> bool:
    """Whether attention is fused: as the probe's, unless the model or the precision says no."""
    return job.model.attention != "unfused" and job.layout.precision != "fp32"


def _family_flags(model: ModelShape) -> list[list[str]]:
    flags = [
        ["--layernorm-epsilon", str(NORM_EPSILON)],
        ["--num-key-value-heads", str(model.num_kv_heads)],
        ["--no-query-key-layer-scaling"],
    ]
    if model.family == "llama":
        base = ["--rotary-position-embeddings-theta", str(int(model.rotary_base))]
        flags += [["--normalization", "rmsnorm"], ["--use-rotary-position-embeddings", *base]]
    return flags


def _values(job: TrainerJob) -> Mapping[str, Any]:
    """DeepSpeed's configuration."""
    layout = job.layout
    values = batch_zero_and_types(layout)
    if layout.precision != "fp32":
        values[layout.precision] = precision_keys(layout, layout.precision)
    return values


_NEEDS_FLASH: Final = (
    "--use-flash-attn-v2 needs flash-attn 2 on every node; without it attention keeps its scores, "
    "which need more memory: state attention: unfused to plan for that"
)
_RATE: Final = r"(?:.*? tokens per gpu per second \(tgs\): (?P<tokens_per_s_per_device>[\d.]+) \|)?"

MEGATRON_DEEPSPEED: Final = TrainerAdapter(
    name="megatron-deepspeed",
    target_version="Megatron-DeepSpeed of 2024-12 (f4157bea)",
    needs="a checkout of Megatron-DeepSpeed in MEGATRON_DEEPSPEED_DIR, DeepSpeed, and tokenized data",
    lacking=_lacking,
    rules=_RULES,
    layout_values=_values,
    layout_arguments=_argument_groups,
    placement_groups=_placement_groups,
    placement_paths=ENGINE_PATHS,
    notes=lambda job: [
        *notes(job, "Megatron-DeepSpeed"),
        *notes_of_types(job.layout),
        *([_NEEDS_FLASH] if _is_fused(job) else []),
    ],
    log=LogPatterns(
        variants=tuple(replace(each, pattern=each.pattern + _RATE) for each in STEP_LINES),
    ),
    knobs=DEEPSPEED_KNOBS,
)
