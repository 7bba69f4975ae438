"""A user's own script with DeepSpeed.

The keys are those of `runtime/config.py`, `runtime/zero/config.py` and
`runtime/tensor_parallel/config.py` of DeepSpeed 0.19.8, and of its
`module_inject/auto_ep_config.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.trainers.adapter import (
    INITIAL_LOSS_SCALE,
    TrainerAdapter,
    TrainerJob,
    TrainerRule,
    lacking_knobs,
    narrow_rule,
)
from layout_tuner.trainers.knobs.deepspeed import DEEPSPEED_KNOBS
from layout_tuner.trainers.log_patterns import LogPatterns, StepPattern

_LOG: Final = LogPatterns(
    variants=(
        StepPattern(
            source="DeepSpeed's pipeline engine",
            pattern=(
                r"steps: (?P<index>\d+) loss: (?P<loss>\S+) (?:\S+: \S+ )*?iter time \(s\): "
                r"(?P<step_time_s>[\d.]+) samples/sec:"
            ),
        ),
        StepPattern(
            source="DeepSpeed's engine, with steps_per_print",
            pattern=r"step=(?P<index>\d+), skipped=(?P<skipped_total>\d+), lr=",
        ),
    ),
)
"""The engine's line has no time. The pipeline engine prints both, with the same number."""


def _lacking(job: TrainerJob) -> dict[str, str]:
    layout = job.layout
    lacking = lacking_knobs(layout, "DeepSpeed", "vpp")
    if sum(layout.counted_ends):
        lacking["pipeline_split"] = (
            "DeepSpeed's pipeline splits your script's list of layers (pipeline.partition); without the "
            "choice the stages are those of your script"
        )
    if layout.zero_stage < 3:
        lacking |= lacking_knobs(layout, "DeepSpeed before ZeRO-3", "zero_replicas")
    if layout.etp > 1:
        lacking["etp"] = (
            "DeepSpeed's AutoEP keeps the weights of an expert whole; without etp a rank holds "
            f"{layout.etp} times what was measured of experts"
        )
    if layout.sequence_parallel and layout.tp > 1:
        lacking["sequence_parallel"] = (
            "DeepSpeed's AutoTP does not share the sequence over tp; without it activations outside of "
            f"the matrix products are held {layout.tp} times"
        )
    return lacking


ENGINE_RULES: Final = (
    TrainerRule(
        name="zero_in_pipeline",
        source="runtime/pipe/engine.py, PipelineEngine",
        broken=lambda layout, _: layout.pp > 1 and layout.zero_stage > 1,
        sentence=lambda layout, _: (
            f"zero_stage={layout.zero_stage} with pp={layout.pp}: DeepSpeed's pipeline "
            "accumulates whole gradients, and so has ZeRO-1 alone; export a trial with pp=1, or of a "
            "lower stage"
        ),
    ),
    narrow_rule(
        "runtime/config.py has no such key",
        "has no key in DeepSpeed's configuration; search with precision bf16",
    ),
)
"""The rules of every job of DeepSpeed's engines."""

_RULES: Final = (
    TrainerRule(
        name="cp",
        source="runtime/config.py: sequence_parallel_size builds no attention",
        broken=lambda layout, _: layout.cp > 1,
        sentence=lambda layout, _: (
            f"cp={layout.cp}: no key of ds_config.json turns sequence parallelism on, which a "
            "script builds with DeepSpeed's DistributedAttention (Ulysses); export a trial with cp=1, "
            "or use the format megatron-deepspeed"
        ),
    ),
    TrainerRule(
        name="tp_in_pipeline",
        source="module_inject/auto_tp.py; DeepSpeed's issue 7147",
        broken=lambda layout, _: layout.tp > 1 and layout.pp > 1,
        sentence=lambda layout, _: (
            f"tp={layout.tp} with pp={layout.pp}: DeepSpeed trains with AutoTP or with "
            "pipeline stages, not with both; export a trial with tp=1 or pp=1, or use the format "
            "megatron-deepspeed"
        ),
    ),
    TrainerRule(
        name="ep_in_pipeline",
        source="module_inject/auto_ep.py, AutoEP.ep_parser",
        broken=lambda layout, _: layout.ep > 1 and layout.pp > 1,
        sentence=lambda layout, _: (
            f"ep={layout.ep} with pp={layout.pp}: DeepSpeed's AutoEP looks for the experts of "
            "Hugging Face's models, and finds none in pipeline stages; export a trial with ep=1 or pp=1"
        ),
    ),
    TrainerRule(
        name="mics_was_removed",
        source="runtime/config.py, _reject_removed_config_keys; DeepSpeed's issue 8489",
        versions="0.19.7 and later",
        broken=lambda layout, _: layout.zero_stage == 3 and layout.zero_replicas > 1,
        sentence=lambda layout, _: (
            f"zero_replicas={layout.zero_replicas} with zero_stage=3: DeepSpeed removed MiCS, its "
            "only smaller groups for weights, in 0.19.7; export a trial with zero_replicas=1"
        ),
    ),
    *ENGINE_RULES,
)


ENGINE_PATHS: Final = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
    *("steps_per_print", "zero_optimization.stage", "zero_optimization.offload_optimizer"),
    *("data_types", "bf16", "fp16", "tensor_parallel", "expert_parallel", "pipeline"),
)
"""The keys of ds_config.json that set layout, batch and precision, and those of a probe's log."""


BATCH_KEYS: Final = {
    "train_batch_size": "global_batch_size",
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "gradient_accumulation_steps": "num_microbatches",
}
"""The keys of the batch by what they are here; any two of them give the third."""


def precision_keys(layout: Layout, precision: str) -> dict[str, Any]:
    """The section of a precision; up to 0.17.0 fp16 without further keys starts at 2^32."""
    is_on = layout.precision == precision
    power = {"initial_scale_power": INITIAL_LOSS_SCALE.bit_length() - 1}
    return {"enabled": is_on, **(power if is_on and precision == "fp16" else {})}


def batch_zero_and_types(layout: Layout) -> dict[str, Any]:
    """The keys that every DeepSpeed job has; it checks train batch = micro batch * steps * dp."""
    zero: dict[str, Any] = {"stage": layout.zero_stage}
    if layout.zero_stage >= 2:
        zero["overlap_comm"] = True  # the default of stage 3 alone
    if layout.offload == "optimizer":
        zero["offload_optimizer"] = {"device": "cpu"}
    values: dict[str, Any] = {
        **{key: getattr(layout, name) for key, name in BATCH_KEYS.items()},
        "steps_per_print": 1,
        "zero_optimization": zero,
    }
    if layout.precision == "bf16" and layout.zero_stage:
        # As the probe accumulates. The engine refuses it without ZeRO (_do_optimizer_sanity_check).
        values["data_types"] = {"grad_accum_dtype": "fp32"}
    return values


def notes_of_types(layout: Layout) -> list[str]:
    """What the engine's types of numbers change."""
    if layout.precision != "bf16" or layout.zero_stage:
        return []
    return [
        "bf16 with zero_stage=0: DeepSpeed accumulates gradients in bf16 there, and refuses fp32, in "
        "which the probe did; with zero_stage=1 it accumulates in fp32"
    ]


def _values(job: TrainerJob) -> Mapping[str, Any]:
    """ds_config.json."""
    layout = job.layout
    values: dict[str, Any] = {
        **batch_zero_and_types(layout),
        **{precision: precision_keys(layout, precision) for precision in ("bf16", "fp16")},
    }
    if layout.tp > 1:
        values["tensor_parallel"] = {"autotp_size": layout.tp}
        # Its check of the batch counts tp ranks, unless the script gives an mpu; without the key
        # the engine sets it by itself.
        del values["train_batch_size"]
    if layout.ep > 1:
        values["expert_parallel"] = {"enabled": True, "autoep_size": layout.ep}
    if layout.pp > 1:
        values["pipeline"] = {
            "stages": layout.pp,
            "activation_checkpoint_interval": 1 if layout.recompute == "full" else 0,
        }
    return values


def _notes(job: TrainerJob) -> list[str]:
    layout = job.layout
    notes = [
        "the model is your script's: it gets the layout and the model's shape as LAYOUT_* in its "
        "environment, and must call deepspeed.initialize with --deepspeed_config",
        "an option --local_rank of the script must default to -1: torchrun and srun give LOCAL_RANK in "
        "the environment only",
    ]
    if layout.pp > 1:
        notes.append(
            f"pp={layout.pp} needs a script that builds PipelineModule(num_stages={layout.pp}): "
            "DeepSpeed does not cut a model by itself"
        )
    if layout.tp > 1:
        notes.append(
            f"tp={layout.tp} is AutoTP, which shards models of Hugging Face; the ranks of a group must "
            f"read the same data. DeepSpeed counts them in its train_batch_size and samples per second, "
            f"so that both are {layout.tp} times those of a step"
        )
    if layout.tp > 1 and layout.zero_stage == 3:
        notes.append(f"tp={layout.tp} with zero_stage=3 needs DeepSpeed 0.19.4 or later")
    if layout.ep > 1:
        notes.append(
            f"ep={layout.ep} is AutoEP, which finds the experts of models of Hugging Face; a model of "
            f"your script's own needs deepspeed.moe.layer.MoE(ep_size={layout.ep}), which ZeRO-3 refuses"
        )
    if layout.recompute != "none" and (layout.pp == 1 or layout.recompute == "selective"):
        notes.append(
            f"recompute={layout.recompute} is for your script to do, with torch.utils.checkpoint or "
            "deepspeed.checkpointing: no key of ds_config.json turns it on here"
        )
    if layout.precision == "fp32":
        notes.append(
            "with neither bf16 nor fp16 enabled DeepSpeed trains in fp32, as the probe did"
        )
    if job.compile:
        notes.append("the probe's compile=true is for your script: engine.compile()")
    return notes + notes_of_types(layout)


DEEPSPEED: Final = TrainerAdapter(
    name="deepspeed",
    target_version="DeepSpeed 0.19.8",
    # Without ZeRO there is no section that offloads (runtime/zero/config.py).
    levers=lambda layout: ("optimizer",) if layout.zero_stage else (),
    needs="DeepSpeed, and a training script of your own in TRAIN_SCRIPT",
    lacking=_lacking,
    rules=_RULES,
    layout_values=_values,
    placement_paths=ENGINE_PATHS,
    notes=_notes,
    log=_LOG,
    knobs=DEEPSPEED_KNOBS,
)
