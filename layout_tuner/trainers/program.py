"""A worker's trainers: the programs that its owner lets campaigns run as probes.

A campaign names a trainer and gives values to the parameters that the owner has declared. It never
brings a command.
"""

from __future__ import annotations

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
from layout_tuner.trainers.adapter import TrainerAdapter, TrainerJob, merged
from layout_tuner.trainers.embedded import EMBEDDED
from layout_tuner.trainers.knobs.declared_knobs import (
    allowed_names,
    code_problem,
    offered,
    read_knobs,
    variable_name_problem,
)
from layout_tuner.trainers.log_patterns import LogPatterns, StepPattern
from layout_tuner.trainers.parameters import Parameter, read_declarations
from layout_tuner.trainers.placeholders import PLACEHOLDERS, filled
from layout_tuner.trainers.registry import ADAPTERS
from layout_tuner.trainers.simulator import is_simulator
from layout_tuner.trainers.trainer_knob import TrainerKnob

ProcessesPer = Literal["device", "node"]

ARGUMENTS: Final = "{arguments}"
"""An item of the command that stands for all arguments of the trainer's adapter."""

LAYOUT_ARGUMENTS: Final = "{layout_arguments}"
"""An item of the command that stands for the adapter's arguments of layout, batch, precision and
job knobs alone: model and data stand in the command."""
_ITEMS: Final = (ARGUMENTS, LAYOUT_ARGUMENTS)

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

VALUES_FILE: Final = "{values_file}"
STEPS: Final = "{steps}"


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
    configuration: Mapping[str, Any] = field(default_factory=dict)
    """The owner's own configuration, which {values_file} has with the layout's values in it; empty:
    {values_file} is the adapter's whole configuration. The text `{steps}` stands for the number."""
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    """What campaigns may set."""
    knobs: Mapping[str, TrainerKnob] = field(default_factory=dict)
    """Job knobs besides those of the adapter, or in their place with fewer values."""
    knobs_allowed: tuple[str, ...] | None = None
    """The job knobs that campaigns may set; None: all."""
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
        for name in (*self.parameters, *self.added_knobs):
            if f"{{{name}}}" in _ITEMS or name in (*PLACEHOLDERS, *RUN_PLACEHOLDERS):
                problem = f"{{{name}}} is a placeholder already; choose another name"
                problems.note(problem, field="parameters" if name in self.parameters else "knobs")
        for name, knob in self.added_knobs.items():
            if name in self.parameters:
                problems.note("there is a parameter of this name", field=f"knobs.{name}")
            elif not self._is_given(knob):
                problem = (
                    "the program would not get it: write it with `arguments` where the command has "
                    f"{ARGUMENTS} or {LAYOUT_ARGUMENTS}, with `keys` where something has "
                    f"{VALUES_FILE}, with `environment`, or put {{{name}}} into the command"
                )
                problems.note(problem, field=f"knobs.{name}")
        self._note_placement(problems)
        self._note_templates(problems)
        problems.refuse()

    def _note_placement(self, problems: Problems) -> None:
        adapter = ADAPTERS.get(self.adapter)
        if LAYOUT_ARGUMENTS in self.command and adapter and not adapter.has_placement:
            problem = (
                f"{self.adapter} has no {LAYOUT_ARGUMENTS}: write placeholders such as {{tp}}, or "
                f"{VALUES_FILE}"
            )
            problems.note(problem, field="command")
        if self.configuration and adapter and not adapter.placement_paths:
            problem = f"{self.adapter} has no configuration in a file; leave it out"
            problems.note(problem, field="configuration")

    def _note_templates(self, problems: Problems) -> None:
        if not self.command:
            problems.note("it is empty", field="command")
        for name in self.environment:
            problems.note(variable_name_problem(name), field="environment")
        for where in ("command", "container"):
            problems.note(self._code_problem(getattr(self, where)), field=where)
        names = (*PLACEHOLDERS, *RUN_PLACEHOLDERS, *self.parameters, *self.added_knobs)
        known = dict.fromkeys(names, "")
        for where, templates in (
            ("command", [each for each in self.command if each not in _ITEMS]),
            ("container", self.container),
            ("environment", self.environment.values()),
            ("working_directory", filter(is_line, (self.working_directory,))),
        ):
            for template in templates:
                with problems.collecting(where):
                    filled(template, known)

    def _code_problem(self, words: Sequence[str]) -> str | None:
        """Why a campaign's parameter would choose the program, or be read as a program."""
        names = (*self.parameters, *self.added_knobs)
        for name in names:
            if words and f"{{{name}}}" in words[0]:
                return f"the parameter {{{name}}} cannot be in the name of the program"
        return code_problem(words, {f"{{{name}}}": f"the parameter {{{name}}}" for name in names})

    @property
    def added_knobs(self) -> dict[str, TrainerKnob]:
        """The job knobs that the adapter does not have."""
        adapter = ADAPTERS.get(self.adapter)
        known = adapter.job_knobs if adapter else {}
        return {name: each for name, each in self.knobs.items() if name not in known}

    def _is_given(self, knob: TrainerKnob) -> bool:
        """Whether the program gets the knob's values."""
        texts = (*self.command, *self.container, *self.environment.values())
        has_values = any(VALUES_FILE in text for text in texts)
        is_added = knob.knob.name in self.added_knobs
        # Of an adapter's name the placeholder may be another, as {compile} is the probe's switch.
        if is_added and any(f"{{{knob.knob.name}}}" in text for text in texts):
            return True
        if not knob.writings:  # in the layout's document
            return has_values and not is_added
        adapter = ADAPTERS[self.adapter]
        is_placed = LAYOUT_ARGUMENTS in self.command
        has_arguments = is_placed or ARGUMENTS in self.command
        has_keys = has_values or (has_arguments and adapter.values_are_arguments)
        return all(
            (has_arguments or not (each.arguments or each.without)) and (has_keys or not each.keys)
            for each in knob.writings
        )

    @property
    def of(self) -> TrainerAdapter:
        """The adapter, with the job knobs and the version of this program."""
        adapter = ADAPTERS[self.adapter]
        knobs = {each.knob.name: each for each in adapter.knobs} | dict(self.knobs)
        return replace(
            adapter,
            knobs=offered(knobs.values(), self._is_given, self.knobs_allowed),
            any_settings=False,
            version=self.version,
        )

    @property
    def named(self) -> TrainerAdapter:
        """The same under this trainer's own name and version."""
        return replace(self.of, name=self.name, target_version=self.version)

    def configured(self, job: TrainerJob, steps: int) -> dict[str, Any]:
        """The configuration of {values_file}: the adapter's, or the owner's with the layout's."""
        if not self.configuration:
            return dict(self.of.values(job))
        return merged(_with_steps(self.configuration, steps), self.of.placement_values(job))

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
            ("configuration", _configuration),
            ("parameters", read_declarations),
            ("log", _patterns),
        ):
            if name in values:
                with problems.collecting(name):
                    values[name] = read(values[name])
        adapter = ADAPTERS.get(str(values.get("adapter", "command")))
        catalogue = {} if adapter is None else {each.knob.name: each for each in adapter.knobs}
        if "knobs" in values:
            with problems.collecting("knobs"):
                values["knobs"] = read_knobs(values["knobs"], catalogue)
        if "knobs_allowed" in values:
            with problems.collecting("knobs_allowed"):
                names = [*catalogue, *values.get("knobs", ())]
                values["knobs_allowed"] = allowed_names(values["knobs_allowed"], names)
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


def _with_steps(value: Any, steps: int) -> Any:
    """A configuration with the number in place of the text `{steps}`."""
    if isinstance(value, Mapping):
        return {name: _with_steps(each, steps) for name, each in value.items()}
    return steps if value == STEPS else value


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


def _configuration(value: object) -> dict[str, Any]:
    return read_mapping(value, TrainersFileInvalidError, "the configuration")


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
