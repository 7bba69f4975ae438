"""DeepSpeed's configuration, ds_config.json: the inverse of `trainers.deepspeed`.

Keys and defaults are those of `runtime/config.py` and `runtime/zero/config.py` of DeepSpeed 0.19.8.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from layout_tuner.trainers.deepspeed import BATCH_KEYS, DEEPSPEED
from layout_tuner.trainers.found_jobs.found_job import Findings, FoundJob, Stated
from layout_tuner.trainers.found_jobs.job_file import JobFile
from layout_tuner.trainers.found_jobs.knob_settings import TrainerDefaults, note_settings
from layout_tuner.trainers.found_jobs.own_scripts.named_values import (
    ADAM,
    AUTO,
    NOT_ADAM,
    Statements,
    assume_rest,
    is_on,
    miss,
    names,
    note,
    note_count,
    statements_of,
    whole_number,
)
from layout_tuner.trainers.found_jobs.positioned import root_of

_MARKS: Final = ("zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu")
"""Keys that only DeepSpeed's configurations have at their top."""

_PRECISIONS: Final = (("bf16", "bf16"), ("bfloat16", "bf16"), ("fp16", "fp16"))
_AUTOCAST: Final = {"bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "fp16": "fp16"}

_IRRELEVANT: Final = names(
    """steps_per_print wall_clock_breakdown dump_state gradient_clipping prescale_gradients
    gradient_predivide_factor zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
    dataloader_drop_last memory_breakdown disable_allgather disable_python_gc log_level seed
    gradient_allreduce_op managed_gradient_accumulation check_overflow data_parallel_group
    pipeline.seed_layers"""
) | names(
    """ignore_unused_parameters load_from_fp32_weights elastic_checkpoint sub_group_size
    reduce_scatter allgather_partitions round_robin_gradients legacy_stage1 compute_grad_norm
    memory_efficient_linear override_module_apply cpu_offload_use_pin_memory enable_sanity_checks
    log_trace_cache_warnings param_persistence_threshold prefetch_bucket_size max_reuse_distance
    use_multi_rank_bucket_allreduce pipeline_loading_checkpoint max_live_parameters grad_hooks
    model_persistence_threshold parameter_alignment find_unused_parameters
    gather_16bit_weights_on_model_save gather_fp16_weights_on_model_save""",
    section="zero_optimization",
)
_IRRELEVANT_PREFIXES: Final = names(
    """optimizer. scheduler. bf16. bfloat16. fp16. fp32. torch_autocast. data_types. checkpoint.
    tensorboard. wandb. comet. csv_monitor. monitor_config. flops_profiler. comms_logger. timers. aio.
    nebula. zero_optimization.stage3_ zero_optimization.offload_ zero_optimization.leaf_module.
    tensor_parallel. expert_parallel. autotuning. eigenvalue."""
)
"""Sections that leave layout, model and batch as they are, or whose deciding keys are read."""

_OFF: Final[tuple[Any, ...]] = (None, False, "none", 0, "", {})
"""Optimizers with two states a weight, as here."""
_OFFLOAD: Final = "zero_optimization.offload_optimizer.device"
_REFUSED: Final = {
    "elasticity.enabled": ("global_batch_size", "the batch follows from the ranks at the start"),
    "amp.enabled": ("precision", "NVIDIA's apex chooses the types of numbers"),
    "zero_optimization.zero_quantized_weights": ("", "weights are gathered in int8 (ZeRO++)"),
    "zero_optimization.zero_quantized_gradients": ("", "gradients are reduced in int4 (ZeRO++)"),
    _OFFLOAD: ("", "optimizer states leave the device"),
    "zero_optimization.offload_param.device": ("", "weights leave the device"),
    "zero_optimization.cpu_offload": ("", "optimizer states leave the device"),
    "zero_optimization.cpu_offload_params": ("", "weights leave the device"),
    "zero_optimization.cpu_offload_param": ("", "weights leave the device"),
    "seq_parallel_communication_data_type": (
        "cp",
        "ranks share sequences, and the script says how many",
    ),
    "compile.enabled": ("", "torch.compile changes the step, which no knob here says"),
    "sparse_attention.mode": ("", "attention is sparse, which no shape here says"),
    "compression_training": ("", "weights are compressed"),
    "progressive_layer_drop.enabled": ("", "layers are left out as training goes on"),
    "curriculum_learning.enabled": ("model.seq_length", "the length of sequences changes"),
    "data_efficiency.enabled": ("", "tokens or samples are left out"),
    "bf16.bf16_master_weights_and_grads": ("", "weights of the optimizer are in bf16"),
    "bf16.bf16_optimizer_states": ("", "optimizer states are in bf16"),
    "fp16.fp16_master_weights_and_grads": ("", "weights of the optimizer are in fp16"),
    "communication_data_type": ("", "gradients are reduced in a type of their own"),
    "activation_checkpointing.cpu_checkpointing": ("recompute", "activations leave the device"),
}
"""Settings that no layout says, unless they are off: the field that they leave open, and why."""


def read_config(file: JobFile) -> Sequence[FoundJob] | None:
    """The job of a ds_config.json; None: it is another file.

    It has neither the model nor the ranks, and a command beside it may have more.
    """
    root = root_of(file, ".json")
    if root is None or not set(_MARKS) & set(root.keys()):
        return None
    findings = Findings()
    note_engine(findings, statements_of(root))
    assume_script(findings)
    return (findings.job(file=file.name, format="deepspeed", trainer=DEEPSPEED.name),)


def note_engine(
    findings: Findings, stated: Mapping[str, Stated], *, is_filled: bool = False
) -> None:
    """Notes what DeepSpeed's keys say.

    Args:
        findings: has what the command says; "auto" leaves it as it is.
        stated: the keys, with dots.
        is_filled: whether Trainer or Accelerate fill in what is "auto" or absent.
    """
    left = Statements(stated)
    _note_zero(findings, left, stated)
    _note_parallel(findings, left)
    _note_batch(findings, left, is_filled)
    _note_precision(findings, left, is_filled)
    _note_recomputation(findings, left)
    part = left.take("zero_optimization.offload_optimizer.ratio")
    is_whole = part is None or part.value == 1
    for path, (name, why) in _REFUSED.items():
        each = left.take(path)
        if path == _OFFLOAD and is_whole and offloads_optimizer(findings, each):
            continue
        if each is not None and each.value not in _OFF:
            miss(findings, each, why, name=name)
    optimizer = left.take("optimizer.type")
    if optimizer is not None and not ADAM.fullmatch(name := str(optimizer.value)) and name != AUTO:
        miss(findings, optimizer, NOT_ADAM)
    left.list_rest(findings, _IRRELEVANT, _IRRELEVANT_PREFIXES)


def assume_script(findings: Findings) -> None:
    """What a user's own script has where neither its command nor a configuration says another."""
    for name in ("tp", "cp", "pp", "ep"):
        assume_rest(findings, name, 1, "nothing states another degree; the script may")
    assume_rest(findings, "recompute", "none", "nothing turns recomputation on; the script may")
    assume_rest(findings, "sequence_parallel", False, "DeepSpeed and FSDP do not share it over tp")


def offloads_optimizer(findings: Findings, stated: Stated | None) -> bool:
    """Notes that the optimizer is on the host, if a statement says so and ZeRO has a section."""
    is_here = stated is not None and stated.value == "cpu" and bool(findings.value("zero_stage"))
    if stated is not None and is_here:
        note(findings, "offload", stated, "optimizer")
    return is_here


def _note_zero(findings: Findings, left: Statements, stated: Mapping[str, Stated]) -> None:
    whole = left.take("zero_optimization")
    stage = left.take("zero_optimization.stage")
    if whole is not None:  # an old form: true is ZeRO-1
        switch = is_on(whole)
        if switch is None:
            miss(findings, whole, "it is neither a section nor a switch", name="zero_stage")
        else:
            note(findings, "zero_stage", whole, int(switch))
    elif stage is not None and whole_number(stage) not in range(4):
        miss(findings, stage, "it is not a stage from 0 to 3", name="zero_stage")
    elif stage is not None:
        note(findings, "zero_stage", stage, whole_number(stage))
    else:
        findings.assume("zero_stage", 0, "DeepSpeed's default without zero_optimization.stage")
    hpz = left.take("zero_optimization.zero_hpz_partition_size")
    if hpz is not None and whole_number(hpz) not in (0, 1):
        why = "ZeRO++ keeps a second copy of the weights alone, and zero_replicas copies of all"
        miss(findings, hpz, why, name="zero_replicas")
    mics = left.take("zero_optimization.mics_shard_size")
    if mics is not None and whole_number(mics) != -1:
        note_count(findings, "zero_group_size", mics)
    elif findings.value("zero_group_size") is None:
        findings.assume("zero_replicas", 1, "DeepSpeed shards over all replicas")
    known = dict(stated)
    for bucket in ("reduce_bucket_size", "allgather_bucket_size"):
        path = f"zero_optimization.{bucket}"
        each = known.get(path)
        number = whole_number(each)
        if each is not None and (number is None or number % 1_000_000 or not number):
            why = "it is not a whole number of millions, of which the knob is one"
            miss(
                findings, each, "Trainer fills it in from the model" if each.value == AUTO else why
            )
            del known[path]
    if (overlap := known.get("zero_optimization.overlap_comm")) and overlap.value is None:
        del known["zero_optimization.overlap_comm"]
    for path in note_settings(
        findings,
        DEEPSPEED.knobs,
        known,
        TrainerDefaults(
            of_trainer={
                # Without ZeRO-2 it has no effect.
                "zero_optimization.overlap_comm": findings.value("zero_stage") != 2,
                "zero_optimization.reduce_bucket_size": 500_000_000,
                "zero_optimization.allgather_bucket_size": 500_000_000,
                "zero_optimization.contiguous_gradients": True,
            },
            of_knobs={"zero_optimization.overlap_comm": True},
        ),
        trainer="DeepSpeed",
    ):
        left.take(path)


def _note_parallel(findings: Findings, left: Statements) -> None:
    tp = left.take("tensor_parallel.autotp_size")
    nested = left.take("tensor_parallel.tp.tp_size", "tensor_parallel.tp_size")
    if tp is not None and whole_number(tp) != 0:
        note_count(findings, "tp", tp)
    elif nested is not None and whole_number(nested) != 1:
        miss(findings, nested, "autotp_size states the degree in training", name="tp")
    experts = left.take("expert_parallel.autoep_size")
    switch = left.take("expert_parallel.enabled")
    if experts is not None and is_on(switch):
        note_count(findings, "ep", experts)
    elif switch is not None and is_on(switch) is None:
        miss(findings, switch, "it is not a switch", name="ep")
    stages = left.take("pipeline.stages")
    if stages is not None and stages.value != AUTO:
        note_count(findings, "pp", stages)
    sequence = left.take("sequence_parallel_size")
    if sequence is not None and whole_number(sequence) != 1:
        miss(findings, sequence, "the script builds the attention of such ranks", name="cp")


def _note_batch(findings: Findings, left: Statements, is_filled: bool) -> None:
    given = {name: left.take(key) for key, name in BATCH_KEYS.items()}
    for name, each in given.items():
        if each is None:
            continue
        of_command = findings.read.get(name)
        if each.value != AUTO:
            note_count(findings, name, each)
            if of_command and findings.value(name) not in (of_command.value, None):
                miss(findings, each, f"the command says {of_command.said}", name=name)
        elif name != "global_batch_size" and not is_filled:
            miss(findings, each, "Trainer fills it in; give the launch script", name=name)
    total = given["global_batch_size"]
    if total is None or total.value == AUTO:
        if not is_filled and findings.value("micro_batch_size"):
            findings.assume("num_microbatches", 1, "DeepSpeed's default with a micro-batch alone")
    elif findings.value("tp") not in (None, 1):
        # Engine and Trainer count ranks of tp, unless the script gives an mpu.
        findings.read.pop("global_batch_size", None)
        if not (findings.value("micro_batch_size") and findings.value("num_microbatches")):
            why = "it may count tp ranks, or not"
            miss(findings, total, why, name="global_batch_size")
    elif not is_filled and given["micro_batch_size"] is None:
        findings.assume("num_microbatches", 1, "DeepSpeed's default with train_batch_size alone")


def _note_precision(findings: Findings, left: Statements, is_filled: bool) -> None:
    of_command = findings.read.get("precision")
    is_auto: Stated | None = None
    found: list[tuple[Stated, str]] = []
    for section, precision in _PRECISIONS:
        each = left.take(f"{section}.enabled")
        if each is None:
            continue
        if each.value == AUTO:
            is_auto = each
        elif (switch := is_on(each)) is None:
            miss(findings, each, "it is not a switch", name="precision")
        elif switch:
            found.append((each, precision))
    autocast, kind = left.take("torch_autocast.enabled"), left.take("torch_autocast.dtype")
    if autocast is not None and is_on(autocast):
        found.append(
            (autocast, _AUTOCAST.get(str(kind.value).rpartition(".")[2], "") if kind else "")
        )
    if len({precision for _, precision in found}) > 1 or any(not each for _, each in found):
        miss(findings, found[-1][0], "several types are on, or an unknown one", name="precision")
    elif found:
        note(findings, "precision", *found[0])
        if of_command and of_command.value not in (found[0][1], "fp32"):
            miss(findings, found[0][0], f"the command says {of_command.said}", name="precision")
    elif is_auto is not None and not is_filled:
        miss(findings, is_auto, "Trainer fills it in; give the launch script", name="precision")
    elif not is_filled:
        findings.assume("precision", "fp32", "DeepSpeed's default without bf16 and fp16")


def _note_recomputation(findings: Findings, left: Statements) -> None:
    interval = left.take("pipeline.activation_checkpoint_interval")
    if interval is not None:
        number = whole_number(interval)
        if number is None or number > 1:
            miss(findings, interval, "groups of several layers are recomputed", name="recompute")
        elif number:
            note(findings, "recompute", interval, "full")
    partition = left.take("pipeline.partition", "pipeline.partition_method")
    if partition is not None:
        miss(findings, partition, "the script's list of layers is cut so")
    sections = dict(left.take_all("activation_checkpointing."))
    settings = [each for each in sections.values() if each.value not in _OFF]
    if settings and findings.value("recompute") is None:
        why = "it is how the script recomputes activations, and not which"
        miss(findings, settings[0], why, name="recompute")
