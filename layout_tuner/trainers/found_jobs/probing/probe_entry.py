"""The entry of a worker's file of trainers that probes a found job: its own command, with gaps.

Where the command sets the layout, the batch or job knobs, the entry has placeholders. Program,
model, data, environment and container stay as they are.
"""

from __future__ import annotations

import posixpath
import re
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from layout_tuner.documents.json_and_yaml import read_yaml
from layout_tuner.documents.reading import word_of
from layout_tuner.errors import SearchSpaceError
from layout_tuner.search_spaces.layouts.layout import LAYOUT_FIELDS
from layout_tuner.search_spaces.models.foreign_words import words_of
from layout_tuner.terminal.plurals import listed
from layout_tuner.trainers.accelerate import ACCELERATE
from layout_tuner.trainers.adapter import TrainerAdapter, TrainerJob, merged
from layout_tuner.trainers.deepspeed import DEEPSPEED
from layout_tuner.trainers.embedded import EMBEDDED
from layout_tuner.trainers.found_jobs.completed_job import CompletedJob
from layout_tuner.trainers.found_jobs.found_job import BATCH_FIELDS, JOB, FoundJob, LaunchCommand
from layout_tuner.trainers.megatron_lm import CONNECTIONS, MEGATRON_LM, SHARDING_STRATEGIES
from layout_tuner.trainers.placeholders import escaped
from layout_tuner.trainers.program import LAYOUT_ARGUMENTS, STEPS, VALUES_FILE
from layout_tuner.trainers.registry import ADAPTERS

START_LIMIT_S: Final = 900.0
"""Seconds to the first step: large jobs compile kernels and index their data."""
_OF_THE_WORKER: Final = words_of(
    """RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK GROUP_RANK MASTER_ADDR MASTER_PORT
    CUDA_VISIBLE_DEVICES HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES"""
)
"""Variables that a worker sets for each process."""
_LOADS: Final = re.compile(
    r"^[ \t]*((?:module|ml|spack|conda|mamba)[ \t]+(?:load|use|swap|activate)\b[^\n;&|#]*[^\s;&|#]"
    r"|(?:source|\.)[ \t]+[^\n;&|#]*/activate\b)",
    re.MULTILINE,
)
"""Lines by which a script gets its modules and its virtual environment."""
_HAS_VARIABLE: Final = re.compile(r"[$`]")
_NUM_LAYERS: Final = "model.num_layers"
_DECIDING: Final[Mapping[str, Any]] = {
    **dict.fromkeys(("tp", "cp", "pp", "ep"), 1),
    "zero_stage": 0,
    "precision": "fp32",
}
"""Knobs without which a probe runs another job, with what a program has that is told nothing."""
_SEARCHED: Final = (
    *_DECIDING,
    *("zero_replicas", "micro_batch_size", "recompute", "sequence_parallel"),
)
"""Knobs that a user's own script may take or not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeOptions:
    """What a trainer's command line needs to run some steps and to leave nothing behind."""

    steps: str
    """The option of the number of steps."""
    dropped: tuple[str, ...] = ()
    """Options that are left out, with their values; one that ends in - or _ stands for all that
    begin so."""
    added: tuple[str, ...] = ()
    """Words that are added at the end."""
    decay: str = ""
    """The option of the steps over which the learning rate falls: those of the job, so that its
    warm-up stays shorter."""
    only_with: str = ""
    """An option without which the command is another program's, and stays as it is."""
    beside: tuple[str, ...] = ()
    """Words that are added where the command does not have their options."""
    switches: tuple[str, ...] = ()
    """Keys of the trainer's own configuration that are turned off where it turns them on."""
    line: str = ""
    """The pattern of a step's line, where another program than the adapter's prints it."""


_MEGATRON: Final = ProbeOptions(
    steps="--train-iters",
    dropped=(
        *("--train-samples", "--lr-decay-samples", "--lr-warmup-samples", "--rampup-batch-size"),
        *("--exit-interval", "--exit-duration-in-mins", "--log-interval"),
        *("--save", "--save-interval", "--load", "--use-checkpoint-args", "--async-save"),
        *("--non-persistent-", "--eval-iters", "--eval-interval", "--tensorboard-", "--wandb-"),
    ),
    added=("--eval-iters=0", "--log-interval=1"),
    decay="--lr-decay-iters",
)
_TRAINER: Final = ProbeOptions(
    steps="--max_steps",
    dropped=(
        *("--num_train_epochs", "--save_strategy", "--save_steps", "--logging_steps"),
        *("--report_to", "--eval_strategy", "--evaluation_strategy", "--eval_steps"),
        *("--do_eval", "--resume_from_checkpoint", "--load_best_model_at_end"),
        *("--output_dir", "--overwrite_output_dir", "--push_to_hub", "--eval_on_start"),
        *("--logging_strategy", "--logging_first_step"),
    ),
    added=(
        *("--logging_steps=1", "--save_strategy=no", "--report_to=none"),
        # Scripts save the model there at their end, and go on from a checkpoint in it.
        "--output_dir={probe_directory}",
    ),
    # Of `ProgressCallback` and `PrinterCallback`; transformers 5 prints figures as texts.
    line=r"^\s*\{'loss': (?P<loss>[^,}]+)",
    only_with="--per_device_train_batch_size",
    beside=("--gradient_accumulation_steps={num_microbatches}",),
)
_OPTIONS: Final[Mapping[str, ProbeOptions]] = {
    "megatron-lm": _MEGATRON,
    "megatron-deepspeed": _MEGATRON,
    "megatron-bridge": ProbeOptions(
        steps="train.train_iters",
        dropped=(
            *("checkpoint.save", "checkpoint.load", "train.eval_iters", "logger.log_interval"),
            *("--max_steps", "-ms", "--save_dir", "--load_dir", "--save_interval"),
            *("train.train_samples", "train.num_epochs", "validation.eval_iters"),
            *("scheduler.lr_decay_samples", "scheduler.lr_warmup_samples"),
        ),
        added=(
            *("checkpoint.save=null", "checkpoint.load=null"),
            *("train.eval_iters=0", "logger.log_interval=1"),
        ),
        decay="scheduler.lr_decay_iters",
    ),
    "torchtitan-0.2": ProbeOptions(
        steps="--training.steps",
        dropped=(
            *("--metrics.log_freq", "--checkpoint.", "--job.dump_folder", "--validation."),
            *("--profiling.", "--metrics.enable_"),
        ),
        added=("--metrics.log_freq=1", "--job.dump_folder={probe_directory}"),
        switches=(
            # With checkpoints torchtitan saves at the last step, and loads at the first one.
            *("checkpoint.enable", "checkpoint.enable_checkpoint", "validation.enable"),
            *("profiling.enable_profiling", "profiling.enable_memory_snapshot"),
            *("metrics.enable_tensorboard", "metrics.enable_wandb"),
        ),
    ),
    "deepspeed": _TRAINER,
    "accelerate": _TRAINER,
}
"""By adapter. Options of saving, loading and evaluation are left out where they would write over
the job's checkpoints, go on from one, or add steps that are none of training."""

_OF_FILES: Final[Mapping[str, tuple[str, ...]]] = {
    "nanotron": ("run_train.py", "--config-file", VALUES_FILE),
    "torchtitan-0.2": ("-m", "torchtitan.train", "--job.config_file={file}"),
}
"""The program of a trainer whose configuration starts nothing, by adapter."""
_CONFIGURATION: Final = ("--job.config_file", "--job.config-file")
"""Options of torchtitan's configuration."""
_ENGINE_FILE: Final = ("--deepspeed_config", "--deepspeed")
"""Options whose value is DeepSpeed's configuration; the second is a switch in other programs."""
_NANOTRON: Final[Mapping[str, Any]] = {
    "tokens": {"train_steps": STEPS},
    "checkpoints": {"checkpoint_interval": 1_000_000, "resume_checkpoint_path": None},
    "logging": {"iteration_step_info_interval": 1},
}
"""What a probe changes in nanotron's configuration besides the layout."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeEntry:
    """An entry of a worker's file of trainers, and what its owner must know of it."""

    entry: Mapping[str, Any]
    """Its fields as plain JSON values."""
    remarks: tuple[str, ...]
    """Sentences: what was replaced, left out or added, and what is to be checked."""
    fixed: tuple[str, ...] = ()
    """Knobs that every probe has as the job does, since the command does not pass them on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Option:
    """An option with its values, or `key=value`, or one word that is neither."""

    name: str
    """Without its value; empty: no option."""
    words: tuple[str, ...]

    @property
    def value(self) -> str:
        first = self.words[0].partition("=")[2]
        return first or " ".join(self.words[1:])


def probe_entry(
    job: CompletedJob, path: Path, read: Callable[[Path], Mapping[str, Any]]
) -> ProbeEntry | str:
    """The entry that probes a job, or a sentence that says why there is none.

    Args:
        job: the job.
        path: its file; a script is taken to be started in the file's folder.
        read: reads a configuration of the trainer; SearchSpaceError where it is none.
    """
    found, adapter = job.found, ADAPTERS[job.found.trainer]
    if adapter is EMBEDDED:
        return "every worker has the embedded trainer, which needs none"
    command = _of_file(adapter.name, path) if found.command is None else _escaped(found.command)
    if command is None or found.format == "primus":
        return (
            f"{found.file} starts no program that a worker could start for a probe: write the entry "
            f"of {adapter.name} by hand (docs/guides/other-trainers.md)"
        )
    writer = _EntryWriter(job, adapter, command)
    words = writer.words(path.resolve().parent)
    fixed = _fixed(job, adapter, words)
    if lost := [*_lost(found, fixed, words, path.resolve().parent)]:
        return (
            f"{listed(lost, 5)}, which a worker does not pass on to {command.words[0]}: write the entry "
            f"of {adapter.name} by hand (docs/guides/other-trainers.md)"
        )
    entry: dict[str, Any] = {
        "name": adapter.name,
        "version": found.version or "unknown",
        "adapter": adapter.name,
        "command": [*command.interpreter, *words],
    }
    if VALUES_FILE in command.words:
        entry["configuration"] = _of_nanotron(read(path))
        writer.remarks.append(f"{VALUES_FILE} is {found.file} with the layout's values in it")
    elif engine_file := writer.engine_file:
        entry |= writer.configuration(path.resolve().parent, engine_file, read)
    if line := writer.run.line if writer.run else "":
        entry["log"] = {"step": line}
    environment = {
        name: value
        for name, value in command.environment.items()
        if name not in _OF_THE_WORKER and not name.startswith("SLURM_")
    }
    if environment:
        entry["environment"] = environment
    if command.container:
        entry["container"] = list(command.container)
    entry["working_directory"] = posixpath.join(path.resolve().parent, command.working_directory)
    if not _HAS_VARIABLE.search(entry["working_directory"]):
        entry["working_directory"] = posixpath.normpath(entry["working_directory"])
    entry["start_limit_s"] = START_LIMIT_S
    writer.remarks += [f"the program is started in {entry['working_directory']}"]
    writer.remarks += _checks(job, command)
    if loaded := _LOADS.findall(_text(path)) if found.command else []:
        writer.remarks.append(
            f"start the worker in the environment of {found.file}: {listed(loaded, 5)}"
        )
    if fixed:
        writer.remarks.append(f"every probe has the job's {listed(fixed, len(fixed))}")
    return ProbeEntry(entry=entry, remarks=tuple(writer.remarks), fixed=fixed)


def _escaped(command: LaunchCommand) -> LaunchCommand:
    """The same command with the braces of its texts, which are none of placeholders."""
    return replace(
        command,
        words=tuple(map(escaped, command.words)),
        container=tuple(map(escaped, command.container)),
        environment={name: escaped(value) for name, value in command.environment.items()},
        working_directory=escaped(command.working_directory),
    )


def _fixed(job: CompletedJob, adapter: TrainerAdapter, words: Sequence[str]) -> tuple[str, ...]:
    """Knobs of which the words of the entry have no placeholder, in a user's own script."""
    if adapter not in (DEEPSPEED, ACCELERATE):
        return ()
    passed = {name for name in _SEARCHED if any(f"{{{name}}}" in word for word in words)}
    if any(VALUES_FILE in word for word in words):
        # Its sections divide the model of a script that is written so, and of no other.
        divided = (name for name in ("tp", "pp", "ep") if getattr(job.layout, name) > 1)
        passed |= {"micro_batch_size", "zero_stage", "precision", *divided}
    elif not any("{num_microbatches}" in word for word in words):
        passed.discard("micro_batch_size")
    return tuple(name for name in _SEARCHED if name not in passed)


def _lost(
    found: FoundJob, fixed: Collection[str], words: Sequence[str], folder: Path
) -> Iterator[str]:
    """What decides fields that are fixed and is not of the program: Accelerate's own options."""
    says = " ".join(words)
    for word in words:
        if Path(word).suffix in (".yaml", ".yml", ".json"):
            says += _text(folder / word)
    for each in found.read:
        name = each.said.split()[0].rstrip(":") if each.said else ""
        is_lost = each.field in fixed and each.field in _DECIDING and name not in says
        if is_lost and each.value not in (None, _DECIDING[each.field]):
            yield f"{each.said} decides {each.field}={word_of(each.value)}"


def _of_nanotron(values: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a probe, which saves and uploads nothing; older versions lack keys."""
    own = values.get("checkpoints")
    saves = own if isinstance(own, Mapping) else {}
    kept = {name: False for name in ("save_initial_state", "save_final_state") if saves.get(name)}
    found = merged(merged(values, _NANOTRON), {"checkpoints": kept} if kept else {})
    return found | ({"s3_upload": None} if "s3_upload" in values else {})


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _checks(job: CompletedJob, command: LaunchCommand) -> Iterator[str]:
    """What the owner of the entry must check."""
    found = job.found
    if not found.version:
        yield (
            "state the version of your trainer: it is part of each measurement, and decides how job "
            "knobs are written"
        )
    is_one = command.environment.get(CONNECTIONS) == "1"
    is_sharded = job.layout.zero_stage in SHARDING_STRATEGIES
    if is_one and found.trainer == MEGATRON_LM.name and not is_sharded:
        yield (
            f"{CONNECTIONS}=1 stays: Megatron-FSDP, which is zero_stage 2 and 3, refuses it, so that the "
            "campaign's space leaves both out"
        )
    if found.command is None:
        yield f"{found.file} starts no program: check the command"
    if lost := [each for each in command.lost if each.partition("=")[0] not in _OF_THE_WORKER]:
        yield (
            f"{listed(lost, 10)} of {found.file} are not in the entry: add what a probe needs of them to "
            "its environment or container"
        )
    unknown = [*command.unknown, *filter(_HAS_VARIABLE.search, (command.working_directory,))]
    if unknown:
        yield (
            f"{listed(unknown, 5)} in the command are not known without running "
            f"{found.file}: write the values in their place"
        )


def _of_file(adapter: str, path: Path) -> LaunchCommand | None:
    """The command of a trainer that reads this configuration; None: it is not known."""
    words = _OF_FILES.get(adapter)
    if words is None:
        return None
    file = str(path.resolve())
    return LaunchCommand(words=tuple(each.replace("{file}", file) for each in words))


class _EntryWriter:
    """Replaces the options of a command that a probe sets."""

    def __init__(self, job: CompletedJob, adapter: TrainerAdapter, command: LaunchCommand) -> None:
        self._job, self._adapter, self._command = job, adapter, command
        self._options = [*_options(command.words)]
        self.run = self._run_options()
        self._of_field = _fields_by_option(job.found)
        self.remarks: list[str] = []

    def _run_options(self) -> ProbeOptions | None:
        run = _OPTIONS.get(self._adapter.name)
        names = {each.name for each in self._options}
        return run if run is None or not run.only_with or run.only_with in names else None

    def words(self, folder: Path) -> list[str]:
        """The words of the command with placeholders; `folder` is that of the job's file."""
        found: list[str] = []
        replaced, left_out, kept = [], [], []
        written = self._written()
        for each in self._options:
            fields = self._of_field.get(each.name, ())
            if self.run is not None and each.name == self.run.steps:
                continue
            if self._is_engine_file(each):
                found.append(f"{each.name}={VALUES_FILE}")
                continue
            if each.name and self._is_dropped(each.name):
                left_out.append(each.name)
            elif each.name in written or (
                fields and _is_placed(fields) and self._adapter.has_placement
            ):
                replaced.append(each.name)
            elif fields and (word := self._placeholder(each, fields)) is not None:
                found.append(word)
            else:
                found += each.words
                if _is_placed(fields):
                    kept.append(each.name)
        if self._adapter.has_placement:
            found.append(LAYOUT_ARGUMENTS)
            self._say(
                replaced, f"gave way to {LAYOUT_ARGUMENTS}, which also has what other layouts need"
            )
        found += self._added()
        off = [*self._turned_off(folder)]
        found += off
        self._say(off, "are added: a probe trains, and does nothing else")
        self._say(left_out, "are left out: a probe runs a few steps, and saves and loads nothing")
        self._say(kept, "stay as they are, though they depend on the layout: check them")
        return found

    def _turned_off(self, folder: Path) -> Iterator[str]:
        """What turns off the switches of torchtitan's configuration, by the names that it uses."""
        files = [each.value for each in self._options if each.name in _CONFIGURATION]
        values: dict[str, Any] = {}
        with suppress(tomllib.TOMLDecodeError):
            values = tomllib.loads(_text(folder / files[-1])) if files else {}
        for each in self.run.switches if self.run else ():
            section, _, name = each.partition(".")
            if isinstance(stated := values.get(section), dict) and stated.get(name) is True:
                yield f"--{section}.no-{name}"

    def _is_engine_file(self, option: _Option) -> bool:
        has_file = bool(self._adapter.placement_paths) and bool(option.value)
        return has_file and option.name in _ENGINE_FILE

    def configuration(
        self, folder: Path, name: str, read: Callable[[Path], Mapping[str, Any]]
    ) -> dict[str, Any]:
        """The entry's field of DeepSpeed's configuration; empty: the file cannot be read."""
        path, text = folder / name, self._command.written.get(posixpath.normpath(name))
        try:
            values = read(path) if text is None else read_yaml(text.encode())
        except SearchSpaceError as error:
            self.remarks.append(f"{VALUES_FILE} has the layout's values alone, since {error}")
            return {}
        self.remarks.append(f"{VALUES_FILE} is {path.name} with the layout's values in it")
        return {"configuration": dict(values)}

    @property
    def engine_file(self) -> str:
        """The file of DeepSpeed's configuration that the command names; empty: none."""
        return next((each.value for each in self._options if self._is_engine_file(each)), "")

    def _say(self, names: Sequence[str], sentence: str) -> None:
        if names:
            self.remarks.append(f"{listed([*dict.fromkeys(names)], 40)} {sentence}")

    def _written(self) -> set[str]:
        """Options that the adapter writes for this layout."""
        job = TrainerJob(model=self._job.model, layout=self._job.layout)
        return {each.name for each in _options(self._adapter.placement_arguments(job)) if each.name}

    def _is_dropped(self, name: str) -> bool:
        return self.run is not None and any(
            name.startswith(each) if each[-1] in "-_." else name == each
            for each in self.run.dropped
        )

    def _placeholder(self, option: _Option, fields: Sequence[str]) -> str | None:
        """The option with the placeholder of its field; None: its value is not the field's own."""
        name = fields[0]
        value = self._job.model.num_layers if name == _NUM_LAYERS else self._value(name)
        if len(fields) > 1 or value is None or option.value != word_of(value):
            return None
        return f"{option.name}={{{name.rpartition('.')[2]}}}"

    def _value(self, name: str) -> Any:
        """The value of a field of the layout; None: it is another field."""
        is_known = name in LAYOUT_FIELDS or name == "global_batch_size"
        return getattr(self._job.layout, name) if is_known else None

    def _added(self) -> Iterator[str]:
        run = self.run
        if run is None:
            return
        steps = next((each.value for each in self._options if each.name == run.steps), "")
        has_decay = any(each.name == run.decay for each in self._options)
        if run.decay and steps.isdigit() and not has_decay:
            yield f"{run.decay}={steps}"
        yield f"{run.steps}={STEPS}"
        yield from run.added
        names = {each.name for each in self._options}
        yield from (each for each in run.beside if each.partition("=")[0] not in names)


def _is_placed(fields: Sequence[str]) -> bool:
    """Whether a probe sets one of the fields."""
    return any(
        each in LAYOUT_FIELDS or each == "global_batch_size" or each.startswith(JOB)
        for each in fields
    )


def _fields_by_option(found: FoundJob) -> dict[str, list[str]]:
    """The fields of ours that each option of the command sets."""
    fields: dict[str, list[str]] = {}
    said = [(each.field, each.said) for each in found.read]
    said += [(each.field, each.said) for each in found.not_understood if each.field]
    for name, text in said:
        if _is_placed((name,)) or name == _NUM_LAYERS or name in BATCH_FIELDS:
            for each in _options(text.split()):
                if each.name:
                    fields.setdefault(each.name, []).append(name)
    return fields


def _options(words: Sequence[str]) -> Iterator[_Option]:
    """Options with their values: `--name value...`, `--name=value` and `key.path=value`."""
    current: list[str] = []

    def option() -> _Option:
        return _Option(name=current[0].partition("=")[0].lstrip("+"), words=tuple(current))

    for word in words:
        is_option = word.startswith("-") and not word[1:2].isdigit() and len(word) > 1
        is_override = (
            not is_option
            and "=" in word
            and word.lstrip("+").partition("=")[0].replace(".", "").replace("_", "").isalnum()
        )
        if is_option or is_override:
            if current:
                yield option()
            current = [word]
            if is_override:
                yield option()
                current = []
        elif current:
            current.append(word)
        else:
            yield _Option(name="", words=(word,))
    if current:
        yield option()
