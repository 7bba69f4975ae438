"""Jobs of Primus: an experiment's YAML, with overrides of a trainer and of a model by their names.

Values such as `${PRIMUS_TP:1}` count with their default. Files that `extends`, `config` and `model`
name are read where they lie beside; otherwise what Primus' own files of these names say is assumed
(`primus_presets`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from layout_tuner.documents.reading import shown
from layout_tuner.search_spaces.layouts.schedules import V_SLOTS
from layout_tuner.trainers.found_jobs import torchtitan
from layout_tuner.trainers.found_jobs.found_job import (
    MODEL,
    AssumedValue,
    FoundJob,
    JobFileInvalidError,
    NotUnderstood,
    Stated,
    below,
)
from layout_tuner.trainers.found_jobs.job_file import JobFile
from layout_tuner.trainers.found_jobs.megatron.megatron_jobs import read_options
from layout_tuner.trainers.found_jobs.megatron.megatron_options import options_of_values
from layout_tuner.trainers.found_jobs.own_scripts.named_values import options_by_name
from layout_tuner.trainers.found_jobs.positioned import YAML_SUFFIXES, positioned, root_of
from layout_tuner.trainers.found_jobs.positioned_node import Positioned
from layout_tuner.trainers.found_jobs.program_command import ProgramCommand, options_of
from layout_tuner.trainers.found_jobs.recipes.core_arguments import (
    completed_lists,
    is_preset,
    is_set,
    presets,
)
from layout_tuner.trainers.found_jobs.recipes.primus_presets import (
    MODULES,
    TORCHTITAN,
    megatron_model,
    torchtitan_model,
)

FORMAT: Final = "primus"
_DEEPEST: Final = 8
"""Most files that extend each other."""
_PARENTS: Final = ("extends", "includes", "bases")
"""Words for the files below one; `includes` is the older one."""
_MISSING: Final = "?"
"""The key of a file that is extended, and does not lie beside."""
_VARIABLE: Final = re.compile(r"\$\{([^:{}]+)(?::([^}]*))?\}")
_NUMBER: Final = re.compile(r"-?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")


_Values = dict[str, Stated]
"""By key, with dots."""


def read_config(file: JobFile) -> Sequence[FoundJob] | None:
    """The jobs of an experiment, one for each of its modules; None: another format.

    Raises:
        JobFileInvalidError: a module's framework is not read, or files extend each other.
    """
    root = root_of(file, *YAML_SUFFIXES)
    if root is None or not {"modules", *_PARENTS} & set(root.keys()):
        return None
    return _jobs(file, _file_values(file, root))


def _modules(values: _Values) -> list[str]:
    names = (re.fullmatch(r"modules\.(\w+)\.framework", key) for key in values)
    return [each[1] for each in names if each]


def _jobs(file: JobFile, values: _Values) -> list[FoundJob] | None:
    """The jobs of all modules; None: there are none."""
    names, missing = _modules(values), values.get(_MISSING)
    found = [_module(file, name, below(values, f"modules.{name}.")) for name in names]
    if missing is not None and not found:
        raise JobFileInvalidError(f"{file.name} states no job of its own: {missing.unknown}")
    if missing is not None:
        found = [_without_parent(job, missing) for job in found]
    if len(found) > 1:
        found = [replace(job, name=name) for name, job in zip(names, found, strict=True)]
    return found or None


def read_command(command: ProgramCommand, file: JobFile) -> FoundJob | None:
    """The job of Primus' program with an experiment beside the script; None: another program."""
    if not re.search(
        r"(^|/)(primus(-cli|\.cli\.\S+)?|run_pretrain\.sh|primus/cli/main\.py)$", command.program
    ):
        return None
    options = options_by_name(options_of(command.words[1:]))
    named = [options.pop(each) for each in ("config", "exp") if each in options]
    path = str(named[-1].value or "") if named else command.environment.get("EXP")
    if not path or not path.endswith(YAML_SUFFIXES):
        return None
    beside = file.beside(path)
    if beside is None:
        raise JobFileInvalidError(
            f"{file.name}: the experiment {shown(path)} does not lie beside it; give that file, or "
            "put it there"
        )
    values = _file_values(beside, positioned(beside), 1)
    for name in _modules(values):
        for key, each in options.items():
            values[f"modules.{name}.overrides.{key}"] = each
    found = _jobs(replace(beside, name=file.name), values)
    return found[0] if found else None


def _file_values(file: JobFile, root: Positioned, depth: int = 0) -> _Values:
    """The values of a file, over those of the files that it extends."""
    if depth > _DEEPEST:
        raise JobFileInvalidError(f"{file.name}: more than {_DEEPEST} files extend each other")
    found: _Values = {}
    for word in _PARENTS:
        parents = root.get(word)
        names = [] if parents is None else parents.value
        for name in [names] if isinstance(names, str) else names or []:
            beside = file.beside(str(name))
            if beside is None:
                why = f"{name} does not lie beside {file.name}; put it there"
                missing = {_MISSING: Stated(value=None, said=f"{word}: {name}", unknown=why)}
                found |= _preset(str(name)) or missing
            else:
                found |= _file_values(beside, positioned(beside), depth + 1)
    for leaf in root.leaves():
        if leaf.path.split(".")[0] not in _PARENTS:
            found[leaf.path] = _resolved(leaf, file.name if depth else "")
    return found


def _without_parent(job: FoundJob, missing: Stated) -> FoundJob:
    """The job with what is assumed open: a file that is not there may state it."""
    opened = (
        NotUnderstood(said=missing.said, why=missing.unknown, field=each.field)
        for each in job.assumed
    )
    return replace(job, assumed=(), not_understood=(*job.not_understood, *opened))


def _preset(name: str) -> _Values | None:
    """What Primus' own file of a name says; None: it is not known here."""
    stem = re.sub(r"\.ya?ml$", "", name.rpartition("/")[2])
    arguments = MODULES.get(stem) or megatron_model(stem)
    return None if arguments is None else presets(arguments, f"Primus' {name}")


def _resolved(leaf: Positioned, named: str) -> Stated:
    """A value with the defaults of its variables."""
    value, why = leaf.value, leaf.why
    if isinstance(value, str) and (variables := _VARIABLE.findall(value)):
        required = [name for name, default in variables if f"${{{name}}}" in value]
        if required:
            why = f"{required[0]} is set where the job runs"
        value = _scalar(_VARIABLE.sub(lambda each: each[2] or "", value))
    return replace(leaf.stated(named), value=None if why else value, unknown=why)


def _scalar(text: str) -> Any:
    """A text with variables in it as Primus reads it: a switch or a number where it looks so."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if re.fullmatch(r"-?\d{1,18}", text):
        return int(text)
    if text in ("null", "None", ""):
        return None
    return float(text) if _NUMBER.fullmatch(text) and len(text) < 40 else text


def _module(file: JobFile, name: str, values: _Values) -> FoundJob:
    """The job of one module."""
    framework = str(values["framework"].value)
    readers = {"megatron": _megatron, "torchtitan": _torchtitan}
    if framework not in readers:
        raise JobFileInvalidError(
            f"{file.name}: {shown(framework)}, the framework of {name}, is not read; known are "
            f"{', '.join(readers)}"
        )
    job = readers[framework](file, values, below(values, "overrides."))
    model = values.get("model")
    if model is not None and model.unknown:
        field = f"{MODEL}name"
        missed = NotUnderstood(said=model.said, why=model.unknown, field=field, line=model.line)
        job = replace(job, not_understood=(*job.not_understood, missed))
    return replace(job, format=FORMAT)


def _named(file: JobFile, values: _Values, key: str) -> tuple[str, _Values | None]:
    """The name that a key has, and the values of that file where it lies beside."""
    name = str(values[key].value or "") if key in values else ""
    beside = file.beside(name if name.endswith(YAML_SUFFIXES) else f"{name}.yaml") if name else None
    return name, None if beside is None else _file_values(beside, positioned(beside), 1)


_OWN: Final = re.compile(
    r"\w*(wandb|mlflow|wall_clock|tensorboard|sink_level|log_avg|auto_continue|last_saving|profil|turbo|primus|"
    r"tracelens|rocm_mem|gzip|mock_dataset|hf_path|nvtx|odc|fla_|sft_|packed|trainable|dump_pp|"
    r"debug_scheduler|zero_bubble|pp_warmup|fp8_weight_transpose|compile_dependencies|torch_compile|"
    r"cpp_fp8|fp8_precompute|weight_deosc|mlperf|val_loss|rope_fusion|max_position|params_dtype|"
    r"overlap_p2p|post_validation|pipeline_timers|hf_|apply_rope|_rope_fusion|legacy_grouped)\w*"
    r"|lora\.?\w*|pp_algorithm|communication_method|offload(_ops)?|optimizer_foreach|stage"
)
"""Settings of Primus that Megatron-LM has no option of; those that matter are in `_MATTERS`."""
_MATTERS: Final[Mapping[str, str]] = {
    "use_turbo_deepep": "Primus' DeepEP exchanges the tokens of experts",
    "turbo_sync_free_moe_stage": "experts without synchronization with the host",
    "use_turbo_mega_moe": "kernels of Primus",
    "enable_primus_turbo": "kernels of Primus",
    "use_turbo_attention": "kernels of Primus",
    "use_turbo_gemm": "kernels of Primus",
    "use_turbo_grouped_gemm": "kernels of Primus",
    "offload": "offloading of activations",
    "enable_odc": "another exchange of weights and gradients",
    "torch_compile.enable": "compiled modules",
}
_UNSET: Final[tuple[Any, ...]] = (None, False, "", [])
_VPP: Final = "num_virtual_stages_per_pipeline_rank"
_OPEN: Final[Mapping[str, tuple[str, str]]] = {
    "recompute_layer_ids": ("recompute", "single layers are recomputed"),
    "decoder_pipeline_manual_split_list": ("pipeline_split", "stages of other numbers of layers"),
    "virtual_pipeline_model_parallel_size": ("vpp", f"Megatron-LM takes {_VPP} in its place"),
    "lora.enabled": (f"{MODEL}lacks", "adapters train few of the weights"),
    "lfm_layer_types": (f"{MODEL}family", "layers of other kinds than attention"),
    "use_sink_attention": (f"{MODEL}attention_window", "attention sinks and windows"),
}
"""Settings of which each leaves a field of ours open."""
_SCHEDULES: Final = {
    "1f1b": "1f1b",
    "1f1b-interleaved": "1f1b",
    "zero-bubble": "zero_bubble",
    "zbv": "zbv",
    "zbv-formatted": "zbv",
    "v-half": "v_half",
    "v-min": "v_min",
}
_LATENT: Final = re.compile(r"q_lora_rank|kv_lora_rank|qk_(pos_emb_)?head_dim|v_head_dim|mscale\w*")
_ZERO_IS_OFF: Final = ("sequence_parallel", "fp8", "bf16", "fp16")
"""Arguments of which 0 is false."""


def _megatron(file: JobFile, values: _Values, overrides: _Values) -> FoundJob:
    """The job of Megatron-LM's arguments."""
    config, of_config = _named(file, values, "config")
    name, of_model = _named(file, values, "model")
    arguments = dict(_preset("pre_trainer.yaml") or {})
    arguments |= (of_config if of_config is not None else _preset(config)) or {}
    arguments |= (of_model if of_model is not None else _preset(name)) or {}
    arguments |= overrides
    options = options_of_values(_in_effect(arguments), off=_ZERO_IS_OFF)
    findings = read_options(options, "megatron-lm", file=file)
    ep = arguments.get("expert_model_parallel_size")
    if "num_layers" not in arguments and ep is not None and isinstance(ep.value, int):
        # The model is not known, and may have experts.
        findings.note("ep", ep.value, ep.said, ep.place)
        if ep.value > 1 and findings.value("tp") is not None:
            findings.assume("etp", findings.value("tp"), "Megatron-LM's default is tp")
    for key, (field, why) in _OPEN.items():
        each = arguments.get(key)
        if each is None or each.value in _UNSET:
            continue
        is_one = each.value == 1 and each.value is not True
        if field != "vpp" or not (_VPP in arguments or is_one):
            findings.miss(each.said, why, name=field, line=each.line)
    for key, why in _MATTERS.items():
        if (each := arguments.get(key)) is not None and each.value:
            findings.miss(each.said, f"{why}: no counterpart here", line=each.line)
    job = findings.job(file=file.name, format=FORMAT, trainer="megatron-lm", model_name=name)
    return completed_lists(_with_schedule(job, arguments), arguments)


def _in_effect(arguments: _Values) -> _Values:
    """Megatron-LM's arguments, without those that have no effect beside others."""
    found = {
        key: each
        for key, each in arguments.items()
        if re.fullmatch(r"[a-z]\w*", key)
        and not _OWN.fullmatch(key)
        and key not in _MATTERS
        and key not in _OPEN
    }

    if not is_set(found, "multi_latent_attention"):
        found = {key: each for key, each in found.items() if not _LATENT.fullmatch(key)}
    if not is_set(found, "num_experts"):
        # A model that is not known may have some, of which overrides may speak.
        is_known = is_set(found, "num_layers")
        found = {
            key: each
            for key, each in found.items()
            if not (key.startswith(("moe_", "expert_")) and (is_known or is_preset(each)))
        }
    if not is_set(found, "cross_entropy_loss_fusion"):
        found.pop("cross_entropy_fusion_impl", None)
    size = found.get("vocab_size")
    tokenizer = [found[key] for key in ("tokenizer_type", "tokenizer_model") if key in found]
    if size is not None and is_preset(size) and not all(map(is_preset, tokenizer)):
        del found["vocab_size"]
    if (bias := found.pop("add_bias_linear", None)) is not None and bias.value is False:
        found["disable_bias_linear"] = replace(bias, value=True)
    return found


def _with_schedule(job: FoundJob, arguments: _Values) -> FoundJob:
    """The job with the schedule that Primus' own pipeline has."""
    algorithm, is_own = arguments.get("pp_algorithm"), arguments.get("patch_primus_pipeline")
    bubble = arguments.get("patch_zero_bubble")
    if job.value("pp") == 1 or not any(each and each.value for each in (is_own, bubble)):
        return job
    said = algorithm or bubble or is_own
    assert said is not None, "one of them is true"
    kind = str(algorithm.value) if algorithm and is_own and is_own.value else "zero-bubble"
    schedule = _SCHEDULES.get(kind)
    vpp = {"zero_bubble": (None, 1)} | dict.fromkeys(V_SLOTS, (None, 2))
    if schedule is None or job.value("vpp") not in vpp.get(schedule, (job.value("vpp"),)):
        missed = NotUnderstood(
            said=said.said,
            why="a schedule that is not known here",
            field="schedule",
            line=said.line,
        )
        return replace(job, not_understood=(*job.not_understood, missed))
    assumed = AssumedValue(field="schedule", value=schedule, why=said.said)
    return replace(job, assumed=(*job.assumed, assumed))


def _torchtitan(file: JobFile, values: _Values, overrides: _Values) -> FoundJob:
    """The job of torchtitan's sections."""
    _, of_config = _named(file, values, "config")
    name, of_model = _named(file, values, "model")
    model = torchtitan_model(name)
    of_primus = presets(TORCHTITAN, "Primus' pre_trainer.yaml") if of_config is None else of_config
    if of_model is not None:
        of_primus |= of_model
    elif model is not None:
        of_primus |= presets(model, f"Primus' {name}")
    found = of_primus | overrides
    ignored = ("primus_turbo", "sink_level", "file_sink_level", "stderr_sink_level")
    stated = {
        key: each
        for key, each in found.items()
        if key.split(".")[0] not in ignored
        and key != "training.mock_data"
        and each.value != ["primus_turbo"]
    }
    job = torchtitan.job_of(stated, file)
    return completed_lists(replace(job, model_name=job.model_name or name), found)
