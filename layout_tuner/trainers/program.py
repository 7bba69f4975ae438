"""A worker's trainers: the programs that its owner lets campaigns run as probes.

A campaign names a trainer and gives values to the parameters that the owner has declared. It never
brings a command.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, Literal, Self, get_args

from layout_tuner.documents.reading import (
    MAX_NAME_LENGTH,
    Problems,
    is_line,
    is_name,
    is_positive_number,
    read_choice,
    read_mapping,
    refuse_unknown,
    shown,
    switch_problem,
    url_name_problem,
    word_of,
)
from layout_tuner.errors import SearchSpaceError
from layout_tuner.trainers.adapter import TrainerAdapter
from layout_tuner.trainers.embedded import EMBEDDED
from layout_tuner.trainers.log_patterns import LogPatterns, StepPattern
from layout_tuner.trainers.parameters import Parameter, read_declarations
from layout_tuner.trainers.placeholders import PLACEHOLDERS, filled
from layout_tuner.trainers.registry import ADAPTERS
from layout_tuner.trainers.simulator import is_simulator

ProcessesPer = Literal["device", "node"]

ARGUMENTS: Final = "{arguments}"
"""An item of the command that stands for all arguments of the trainer's adapter."""

RUN_PLACEHOLDERS: Final[Mapping[str, str]] = {
    "steps": "optimizer steps to run: warm-up, the steps that may be added to it, and the timed",
    "rank": "the process's number in the job",
    "world_size": "processes of the job",
    "local_rank": "the process's number on its node",
    "local_world_size": "processes of the job on this node",
    "node_rank": "the node's number in the job",
    "master_address": "address of the node of rank 0",
    "master_port": "a port on that node that is free for the job",
    "values_file": "JSON file with the adapter's configuration of the layout",
    "probe_directory": "directory of the probe on this node; removed when it ends",
    "device": "cpu or cuda (ROCm too): the kind of the job's devices",
    "python": "the Python interpreter of the worker",
    "trainers_directory": "directory of the file that describes the trainers",
}
"""Placeholders that only a probe has, besides those of the job, and their meaning."""

_VARIABLE_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CODE_FOLLOWS: Final = ("-c", "-e", "-lc", "-ec", "--eval")
"""Options by which shells and interpreters take code."""
_OURS: Final = "LAYOUT_TUNER_"
"""Prefix of environment variables that the worker sets."""


class TrainersFileInvalidError(SearchSpaceError):
    """The file of a worker's trainers is malformed; the message names trainer and field."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramTrainer:
    """A trainer that is a program of its own; TrainersFileInvalidError for a wrong field."""

    name: str
    """What campaigns call it."""
    version: str
    """Version of the program; it is part of each measurement, and of what campaigns learn from."""
    command: tuple[str, ...]
    """Program and arguments, with placeholders such as {tp}."""
    adapter: str = "command"
    """The trainer whose refusals, arguments and log patterns it has."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables besides those of the worker, with placeholders."""
    working_directory: str = ""
    """An absolute path, or one that begins with a placeholder; empty: the probe's own directory,
    which is removed at its end."""
    container: tuple[str, ...] = ()
    """The command that runs the program in a container: it stands before the program."""
    processes_per: ProcessesPer = "device"
    """device: one process for each device, like torchrun's workers. node: one for each node, which
    starts the others itself."""
    start_limit_s: float | None = None
    """Seconds from the start of the program to its first step; None: only the probe's deadline."""
    log: LogPatterns | None = None
    """How it prints its steps; None: as the adapter says."""
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    """What campaigns may set."""
    same_data: bool = False
    """Whether all layouts read the same data in the same order, so that their losses are equal."""
    directory: str = ""
    """Directory of the file that describes it, for {trainers_directory}; no field of the file."""

    def __post_init__(self) -> None:
        problems = Problems(TrainersFileInvalidError)
        if problem := url_name_problem(self.name):
            problems.note(problem, field="name")
        elif self.name == EMBEDDED.name or is_simulator(self.name):
            whose = "embedded trainer" if self.name == EMBEDDED.name else "simulator"
            problem = f"{self.name!r} is the name of the {whose}; choose another"
            problems.note(problem, field="name")
        if not is_name(self.version):
            problem = f"{shown(self.version)} is not a version of 1 to {MAX_NAME_LENGTH} characters"
            problems.note(problem, field="version")
        where = self.working_directory
        if not is_line(where) or (where and not where.startswith(("/", "{"))):
            problem = (
                f"{shown(where)} is not an absolute path; begin one beside the file with "
                "{trainers_directory}"
            )
            problems.note(problem, field="working_directory")
        with problems.collecting():
            read_choice(
                self.processes_per,
                get_args(ProcessesPer),
                TrainersFileInvalidError,
                field="processes_per",
            )
        with problems.collecting():
            read_choice(self.adapter, tuple(ADAPTERS), TrainersFileInvalidError, field="adapter")
        if self.start_limit_s is not None and not is_positive_number(self.start_limit_s):
            problems.note(
                f"{shown(self.start_limit_s)} is not a number of seconds over 0",
                field="start_limit_s",
            )
        problems.note(switch_problem(self.same_data), field="same_data")
        for name in self.parameters:
            if name in (*PLACEHOLDERS, *RUN_PLACEHOLDERS, ARGUMENTS.strip("{}")):
                problem = f"{{{name}}} is a placeholder already; choose another name"
                problems.note(problem, field="parameters")
        self._note_templates(problems)
        problems.refuse()

    def _note_templates(self, problems: Problems) -> None:
        if not self.command:
            problems.note("it is empty", field="command")
        for name in self.environment:
            if not _VARIABLE_NAME.fullmatch(name) or name.startswith(_OURS):
                problems.note(
                    f"{shown(name)} is not the name of a variable, or begins with {_OURS}, which "
                    "the worker sets",
                    field="environment",
                )
        for where in ("command", "container"):
            problems.note(self._code_problem(getattr(self, where)), field=where)
        known = dict.fromkeys((*PLACEHOLDERS, *RUN_PLACEHOLDERS, *self.parameters), "")
        for where, templates in (
            ("command", [each for each in self.command if each != ARGUMENTS]),
            ("container", self.container),
            ("environment", self.environment.values()),
            ("working_directory", filter(is_line, (self.working_directory,))),
        ):
            for template in templates:
                with problems.collecting(where):
                    filled(template, known)

    def _code_problem(self, words: Sequence[str]) -> str | None:
        """Why a campaign's parameter would choose the program, or be read as a program."""
        for place, word in enumerate(words):
            named = next((name for name in self.parameters if f"{{{name}}}" in word), None)
            if named is not None and place == 0:
                return f"the parameter {{{named}}} cannot be in the name of the program"
            if named is not None and words[place - 1] in _CODE_FOLLOWS:
                return (
                    f"the parameter {{{named}}} would be read as code in the text after "
                    f"{words[place - 1]}; give it as an argument of its own"
                )
        return None

    @property
    def of(self) -> TrainerAdapter:
        return ADAPTERS[self.adapter]

    @property
    def patterns(self) -> LogPatterns:
        return self.of.log if self.log is None else self.log

    @classmethod
    def from_mapping(cls, mapping: object) -> Self:
        """Reads an entry; TrainersFileInvalidError if a field is missing, unknown or wrong."""
        values = read_mapping(mapping, TrainersFileInvalidError, "a trainer")
        problems = Problems(TrainersFileInvalidError)
        with problems.collecting():
            known = [f.name for f in fields(cls) if f.name != "directory"]
            refuse_unknown(values, known, TrainersFileInvalidError, "field of a trainer")
        for name in ("name", "version", "command"):
            if values.get(name) is None:
                problems.note("the field is missing", field=name)
        for name in ("command", "container"):
            if name in values:
                with problems.collecting(name):
                    values[name] = _words(values[name])
        if type(values.get("version")) in (int, float):  # what YAML makes of 2 and 1.0
            values["version"] = str(values["version"])
        for name, read in (
            ("environment", _texts),
            ("parameters", read_declarations),
            ("log", _patterns),
        ):
            if name in values:
                with problems.collecting(name):
                    values[name] = read(values[name])
        problems.refuse()
        return cls(**values)


def read_trainers(document: object, directory: str = "") -> dict[str, ProgramTrainer]:
    """A file's trainers by name; TrainersFileInvalidError names trainer and field."""
    values = read_mapping(document, TrainersFileInvalidError, "the file")
    refuse_unknown(values, ("trainers",), TrainersFileInvalidError, "field")
    entries = values.get("trainers")
    if not isinstance(entries, list) or not entries:
        raise TrainersFileInvalidError("it is not a list of trainers", field="trainers")
    problems = Problems(TrainersFileInvalidError)
    trainers: dict[str, ProgramTrainer] = {}
    for place, entry in enumerate(entries):
        named = entry.get("name") if isinstance(entry, Mapping) else None
        with problems.collecting(f"trainers.{named if isinstance(named, str) else place}"):
            trainer = ProgramTrainer.from_mapping(entry)
            if trainer.name in trainers:
                raise TrainersFileInvalidError("there are two of this name", field="name")
            trainers[trainer.name] = replace(trainer, directory=directory)
    problems.refuse()
    return trainers


def _words(value: object) -> tuple[str, ...]:
    """A command as a list of texts; a string would need a shell."""
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise TrainersFileInvalidError(
            f"{shown(value)} is not a list of texts, one for each argument (no shell reads it)"
        )
    if any("\0" in each for each in value):
        raise TrainersFileInvalidError("an argument contains a NUL character")
    return tuple(value)


def _texts(value: object) -> dict[str, str]:
    given = read_mapping(value, TrainersFileInvalidError, "the environment")
    for name, each in given.items():
        if not isinstance(each, (str, int, float)) or "\0" in str(each):
            raise TrainersFileInvalidError(
                f"{shown(each)} is not a text, a number or a switch", field=shown(name)
            )
    return {name: word_of(each) for name, each in given.items()}


def _patterns(value: object) -> LogPatterns:
    given: dict[str, Any] = read_mapping(value, TrainersFileInvalidError, "the log")
    refuse_unknown(given, ("step",), TrainersFileInvalidError, "field of the log")
    step = given.get("step")
    steps: list[Any] = step if isinstance(step, list) else [step]
    if not steps or not all(isinstance(each, str) and each for each in steps):
        raise TrainersFileInvalidError("it is not a regular expression", field="step")
    try:
        return LogPatterns(variants=tuple(StepPattern(pattern=each) for each in steps))
    except ValueError as error:
        raise TrainersFileInvalidError(str(error), field="step") from error
