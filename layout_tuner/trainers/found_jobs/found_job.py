"""A job as a reader found it in a file: values, each with its place, and what is open.

Readers execute nothing. Each field of ours is in at most one of three lists: read (with the place
in the file), assumed (with the reason: mostly the trainer's own default), or not understood.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, Self

from layout_tuner.documents.reading import shown, word_of
from layout_tuner.errors import SearchSpaceError

FormatName = Literal[
    "megatron-lm",
    "megatron-deepspeed",
    "megatron-bridge",
    "primus",
    "torchtitan-0.2",
    "nanotron",
    "deepspeed",
    "accelerate",
    "layout-tuner",
    "command",
]
"""The kinds of files that are read."""

MODEL: Final = "model."
JOB: Final = "job."
"""Fields are named as in campaigns: knobs of a layout by their names, fields of the model as
`model.hidden_size`, job knobs as `job.cuda_graphs`; beside them those of `BATCH_FIELDS`."""
BATCH_FIELDS: Final = ("global_batch_size", "devices_per_node", "num_devices", "zero_group_size")
"""What a job states beside the fields of a layout. `dp` is seldom written: it follows from the
number of devices. `num_devices` are the ranks of the whole job, `zero_group_size` those that share
one copy of what ZeRO shards, from which `zero_replicas` follows."""
OF_USER: Final = "stated by the user"
"""Why a field has the value that a user states beside the file."""


class JobFileInvalidError(SearchSpaceError):
    """A file is no job that can be read, or a job's values contradict each other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextPlace:
    """Where a value stands in a file."""

    line: int
    """From 1."""
    start: int
    """Position of the value's first character in the text of the file, from 0."""
    end: int
    """Position behind its last character."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadValue:
    """A value that a file states."""

    field: str
    value: Any
    said: str
    """As the file says it: `--tensor-model-parallel-size 4`, `parallelism.tp: 4`."""
    place: TextPlace | None = None
    """The literal that decides the value, also where a variable carries it; None: there is no
    single one, as of a switch that is given or of a product."""
    default_of: str = ""
    """`${TP:-4}`'s variable that the file does not set: another run may; empty: none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AssumedValue:
    """A value that no file states."""

    field: str
    value: Any
    why: str
    """Half a sentence: `Megatron-LM's default without --swiglu`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NotUnderstood:
    """Something in a file that cannot be read, or has no counterpart here."""

    said: str
    """As the file says it."""
    why: str
    field: str = ""
    """The field of ours that it sets, whose value therefore is open; empty: none."""
    line: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Stated:
    """The value of an option, a key or a variable."""

    value: Any
    """Of an option the tuple of its words, empty for a switch; of a key its value."""
    said: str
    place: TextPlace | None = None
    line: int | None = None
    unknown: str = ""
    """Why the value is not known; empty: it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramStart:
    """What a script starts a program with, beside its arguments."""

    container: tuple[str, ...] = ()
    """The command that runs it in a container."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the script exports, as far as they are known."""
    interpreter: tuple[str, ...] = ("python",)
    """Words before the program: `python -u -m`; empty: the program is none of Python's."""
    working_directory: str = ""
    """Where the script starts it; a relative path, as an empty one, is that of its own start."""
    lost: tuple[str, ...] = ()
    """What else the program has of the script: variables of which the values are not known, and
    the options of srun's containers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchCommand(ProgramStart):
    """The program that a script starts on every rank."""

    words: tuple[str, ...]
    """Program and arguments, expanded as far as they are known, without torchrun or srun."""
    unknown: tuple[str, ...] = ()
    """Words that are not known without running the script; `words` has them as the script does."""
    written: Mapping[str, str] = field(default_factory=dict)
    """Files that the script writes before, as `JobFile.written`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundJob:
    """A job that was found in a file."""

    file: str
    """The name of the file."""
    format: FormatName
    trainer: str
    """The name of the trainer's adapter (`trainers.registry`)."""
    version: str = ""
    """Its version, where the file says or implies it."""
    name: str = ""
    """Tells the jobs of one file apart: a number of the launch line, a name of the file's own."""
    model_name: str = ""
    """A published model that the file names (`known_models`), where it does not state a shape."""
    read: tuple[ReadValue, ...] = ()
    assumed: tuple[AssumedValue, ...] = ()
    not_understood: tuple[NotUnderstood, ...] = ()
    command: LaunchCommand | None = None
    """What a probe runs; None: the file starts nothing, as a configuration alone."""
    vocabulary: tuple[int, int] | None = None
    """Entries of the vocabulary, and the number whose product with tp they are padded to a multiple
    of; None: the size does not depend on tp."""

    @property
    def values(self) -> dict[str, Any]:
        """Values by field, read and assumed."""
        assumed = {each.field: each.value for each in self.assumed}
        return assumed | {each.field: each.value for each in self.read}

    def below(self, prefix: str) -> dict[str, Any]:
        """Values of the fields whose names begin so, by the rest of the name."""
        return below(self.values, prefix)

    def value(self, name: str) -> Any:
        """The value of a field; None: there is none."""
        return self.values.get(name)

    @property
    def certain(self) -> tuple[ReadValue, ...]:
        """What is read, without defaults of variables."""
        return tuple(each for each in self.read if not each.default_of)

    @property
    def presumed(self) -> tuple[AssumedValue, ...]:
        """What is assumed, with the file's own defaults of variables that it does not set."""
        defaults = (
            AssumedValue(
                field=each.field,
                value=each.value,
                why=f"{each.said}: its default where {each.default_of} is not given",
            )
            for each in self.read
            if each.default_of
        )
        return (*self.assumed, *defaults)

    @property
    def open_fields(self) -> dict[str, NotUnderstood]:
        """Fields that something sets which is not understood."""
        return {each.field: each for each in self.not_understood if each.field}

    def with_stated(self, stated: Mapping[str, Any], why: str = OF_USER) -> Self:
        """The job with values of the user, over those of the file."""
        whys = dict.fromkeys(stated, why)
        if self.vocabulary and isinstance(tp := stated.get("tp"), int) and tp > 0:
            size, divisor = self.vocabulary
            padded = {f"{MODEL}vocab_size": -(-size // (divisor * tp)) * divisor * tp}
            stated = padded | dict(stated)
            whys = dict.fromkeys(padded, f"{size} entries, padded for tp={tp}") | whys
        return replace(
            self,
            read=tuple(each for each in self.read if each.field not in stated),
            assumed=(
                *(each for each in self.assumed if each.field not in stated),
                *(
                    AssumedValue(field=name, value=each, why=whys[name])
                    for name, each in stated.items()
                ),
            ),
            not_understood=tuple(each for each in self.not_understood if each.field not in stated),
        )


@dataclass(kw_only=True)
class Findings:
    """Collects what a reader finds; the last value of a field counts, as in every trainer."""

    read: dict[str, ReadValue] = field(default_factory=dict)
    assumed: dict[str, AssumedValue] = field(default_factory=dict)
    not_understood: list[NotUnderstood] = field(default_factory=list)
    vocabulary: tuple[int, int] | None = None
    """As of `FoundJob`."""

    def note(self, name: str, value: Any, said: str, place: TextPlace | None = None) -> None:
        """Notes a value that the file states."""
        self.read[name] = ReadValue(field=name, value=value, said=said, place=place)
        self.not_understood = [each for each in self.not_understood if each.field != name]

    def assume(self, name: str, value: Any, why: str) -> None:
        """Notes a value that the file does not state; one that it states stays."""
        if name not in self.read and not self.is_open(name):
            self.assumed[name] = AssumedValue(field=name, value=value, why=why)

    def miss(self, said: str, why: str, *, name: str = "", line: int | None = None) -> None:
        """Notes what is not understood; the field that it sets is open from here on."""
        self.read.pop(name, None)
        self.assumed.pop(name, None)
        self.not_understood.append(NotUnderstood(said=said, why=why, field=name, line=line))

    def forget(self, prefix: str, *, keeps: str = "") -> None:
        """Takes back the fields whose names begin so, except one that was read."""
        for found in (self.read, self.assumed):
            for name in [*found]:
                if name.startswith(prefix) and not (name == keeps and found is self.read):
                    del found[name]
        self.not_understood = [
            each for each in self.not_understood if not each.field.startswith(prefix)
        ]

    def is_open(self, name: str) -> bool:
        return any(each.field == name for each in self.not_understood)

    def below(self, prefix: str) -> dict[str, Any]:
        """Values so far of the fields whose names begin so, by the rest of the name."""
        return below({name: self.value(name) for name in (*self.assumed, *self.read)}, prefix)

    def value(self, name: str) -> Any:
        """The value of a field so far; None: there is none."""
        found = self.read.get(name) or self.assumed.get(name)
        return None if found is None else found.value

    def job(self, **about: Any) -> FoundJob:
        """The job; `about` are the other fields of `FoundJob`."""
        assumed = {name: each for name, each in self.assumed.items() if name not in self.read}
        return FoundJob(
            read=tuple(self.read.values()),
            assumed=tuple(assumed.values()),
            not_understood=tuple(self.not_understood),
            vocabulary=self.vocabulary,
            **about,
        )


def below(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The values whose names begin so, by the rest of the name."""
    return {
        name.removeprefix(prefix): each for name, each in values.items() if name.startswith(prefix)
    }


def job_lines(job: FoundJob) -> Iterator[str]:
    """The three lists, for people: what was read, assumed, and not understood."""
    read = [(f"{each.field} = {word_of(each.value)}", each.said) for each in job.certain]
    yield from _titled("read", read)
    yield from open_lines(job)


def open_lines(job: FoundJob) -> Iterator[str]:
    """What the file does not say: what was assumed, and what is not understood."""
    assumed = [(f"{each.field} = {word_of(each.value)}", each.why) for each in job.presumed]
    yield from _titled("assumed", assumed)
    fields: dict[tuple[str, str], list[str]] = {}
    for each in job.not_understood:
        fields.setdefault((shown(each.said), each.why), []).append(each.field)
    unknown = [
        (said, f"{why} ({', '.join(names)})" if len(names) > 1 else why)
        for (said, why), names in fields.items()
    ]
    yield from _titled("not understood", unknown)


def _titled(title: str, found: Sequence[tuple[str, str]]) -> Iterator[str]:
    if found:
        width = min(max(len(what) for what, _ in found), 40)
        yield f"{title}:"
        yield from (f"  {what:<{width}}  {why}" for what, why in found)
