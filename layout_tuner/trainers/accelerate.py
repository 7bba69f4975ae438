"""A user's own script with Hugging Face Accelerate.

The keys are those of `commands/config/config_args.py`, `commands/launch.py` and
`utils/dataclasses.py` of accelerate 1.15.0. Replicas alone are DDP, with ZeRO-1 they are
DeepSpeed's, with ZeRO-2 and 3 FSDP 2's; tensor and pipeline parallelism are those of its Megatron-
LM plugin, since its `parallelism_config` has no pipeline and works with FSDP 2 only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.trainers.adapter import (
    INITIAL_LOSS_SCALE,
    TrainerAdapter,
    TrainerJob,
    TrainerRule,
    lacking_knobs,
    narrow_rule,
    shape_rules,
)
from layout_tuner.trainers.megatron_lm import recompute_method

MIXED_PRECISION: Final = {"fp32": "no", "bf16": "bf16", "fp16": "fp16", "fp8": "fp8"}

PLUGIN_KEYS: Final = {
    "tp_degree": "tp",
    "pp_degree": "pp",
    "num_micro_batches": "num_microbatches",
}
"""Keys of its plugin for Megatron-LM by fields of the layout, without their prefix."""

MX_KEY: Final = "use_mxfp8_block_scaling"
_NARROW: Final[Mapping[str, Mapping[str, Any]]] = {
    "fp8": {"backend": "TE", "fp8_format": "HYBRID"},
    "mxfp8": {"backend": "TE", "fp8_format": "E4M3", MX_KEY: True},
}
"""Products by Transformer Engine, which has to be installed (utils/transformer_engine.py)."""


def accelerate_backend(layout: Layout) -> str:
    """Accelerate's `distributed_type`."""
    if layout.tp > 1 or layout.cp > 1 or layout.pp > 1:
        return "MEGATRON_LM"
    if layout.zero_stage:
        return "DEEPSPEED" if layout.zero_stage == 1 else "FSDP"
    return "MULTI_GPU" if layout.dp > 1 else "NO"


def _lacking(job: TrainerJob) -> dict[str, str]:
    layout = job.layout
    lacking = lacking_knobs(layout, "accelerate's file", "vpp", "pipeline_split")
    if "pipeline_split" in lacking:
        lacking["pipeline_split"] += ", unless your script gives its plugin other_megatron_args"
    if layout.cp > 1 and layout.cp_comm_type != "p2p":
        lacking["cp_comm_type"] = (
            "accelerate's file has no key for it; without the choice Megatron-LM passes keys and values "
            "around a ring, unless your script gives its plugin other_megatron_args"
        )
    is_megatron = accelerate_backend(layout) == "MEGATRON_LM"
    for name, held in (("ep", "all experts"), ("etp", "whole experts")):
        if getattr(layout, name) > 1 and not is_megatron:
            lacking[name] = (
                f"accelerate divides experts with Megatron-LM only; without {name} every rank holds "
                f"{held}, unless your script divides them"
            )
    if layout.zero_stage > 1 and is_megatron:
        lacking["zero_stage"] = (
            "accelerate's plugin for Megatron-LM has ZeRO-1 and no more; without "
            f"zero_stage={layout.zero_stage} every replica holds whole weights, gradients and "
            "optimizer states"
        )
    if layout.zero_stage == 1 or is_megatron:
        lacking |= lacking_knobs(layout, "accelerate's file", "zero_replicas")
    if without := _without_recompute(layout):
        lacking["recompute"] = without
    return lacking


def _levers(layout: Layout) -> tuple[str, ...]:
    """The levers of memory that the file can state."""
    known = {"DEEPSPEED": ("optimizer",), "MEGATRON_LM": ("layers",)}
    return known.get(accelerate_backend(layout), ())


def _without_recompute(layout: Layout) -> str:
    """What happens to a layout's recomputation where accelerate lacks it; empty: it does not."""
    backend = accelerate_backend(layout)
    if backend == "FSDP" and layout.recompute != "selective":
        return ""
    if backend == "FSDP":
        return (
            "accelerate's FSDP recomputes whole blocks or nothing; without selective recomputation no "
            "activations are recomputed, unless your script does it"
        )
    if backend != "MEGATRON_LM":
        if layout.recompute == "none":
            return ""
        return (
            "accelerate turns recomputation on for Megatron-LM and FSDP only; without it no "
            "activations are recomputed, unless your script does it"
        )
    if layout.recompute == "full":
        return ""
    return (
        f"accelerate's file cannot say recompute={layout.recompute} to Megatron-LM; without it every "
        "block is recomputed, unless your script gives its plugin other_megatron_args"
    )


_PLUGIN: Final = "utils/dataclasses.py, MegatronLMPlugin"


def _with_plugin(rule: TrainerRule) -> TrainerRule:
    """The rule where the job is the Megatron-LM plugin's."""
    return replace(
        rule,
        broken=lambda layout, model: (
            accelerate_backend(layout) == "MEGATRON_LM" and rule.broken(layout, model)
        ),
    )


_RULES: Final = (
    *map(_with_plugin, shape_rules("accelerate's plugin for Megatron-LM", _PLUGIN)),
    _with_plugin(
        narrow_rule(
            _PLUGIN,
            "with tp or pp: accelerate's plugin does not pass it to Megatron-LM; use the format "
            "megatron-lm",
        )
    ),
    replace(
        narrow_rule(
            "utils/transformer_engine.py, apply_fp8_autowrap",
            "has no recipe in accelerate, which has those of fp8 and mxfp8; use the format megatron-lm",
            tuple(_NARROW),
        ),
        name="recipe",
    ),
)


def _values(job: TrainerJob) -> Mapping[str, Any]:
    """The file for `accelerate launch --config_file`."""
    layout = job.layout
    backend = accelerate_backend(layout)
    deepspeed = {
        "zero_stage": layout.zero_stage,
        "gradient_accumulation_steps": layout.num_microbatches,
        "zero3_init_flag": False,
        "deepspeed_multinode_launcher": "standard",
        **({"offload_optimizer_device": "cpu"} if layout.offload == "optimizer" else {}),
    }
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": backend,
        "mixed_precision": MIXED_PRECISION.get(layout.precision, "fp8"),
        "num_machines": layout.num_nodes,
        "num_processes": layout.num_devices,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": False,
        "main_training_function": "main",
        **({"megatron_lm_config": _megatron_lm(job)} if backend == "MEGATRON_LM" else {}),
        **({"deepspeed_config": deepspeed} if backend == "DEEPSPEED" else {}),
        **(_fsdp(layout) if backend == "FSDP" else {}),
        **({"fp8_config": _NARROW[layout.precision]} if layout.precision in _NARROW else {}),
        **({"dynamo_config": {"dynamo_backend": "INDUCTOR"}} if job.compile else {}),
    }


def _megatron_lm(job: TrainerJob) -> dict[str, Any]:
    layout = job.layout
    values: dict[str, Any] = {
        **{key: getattr(layout, name) for key, name in PLUGIN_KEYS.items()},
        "sequence_parallelism": layout.sequence_parallel,
        "use_distributed_optimizer": layout.zero_stage == 1,
        "gradient_clipping": 1.0,
        "context_parallel_size": layout.cp,  # 2 where the file says nothing
        # these three also where the file says nothing
        "recompute_granularity": "full",
        "recompute_method": recompute_method(layout)[0],
        "recompute_num_layers": int(recompute_method(layout)[1]),
        "use_rotary_position_embeddings": job.model.family == "llama",
    }
    return {f"megatron_lm_{key}": value for key, value in values.items()}


def accelerate_environment(layout: Layout) -> Mapping[str, str]:
    """What the file cannot say: the accumulation of plain replicas and of FSDP."""
    if accelerate_backend(layout) in ("NO", "MULTI_GPU", "FSDP"):
        return {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": str(layout.num_microbatches)}
    return {}


def _fsdp(layout: Layout) -> dict[str, Any]:
    """FSDP 2. Weights that stay whole after the forward pass are ZeRO-2; HSDP has copies."""
    sections: dict[str, Any] = {
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": layout.zero_stage == 3,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_activation_checkpointing": layout.recompute == "full",
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }
    }
    if layout.zero_replicas > 1:
        sections["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": layout.zero_replicas,
            "parallelism_config_dp_shard_size": layout.zero_group_size,
        }
    return sections


def _notes(job: TrainerJob) -> list[str]:
    layout = job.layout
    notes = [
        f"the model and the data are your script's: give its DataLoader batch_size="
        f"{layout.micro_batch_size}; it gets the layout and the model's shape as LAYOUT_* in its "
        "environment",
        "on CPU ranks `accelerate launch` starts one process whatever the file says, so start them with "
        f"torchrun and compare Accelerator().num_processes with {layout.num_devices}",
    ]
    if accelerate_backend(layout) == "DEEPSPEED":
        notes.append("zero_stage=1 is DeepSpeed's: install deepspeed and transformers")
        if layout.precision == "bf16" and layout.num_microbatches > 1:
            # Its plugin has no key for the type (DeepSpeedEngine.get_data_types).
            notes.append(
                f"bf16 with zero_stage=1: DeepSpeed adds up the gradients of its {layout.num_microbatches} "
                "micro-batches in bf16, and the probe did in fp32: set accelerator.state."
                'deepspeed_plugin.deepspeed_config["data_types"] = {"grad_accum_dtype": "fp32"} before '
                "prepare()"
            )
    if accelerate_backend(layout) == "FSDP":
        notes.append(
            f"zero_stage={layout.zero_stage} is FSDP's: a model without _no_split_modules needs the "
            "class of its blocks in fsdp_transformer_layer_cls_to_wrap"
        )
    if accelerate_backend(layout) == "MEGATRON_LM":
        if layout.precision == "fp16":
            notes.append(
                "fp16 of Megatron-LM starts at a loss scale of 2^32, so that the first 16 steps or so do "
                "not train: give its plugin other_megatron_args with initial_loss_scale="
                f"{INITIAL_LOSS_SCALE}"
            )
        notes.append(
            f"tp={layout.tp} and pp={layout.pp} need a script for accelerate's Megatron-LM plugin, and "
            "Megatron-LM itself"
        )
    return notes


ACCELERATE: Final = TrainerAdapter(
    name="accelerate",
    target_version="accelerate 1.15.0",
    needs="accelerate, and a training script of your own in TRAIN_SCRIPT",
    lacking=_lacking,
    levers=_levers,
    rules=_RULES,
    layout_values=_values,
    notes=_notes,
)
