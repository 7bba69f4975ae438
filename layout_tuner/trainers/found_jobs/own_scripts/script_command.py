"""Commands of users' own training scripts, with DeepSpeed, Accelerate or Hugging Face's Trainer.

Their options are Trainer's, or those that many scripts name alike. The exports `deepspeed`,
`accelerate` and `command` start such scripts.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from layout_tuner.trainers.accelerate import ACCELERATE
from layout_tuner.trainers.command import COMMAND
from layout_tuner.trainers.deepspeed import DEEPSPEED
from layout_tuner.trainers.found_jobs.found_job import Findings, FormatName, FoundJob, Stated
from layout_tuner.trainers.found_jobs.job_file import JobFile
from layout_tuner.trainers.found_jobs.own_scripts import accelerate, our_exports
from layout_tuner.trainers.found_jobs.own_scripts.deepspeed import assume_script, note_engine
from layout_tuner.trainers.found_jobs.own_scripts.named_values import (
    configuration_named,
    file_named,
    is_on,
    leave_open,
    options_by_name,
    statements_of,
)
from layout_tuner.trainers.found_jobs.own_scripts.trainer_options import (
    OTHER_DEFAULTS,
    TRAINER_MARKS,
    assume_trainer,
    is_read_by_trainer,
    note_trainer,
)
from layout_tuner.trainers.found_jobs.positioned import YAML_SUFFIXES
from layout_tuner.trainers.found_jobs.program_command import ProgramCommand, options_of
from layout_tuner.trainers.placeholders import ENVIRONMENT_PREFIX

_ARGUMENT_FILES: Final = (*YAML_SUFFIXES, ".json")
_OF_ENGINE: Final = ("zero_stage", "precision")
"""Fields that DeepSpeed's or Accelerate's configuration sets."""
_NOT_BESIDE: Final = "the file is not beside it: give it, or state what it says"
_OF_ARGUMENTS: Final = (
    *("micro_batch_size", "num_microbatches", "precision", "recompute", "zero_stage"),
)
"""Fields that a file of arguments may set."""
_ACCUMULATION: Final = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
_OF_DEEPSPEED: Final = ("deepspeed", "deepspeed_config")
_MEGATRON: Final = ("tensor_model_parallel_size", "num_attention_heads", "micro_batch_size")
"""Options of Megatron's trainers, whose readers are asked first."""


def read_command(command: ProgramCommand, file: JobFile) -> FoundJob | None:
    """The job of a user's own script; None: nothing shows how it trains."""
    for word in command.words:
        named = Stated(value=word.text, said=word.said)
        if word.said.rstrip("\"'").endswith(".json") and (found := file_named(file, named)):
            for job in our_exports.read_config(found) or ():
                return _started(job, file, command)
    options = options_by_name(options_of(command.words[1:]))
    launcher = options_by_name(command.launcher_options)
    if len(set(_MEGATRON) & set(options)) == len(_MEGATRON):
        return None
    has_marks = bool(set(TRAINER_MARKS) & set(options))
    builds_engine = "zero_stage" in options or is_on(options.get("deepspeed"))
    has_trainer = is_read_by_trainer(options) and not builds_engine
    is_exported = any(name.startswith(ENVIRONMENT_PREFIX) for name in command.environment)
    is_known = command.launcher in ("deepspeed", "accelerate") or is_exported
    if not (is_known or has_trainer or has_marks or set(_OF_DEEPSPEED) & set(options)):
        return None
    settings = None
    if command.launcher == "accelerate":
        settings = _accelerate_settings(launcher, file)
    return _job(file, options, command, has_trainer=has_trainer, settings=settings)


def _started(job: FoundJob, file: JobFile, command: ProgramCommand) -> FoundJob:
    """The job of a file that a command names: its values have no place in the script."""
    findings = Findings(read={each.field: replace(each, place=None) for each in job.read})
    our_exports.note_environment(findings, command.environment)
    return replace(
        job,
        file=file.name,
        read=tuple(findings.read.values()),
        assumed=tuple(each for each in job.assumed if each.field not in findings.read),
    )


def _accelerate_settings(
    launcher: Mapping[str, Stated], file: JobFile
) -> dict[str, Stated] | Stated:
    """The settings of `accelerate launch`: its options over its file.

    Where the file is not there it is the option that names it.
    """
    named = launcher.get("config_file")
    if named is None:
        return dict(launcher)
    found = configuration_named(file, named)
    if found is None:
        return named
    return {**accelerate.flattened(statements_of(found[1], named=found[0])), **launcher}


def _job(
    file: JobFile,
    stated: Mapping[str, Stated],
    command: ProgramCommand,
    *,
    has_trainer: bool,
    settings: dict[str, Stated] | Stated | None = None,
) -> FoundJob:
    findings = Findings()
    environment = command.environment
    for each in command.ranks:
        findings.note(each.field, each.value, each.said, each.place)
    options = dict(stated)
    engine = [options.pop(name) for name in _OF_DEEPSPEED if name in options]
    model = note_trainer(findings, options, file)
    steps = environment.get(_ACCUMULATION, "")
    if steps.isdecimal() and "num_microbatches" not in findings.read:
        findings.note("num_microbatches", int(steps), f"{_ACCUMULATION}={steps}")
    if isinstance(settings, Stated):
        leave_open(findings, _OF_ENGINE, settings.said, settings.unknown or _NOT_BESIDE)
    elif settings is not None:
        accelerate.note_accelerate(findings, settings, file, with_trainer=has_trainer)
    if unread := _file_of_arguments(command, stated):
        leave_open(findings, _OF_ARGUMENTS, unread, "files of arguments are not read; state it")
    has_engine = _note_engine(findings, engine, file, has_trainer)
    our_exports.note_environment(findings, environment)
    if has_trainer:
        if not has_engine and settings is None:
            findings.assume("zero_stage", 0, "Trainer's default without --fsdp and --deepspeed")
        assume_trainer(findings)
    leave_open(findings, _OF_ENGINE, "no option says it", "the script sets it by itself; state it")
    for name in sorted(OTHER_DEFAULTS & set(stated)):
        why = "a program with this option may recompute by default; state it"
        leave_open(findings, ("recompute",), stated[name].said, why)
    assume_script(findings)
    form: FormatName = "accelerate"
    is_exported = any(name.startswith(ENVIRONMENT_PREFIX) for name in environment)
    if has_engine or command.launcher == "deepspeed":
        form = "deepspeed"
    elif is_exported and not has_trainer and settings is None:
        form = "command"
    trainer = {"accelerate": ACCELERATE, "deepspeed": DEEPSPEED, "command": COMMAND}[form].name
    return findings.job(file=file.name, format=form, trainer=trainer, model_name=model)


def _file_of_arguments(command: ProgramCommand, options: Mapping[str, Stated]) -> str:
    """The YAML or JSON file that a script gets, as it is written; empty: it gets none."""
    if (named := options.get("config")) is not None:
        return named.said
    behind = itertools.takewhile(lambda each: not each.said.startswith("-"), command.words[1:])
    said = (each.said for each in behind)
    return next((each for each in said if each.strip("\"'").endswith(_ARGUMENT_FILES)), "")


def _note_engine(
    findings: Findings, options: Sequence[Stated], file: JobFile, has_trainer: bool
) -> bool:
    """Notes DeepSpeed's configuration, if there is one; says whether DeepSpeed trains the job."""
    named = [each for each in options if is_on(each) is None]
    if not named:
        return any(is_on(each) for each in options)
    given = named[-1]
    if (found := configuration_named(file, given)) is not None:
        keys = statements_of(found[1], named=found[0])
        note_engine(findings, keys, is_filled=has_trainer)
    else:
        leave_open(findings, _OF_ENGINE, given.said, given.unknown or _NOT_BESIDE, line=given.line)
    return True
