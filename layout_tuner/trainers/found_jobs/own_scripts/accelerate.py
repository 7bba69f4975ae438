"""Accelerate's YAML and the options of `accelerate launch`: the inverse of `trainers.accelerate`.

Keys and defaults are those of `commands/launch.py`, `utils/launch.py` and `utils/dataclasses.py` of
accelerate 1.15.0. `num_processes` are the ranks of all machines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from layout_tuner.trainers.accelerate import ACCELERATE, MX_KEY, PLUGIN_KEYS
from layout_tuner.trainers.found_jobs.found_job import (
    Findings,
    FoundJob,
    JobFileInvalidError,
    Stated,
)
from layout_tuner.trainers.found_jobs.job_file import JobFile
from layout_tuner.trainers.found_jobs.own_scripts.deepspeed import (
    assume_script,
    note_engine,
    offloads_optimizer,
)
from layout_tuner.trainers.found_jobs.own_scripts.named_values import (
    AUTO,
    Statements,
    configuration_named,
    is_on,
    leave_open,
    miss,
    names,
    note,
    note_choice,
    note_count,
    statements_of,
    whole_number,
)
from layout_tuner.trainers.found_jobs.own_scripts.trainer_options import (
    FSDP_STRATEGIES,
    MIXED_PRECISIONS,
    note_fsdp_strategy,
)
from layout_tuner.trainers.found_jobs.positioned import YAML_SUFFIXES, root_of

_MARKS: Final = ("distributed_type", "compute_environment")
_PREFIXES: Final = {"fsdp_config": "fsdp_", "fp8_config": "fp8_", "dynamo_config": "dynamo_"}
"""Sections whose keys may lack the prefix that the options have."""
_SWITCHES: Final = {
    "use_deepspeed": "DEEPSPEED",
    "use_fsdp": "FSDP",
    "use_megatron_lm": "MEGATRON_LM",
    "multi_gpu": "MULTI_GPU",
    "cpu": "NO",
}
"""Options that choose the kind of the job."""
_RING: Final = {"allgather": "all_gather", "alltoall": "p2p"}
"""torch's `set_rotate_method`: shards of keys and values are gathered, or passed around."""

_IRRELEVANT: Final = names(
    """compute_environment machine_rank main_process_ip main_process_port rdzv_backend same_network
    main_training_function use_cpu gpu_ids debug downcast_bf16 enable_cpu_affinity rdzv_conf
    num_cpu_threads_per_process max_restarts monitor_interval role log_dir tee module no_python
    quiet command_file commands ipex_config mpirun_config gradient_clipping zero3_init_flag
    zero3_save_16bit_model use_parallelism_config env start_method hostfile config_file
    parallelism_config_cp_backend parallelism_config_sp_backend"""
)
_IRRELEVANT_PREFIXES: Final = (
    *("tpu_", "aws_", "deepspeed_", "offload_", "fp8_", "dynamo_", "mpirun_", "ipex_"),
    *("fsdp_auto_wrap", "fsdp_transformer_layer", "fsdp_backward", "fsdp_forward", "fsdp_state"),
    *("fsdp_use_orig", "fsdp_cpu_ram", "fsdp_sync", "fsdp_min_num", "fsdp_ignored", "fsdp_limit"),
    *("megatron_lm_gradient_clipping", "megatron_lm_no_", "megatron_lm_eod", "megatron_lm_use_rot"),
    *("megatron_lm_attention_backend", "megatron_lm_attention_soft", "megatron_lm_calculate"),
    *("parallelism_config_sp_", "megatron_lm_recompute_num"),
)
_LISTED: Final = {
    "offload_optimizer_device": "optimizer states leave the device",
    "offload_param_device": "weights leave the device",
    "fsdp_offload_params": "weights leave the device",
    "fsdp_cpu_offload": "weights leave the device",
    "fsdp_activation_checkpointing_offload": "activations leave the device",
    "megatron_lm_optimizer_cpu_offload": "optimizer states leave the device",
    "megatron_lm_use_precision_aware_optimizer": "optimizer states have types of their own",
    "dynamo_backend": "torch.compile changes the step, which no knob here says",
}


def read_config(file: JobFile) -> Sequence[FoundJob] | None:
    """The job of a file for `accelerate launch --config_file`; None: it is another file.

    It has neither the model nor the batch, except for some kinds of jobs.
    """
    root = root_of(file, *YAML_SUFFIXES, ".json")
    if root is None or not set(_MARKS) & set(root.keys()):
        return None
    findings = Findings()
    note_accelerate(findings, flattened(statements_of(root)), file)
    assume_script(findings)
    return (findings.job(file=file.name, format="accelerate", trainer=ACCELERATE.name),)


def flattened(stated: Mapping[str, Stated]) -> dict[str, Stated]:
    """Keys of sections under the names that the options of `accelerate launch` have."""
    found: dict[str, Stated] = {}
    for path, each in stated.items():
        section, _, key = path.rpartition(".")
        prefix = _PREFIXES.get(section, "")
        found[key if key.startswith(prefix) else f"{prefix}{key}"] = each
    return found


def note_accelerate(
    findings: Findings, stated: Mapping[str, Stated], file: JobFile, *, with_trainer: bool = False
) -> None:
    """Notes what accelerate's settings say.

    Args:
        findings: has what the command says.
        stated: the file's keys as `flattened` gives them, with the launcher's options over them.
        file: the job's, beside which DeepSpeed's may lie.
        with_trainer: whether Trainer's options are noted, which beat the file's precision.

    Raises:
        JobFileInvalidError: the job is Amazon SageMaker's.
    """
    left = Statements(stated)
    where = left.take("compute_environment")
    if where is not None and "SAGEMAKER" in str(where.value):
        raise JobFileInvalidError(
            f"{file.name}: jobs of Amazon SageMaker are not read; give the configuration of a job "
            "that `accelerate launch` starts by itself (compute_environment: LOCAL_MACHINE)"
        )
    _note_ranks(findings, left)
    precision, mx = left.take("mixed_precision"), left.take(f"fp8_{MX_KEY}")
    if precision is not None and precision.value == "fp8" and is_on(mx):
        note(findings, "precision", precision, "mxfp8")
    elif not (with_trainer and "precision" in findings.read):
        note_choice(findings, "precision", precision, MIXED_PRECISIONS)
    kind = _kind(findings, left)
    if kind == "FSDP":
        _note_fsdp(findings, left)
    elif kind == "DEEPSPEED":
        _note_deepspeed(findings, left, file, with_trainer=with_trainer)
    elif kind == "MEGATRON_LM":
        _note_megatron(findings, left)
    elif kind is not None:
        findings.assume("zero_stage", 0, "without FSDP and DeepSpeed each replica holds all states")
    if kind != "FSDP":
        dict(left.take_all("fsdp_"))  # without effect
        _open_axes(findings, left)
    if kind is not None:
        findings.assume("precision", "fp32", "accelerate's default without mixed_precision")
    for name, why in _LISTED.items():
        each = left.take(name)
        if each is not None and str(each.value).lower() not in ("none", "no", "false"):
            miss(findings, each, why)
    left.list_rest(findings, _IRRELEVANT, _IRRELEVANT_PREFIXES)


def _note_ranks(findings: Findings, left: Statements) -> None:
    note_count(findings, "num_nodes", left.take("num_machines"))
    note_count(findings, "num_devices", left.take("num_processes"))
    findings.assume("num_nodes", 1, "accelerate's default of num_machines")
    nodes, ranks = findings.value("num_nodes"), findings.value("num_devices")
    if nodes and ranks and ranks % nodes == 0:
        per_node = ranks // nodes
        findings.assume("devices_per_node", per_node, "num_processes over num_machines")


def _kind(findings: Findings, left: Statements) -> str | None:
    """The kind of the job; None: it is not understood, and `zero_stage` is open."""
    stated = left.take("distributed_type")
    by_option = [(left.take(option), kind) for option, kind in _SWITCHES.items()]
    for each, kind in by_option:
        if each is not None and is_on(each):
            return kind
    if stated is None:
        why = "the file of `accelerate config` on the machine chooses the kind of the job"
        said = "accelerate launch without --config_file"
        leave_open(findings, ("zero_stage", "precision"), said, why)
        return None
    if is_on(stated) is False:  # NO without quotes
        return "NO"
    kind = str(stated.value).upper()
    if kind in ("NO", "FSDP", "DEEPSPEED", "MEGATRON_LM") or kind.startswith("MULTI_"):
        return kind
    miss(findings, stated, "this kind of job has no layout here", name="zero_stage")
    return None


def _note_fsdp(findings: Findings, left: Statements) -> None:
    version = left.take("fsdp_version")
    reshard, strategy = left.take("fsdp_reshard_after_forward"), left.take("fsdp_sharding_strategy")
    number = 1 if version is None else whole_number(version)
    if version is not None and number not in (1, 2):
        miss(findings, version, "FSDP has the versions 1 and 2", name="zero_stage")
    elif number == 2:
        if reshard is None:
            findings.assume("zero_stage", 3, "FSDP 2's default without fsdp_reshard_after_forward")
            if (
                strategy is not None
                and FSDP_STRATEGIES.get(str(strategy.value).lower(), (3,))[0] != 3
            ):
                miss(findings, strategy, "FSDP 2 does not read it", name="zero_stage")
        elif (switch := is_on(reshard)) is not None:
            note(findings, "zero_stage", reshard, 3 if switch else 2)
        else:
            note_fsdp_strategy(findings, reshard, reshard.value)
    elif strategy is not None:
        note_fsdp_strategy(findings, strategy, strategy.value)
    elif reshard is not None and is_on(reshard) is None:
        note_fsdp_strategy(findings, reshard, reshard.value)
        if findings.value("zero_stage") != 3:
            why = "FSDP 1 reads fsdp_sharding_strategy, which is FULL_SHARD by default"
            miss(findings, reshard, why, name="zero_stage")
    else:
        findings.assume("zero_stage", 3, "FSDP 1's default without fsdp_sharding_strategy")
    recompute = left.take("fsdp_activation_checkpointing")
    if recompute is not None and is_on(recompute) is None:
        miss(findings, recompute, "it is not a switch", name="recompute")
    elif recompute is not None and (is_on(recompute) or "recompute" not in findings.read):
        note(findings, "recompute", recompute, "full" if is_on(recompute) else "none")
    _note_axes(findings, left)


def _note_axes(findings: Findings, left: Statements) -> None:
    """The sizes of `parallelism_config`; dp_shard_size follows from the ranks."""
    copies = left.take("parallelism_config_dp_replicate_size")
    left.take("parallelism_config_dp_shard_size")
    if copies is not None and whole_number(copies) != 1:
        note_count(findings, "zero_replicas", copies)
    if findings.value("zero_group_size") is None:
        findings.assume("zero_replicas", 1, "FSDP shards over all replicas")
    note_count(findings, "tp", left.take("parallelism_config_tp_size"))
    note_count(findings, "cp", left.take("parallelism_config_cp_size"))
    by = left.take("parallelism_config_cp_comm_strategy")
    if findings.value("cp") not in (None, 1):
        note_choice(findings, "cp_comm_type", by, _RING)
        findings.assume("cp_comm_type", "all_gather", "torch's default of context parallelism")
    sequence = left.take("parallelism_config_sp_size")
    if sequence is not None and whole_number(sequence) != 1:
        miss(findings, sequence, "the script builds the attention of such ranks", name="cp")


def _open_axes(findings: Findings, left: Statements) -> None:
    """Sizes of `parallelism_config` beside another kind than FSDP: accelerate refuses most."""
    for axis, name in (("tp", "tp"), ("cp", "cp"), ("sp", "cp"), ("dp_replicate", "zero_replicas")):
        each = left.take(f"parallelism_config_{axis}_size")
        if each is not None and whole_number(each) != 1:
            miss(findings, each, "what such ranks share is the script's", name=name)
    left.take("parallelism_config_dp_shard_size")
    if (each := left.take("seq_parallel_communication_data_type")) is not None:
        miss(findings, each, "ranks share sequences, and the script says how many", name="cp")


def _note_deepspeed(
    findings: Findings, left: Statements, file: JobFile, *, with_trainer: bool
) -> None:
    named = left.take("deepspeed_config_file")
    stage, steps = left.take("zero_stage"), left.take("gradient_accumulation_steps")
    if named is not None and named.value not in ("none", "None"):
        found = configuration_named(file, named)
        if found is None:
            why = "the file is not beside it: give it, or state what it says"
            fields = ("zero_stage", "precision")
            leave_open(findings, fields, named.said, named.unknown or why, line=named.line)
        else:
            keys = statements_of(found[1], named=found[0])
            note_engine(findings, keys, is_filled=True)
        return
    if stage is None:
        findings.assume("zero_stage", 2, "accelerate's default of zero_stage")
    elif whole_number(stage) not in range(4):
        miss(findings, stage, "it is not a stage from 0 to 3", name="zero_stage")
    else:
        note(findings, "zero_stage", stage, whole_number(stage))
    if offloads_optimizer(findings, left.look("offload_optimizer_device")):
        left.take("offload_optimizer_device")
    findings.assume("zero_replicas", 1, "DeepSpeed shards over all replicas")
    if "num_microbatches" not in findings.read:
        if steps is not None and steps.value != AUTO:
            note_count(findings, "num_microbatches", steps)
        elif steps is not None and not with_trainer:
            miss(findings, steps, "the script fills it in", name="num_microbatches")
        findings.assume("num_microbatches", 1, "accelerate's default with DeepSpeed")


def _note_megatron(findings: Findings, left: Statements) -> None:
    def take(name: str) -> Stated | None:
        return left.take(f"megatron_lm_{name}")

    for key, name in (
        *PLUGIN_KEYS.items(),
        ("expert_model_parallel_size", "ep"),
        ("expert_tensor_parallel_size", "etp"),
        ("context_parallel_size", "cp"),
    ):
        note_count(findings, name, take(key))
    for name in PLUGIN_KEYS.values():
        findings.assume(name, 1, "the default of accelerate's plugin for Megatron-LM")
    if findings.value("cp") is None and not findings.is_open("cp"):
        why = "accelerate 1.15 takes 2 then, and versions without the key have 1"
        findings.miss("no megatron_lm_context_parallel_size", why, name="cp")
    if findings.value("cp") not in (None, 1):
        findings.assume("cp_comm_type", "p2p", "Megatron-LM's default")
    _note_switch(findings, "sequence_parallel", take("sequence_parallelism"), (False, True))
    _note_switch(findings, "zero_stage", take("use_distributed_optimizer"), (0, 1))
    custom = take("use_custom_fsdp")
    if custom is not None and is_on(custom) is not False:
        miss(findings, custom, "Megatron's FSDP shards as its own options say", name="zero_stage")
    split = take("decoder_last_pipeline_num_layers")
    if split is not None:
        miss(findings, split, "the last stage has layers of its own", name="pipeline_split")
    activations = take("recompute_activations")
    granularity, method = take("recompute_granularity"), take("recompute_method")
    if activations is not None and is_on(activations):
        note(findings, "recompute", activations, "selective")
    elif granularity is None:
        why = "accelerate 1.15 recomputes all then, and versions without the key nothing"
        findings.miss("no megatron_lm_recompute_granularity", why, name="recompute")
    elif method is not None and method.value == "block" and granularity.value == "full":
        miss(findings, method, "some layers of a stage are recomputed", name="recompute")
    else:
        choices = {"full": "full", "selective": "selective"}
        note_choice(findings, "recompute", granularity, choices)


def _note_switch(
    findings: Findings, name: str, stated: Stated | None, values: tuple[object, object]
) -> None:
    """Notes the value of a switch, by default that of false."""
    if stated is None:
        findings.assume(name, values[0], "the default of accelerate's plugin for Megatron-LM")
    elif (switch := is_on(stated)) is None:
        miss(findings, stated, "it is not a switch", name=name)
    else:
        note(findings, name, stated, values[switch])
