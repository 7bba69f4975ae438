"""Writes a layout into a copy of the file that a job was read from.

The copy is right by construction of its check and not of its writing: it is read again, and must be
the wanted job. What differs is written anew a few times, at first where the literals stand, then in
place of the variables that carry them; what then still differs is refused.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

from layout_tuner.documents.reading import word_of
from layout_tuner.errors import LayoutInvalidError, SearchSpaceError
from layout_tuner.search_spaces.layouts.job_settings import JobSettings, JobValue
from layout_tuner.search_spaces.layouts.layout import KNOBS, LAYOUT_FIELDS, Layout
from layout_tuner.terminal.plurals import listed
from layout_tuner.trainers.adapter import TrainerAdapter, TrainerJob, overrides
from layout_tuner.trainers.found_jobs.completed_job import completed
from layout_tuner.trainers.found_jobs.found_job import (
    JOB,
    MODEL,
    FoundJob,
    JobFileInvalidError,
    ReadValue,
    TextPlace,
)
from layout_tuner.trainers.found_jobs.into.key_edits import KeyEdits, KeyNotWritableError
from layout_tuner.trainers.found_jobs.into.layout_changes import (
    GONE,
    environment_changes,
    in_spelling_of,
    key_changes,
    option_changes,
    option_of,
    options_of_job,
    plain_word,
)
from layout_tuner.trainers.found_jobs.into.script_edits import (
    Edit,
    EditsOverlapError,
    edited,
    script_edits,
)
from layout_tuner.trainers.found_jobs.job_file import JobFile
from layout_tuner.trainers.found_jobs.knob_settings import settings_in_effect
from layout_tuner.trainers.found_jobs.positioned import root_of
from layout_tuner.trainers.found_jobs.positioned_node import Positioned
from layout_tuner.trainers.found_jobs.program_command import options_of_words
from layout_tuner.trainers.found_jobs.read_job import read_job
from layout_tuner.trainers.found_jobs.script_jobs import commands_of
from layout_tuner.trainers.registry import ADAPTERS

_MOST_ROUNDS: Final = 4
"""Of writing and reading. The first writes what differs; each further one what the one before
changed beside it, as an option that follows another one's variable or default."""
CONFIGURATIONS: Final = (".yaml", ".yml", ".json", ".toml")
_DEGREES: Final = ("tp", "cp", "pp", "ep", "etp", "vpp", "sequence_parallel")
_MACHINE: Final = ("num_nodes", "devices_per_node", "num_devices")
"""Fields that whoever starts the job may say in the file's place."""
_BATCH: Final = ("micro_batch_size", "num_microbatches")
_DERIVED: Final = (*_BATCH, "dp", "num_nodes")
"""Fields that a file may leave out: they follow from the devices and the batch."""
_LOADED: Final = ("--load", "checkpoint.load")
"""What a job goes on from: with another path it would begin anew."""
_LEFT_OPEN: Final = ("auto", "-1")
"""Literals with which a trainer derives a value by itself: they stay where that is right."""
_HEAD_NODES: Final = re.compile(r"^#SBATCH[^\n]*?(?:--nodes[= ]|-N[ ]?)(\d+)\b", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rewritten:
    """A copy of a file with another layout in it."""

    file: JobFile
    before: JobFile
    notes: tuple[str, ...] = ()
    """What the user must know, one sentence each."""

    @property
    def is_changed(self) -> bool:
        return self.file.text != self.before.text

    def diff(self, name: str) -> str:
        """The differences as a unified diff; `name` is that of the copy."""
        old, new = (each.text.splitlines(keepends=True) for each in (self.before, self.file))
        lines = difflib.unified_diff(old, new, self.before.name, name)
        return "".join(each if each.endswith("\n") else f"{each}\n" for each in lines)


def rewritten(
    file: JobFile, job: TrainerJob, *, name: str = "", stated: Mapping[str, Any] | None = None
) -> Rewritten:
    """The file with the layout of `job` in place of its own.

    Args:
        file: a launch script or a configuration with a job.
        job: the wanted layout, and the model that the file trains.
        name: which job of the file, where it has several.
        stated: fields that the user says of the file, which the reader does not understand.

    Raises:
        JobFileInvalidError: the file cannot be read, trains another model, or the layout cannot be
            written into it; the message says what to change by hand.
    """
    found = read_job(file, name)
    adapter = ADAPTERS[found.trainer]
    for field in {each.field for each in found.read} & (stated or {}).keys():
        raise JobFileInvalidError(
            f"--set {field}: {file.name} states it itself; here --set says what the file leaves open"
        )
    wanted = _Wanted(job, adapter, stated or {})
    wanted.note_idle(found)
    wrong = wanted.wrong_fields(found)
    notes = tuple(wanted.notes(found))
    if not wrong or wanted.is_reached(found):
        return Rewritten(file=file, before=file, notes=notes)
    wanted.refuse_open(found)
    wanted.refuse_unfit(found)
    copy, first = file, found
    for number in range(_MOST_ROUNDS):
        step = _Round(file=copy, found=found, wanted=wanted, wrong=wrong, is_first=number == 0)
        copy = JobFile(name=file.name, text=step.text(), folder=file.folder)
        try:
            found = read_job(copy, name)
        except JobFileInvalidError as error:
            raise _unwritable(
                wanted, first, wrong, f"the copy could not be read: {error}"
            ) from error
        wrong = wanted.wrong_fields(found)
        if not wrong or wanted.is_reached(found):
            new = (
                *wanted.refuse_side_effects(first, found),
                *wanted.refuse_other_words((file, first), (copy, found)),
                *wanted.new_notes(first),
            )
            return Rewritten(file=copy, before=file, notes=(*notes, *new))
    raise _unwritable(wanted, found, wrong, "")  # the copy may say it in another file


def _unwritable(
    wanted: _Wanted, found: FoundJob, wrong: Mapping[str, Any], why: str
) -> JobFileInvalidError:
    """Says what to change by hand, in the words of the file where it stands."""
    said = {each.field: each.said for each in found.read}
    keys = overrides(wanted.adapter.values(wanted.job), lambda path, value: [path, word_of(value)])
    of_key, changes, is_elsewhere = dict(keys), [], True
    for name, value in wrong.items():
        now = said.get(name, "")
        file, _, stated = now.partition(": ")
        if (key := stated.partition(": ")[0]) in of_key:  # of another file
            changes.append(f"{key}: {of_key[key]} in {file} ({name}={word_of(value)})")
            continue
        is_elsewhere = False
        changes.append(f"{name}={word_of(value)}" + f" (where it says {now})" * bool(now))
    then = "do this again" if is_elsewhere else "give what you changed with --set FIELD=VALUE"
    return JobFileInvalidError(
        f"{found.file}: this layout cannot be written into it; change by hand {listed(changes, 5)}, and "
        f"{then}" + (f" ({why})" if why else "")
    )


def _words_of(found: FoundJob, name: str) -> str:
    """What a file says of a field, or why it is assumed; empty: neither."""
    said = {each.field: each.why for each in found.assumed}
    return (said | {each.field: each.said for each in found.read}).get(name, "")


class _Wanted:
    """The wanted job, compared with what is read of a file."""

    def __init__(self, job: TrainerJob, adapter: TrainerAdapter, stated: Mapping[str, Any]) -> None:
        layout = job.layout
        self.job, self.adapter, self.stated = job, adapter, stated
        self.values: dict[str, Any] = {name: getattr(layout, name) for name in LAYOUT_FIELDS}
        self.values |= {
            "global_batch_size": layout.global_batch_size,
            "num_devices": layout.num_devices,
            "devices_per_node": job.ranks_per_node,
        }
        self.defaults = {name: KNOBS[name].default for name in LAYOUT_FIELDS}
        if layout.cp == 1:
            del self.values["cp_comm_type"]  # without context parallelism it means nothing
        if not job.model.num_experts:
            del self.values["ep"], self.values["etp"]
        self.settings = self._in_effect(layout.job, layout)
        self.idle: set[str] = set()
        for name, knob in adapter.job_knobs.items():
            self.defaults[JOB + name] = knob.default
            self.values[JOB + name] = self.settings.get(name, knob.default)
        for name in self.settings.keys() - adapter.job_knobs.keys():
            self.defaults[JOB + name] = None  # the trainer lacks it
            self.values[JOB + name] = self.settings[name]

    def _in_effect(self, settings: Mapping[str, JobValue], layout: Layout) -> JobSettings:
        return settings_in_effect(settings, self.adapter.knobs, layout, self.job.model)

    def _known(self, found: FoundJob) -> FoundJob:
        """The job with what the user states of fields that the file leaves open.

        A copy may state one of them by itself.
        """
        read = {each.field for each in found.read}
        stated = {name: value for name, value in self.stated.items() if name not in read}
        return found.with_stated(stated) if stated else found

    def wrong_fields(self, found: FoundJob) -> dict[str, Any]:
        """The fields that the file has otherwise, with the wanted values."""
        found = self._known(found)
        read, open_fields = found.values, found.open_fields
        stated = {each.field for each in found.read}
        wrong = {}
        for name, value in self.values.items():
            if name in open_fields or (read.get(name) is None and name not in self.defaults):
                continue
            if read.get(name) is None and name in _DERIVED:
                continue
            if name in _MACHINE and name not in stated:
                continue
            if read.get(name, self.defaults.get(name)) != value:
                wrong[name] = value
        return {name: value for name, value in wrong.items() if name not in self.idle}

    def note_idle(self, found: FoundJob) -> None:
        """Notes settings of the file without effect there and in the wanted layout: they stay."""
        read = self._known(found).values
        settings = {name: read[JOB + name] for name in self.adapter.job_knobs if JOB + name in read}
        now = self.job_as_read(found).layout
        used = {*self._in_effect(settings, now), *self._in_effect(settings, self.job.layout)}
        self.idle = {JOB + name for name in settings if name not in used | self.settings.keys()}

    def refuse_open(self, found: FoundJob) -> None:
        """Refuses fields of the layout that the file sets in a way that is not understood."""
        open_fields = self._known(found).open_fields
        named = [
            f"{name} ({open_fields[name].said}: {open_fields[name].why})"
            for name in open_fields
            if name in self.values
        ]
        if named:
            raise JobFileInvalidError(
                f"{found.file}: what it says of {listed(named, 5)} is not understood, so that no other "
                "layout can be written there; state what it is with --set FIELD=VALUE"
            )

    def refuse_unfit(self, found: FoundJob) -> None:
        """Refuses a layout that the trainer does not have, unless the file's own breaks the rule.

        The files of an export have limits that the user's own may not have.
        """
        now, then = self.job_as_read(found), self.job
        own = self.adapter.all_lacking(now)
        sentences = [
            rule.sentence(then.layout, then.model)
            for rule in self.adapter.rules
            if rule.broken(then.layout, then.model) and not rule.broken(now.layout, now.model)
        ]
        sentences += [
            why for name, why in self.adapter.all_lacking(then).items() if name not in own
        ]
        if sentences:
            raise JobFileInvalidError(f"{found.file}: {'; '.join(sentences)}")

    def _layout_of(self, found: FoundJob) -> Layout:
        known = self._known(found)
        return completed(
            known.with_stated(self._unsaid(known)),
            model=self.job.model,
            num_nodes=self.job.layout.num_nodes,
            devices_per_node=self.job.ranks_per_node,
        ).layout

    def is_reached(self, found: FoundJob) -> bool:
        """Whether the file has the layout, also where it states what has no effect there."""
        nodes = {each.field: each.value for each in found.read if each.field in _MACHINE}
        if any(self.values[name] != value for name, value in nodes.items()):
            return False
        with suppress(SearchSpaceError):
            return self._layout_of(found) == self.job.layout
        return False

    def refuse_side_effects(self, before: FoundJob, after: FoundJob) -> tuple[str, ...]:
        """Refuses a copy in which something else than the layout changed.

        Returns:
            What follows otherwise from the same words, and what is not understood but sets no
            field.
        """
        old, now = before.values, after.values
        others = [
            name
            for name in {**old, **now}
            if name not in (*self.values, *LAYOUT_FIELDS) and old.get(name) != now.get(name)
        ]
        # Of the same words, as a vocabulary that the trainer pads to a multiple of tp.
        same = {name for name in others if _words_of(before, name) == _words_of(after, name) != ""}
        changed = [name for name in others if name not in same]
        said_before = {each.said for each in before.not_understood}
        new = [each for each in after.not_understood if each.said not in said_before]
        opened = [each.said for each in new if each.field]
        if changed:
            raise JobFileInvalidError(
                f"{before.file}: the layout cannot be written into it without a change of "
                f"{listed(changed, 5)}, which share a variable with it; give them values of their own "
                "first"
            )
        if opened:
            raise JobFileInvalidError(
                f"{before.file}: the layout cannot be written into it: what the copy says is not "
                f"understood ({listed(opened, 3)}); change the file by hand"
            )
        layout = self._layout_of(after)
        differing = {
            name: self.values[name]
            for name in LAYOUT_FIELDS
            if name in self.values and getattr(layout, name) != self.values[name]
        }
        for name in {**layout.job, **self.settings}:
            if layout.job.get(name) != self.settings.get(name):
                differing[JOB + name] = self.values.get(JOB + name)
        if differing:
            raise _unwritable(self, before, differing, "")
        return (
            *(
                f"{name}={word_of(now[name])} in this layout, and {word_of(old[name])} before: "
                f"{_words_of(after, name)}"
                for name in others
            ),
            *(f"{each.said}: {each.why}" for each in new),
        )

    def refuse_other_words(
        self, before: tuple[JobFile, FoundJob], after: tuple[JobFile, FoundJob]
    ) -> list[str]:
        """Refuses a script whose variables change what is loaded; notes other words that change."""
        file, first = before
        if root_of(file, *CONFIGURATIONS) is not None:
            return []
        now = self.job_as_read(first)
        known = options_of_job(self.adapter, now) | options_of_job(self.adapter, self.job)
        gone = environment_changes(self.adapter, now, self.job)
        fields = {*self.values, *LAYOUT_FIELDS}
        of_layout = known.keys() | {
            option_of(said)
            for _, found in (before, after)
            for each in found.read
            if each.field in fields
            for said in each.said.split(", ")
        }
        notes = []
        for old, new in zip(commands_of(*before), commands_of(*after), strict=True):
            for name, value in gone.items():
                if value is GONE and name in new.environment:
                    raise JobFileInvalidError(
                        f"{file.name}: this layout cannot run with {name}; take it out by hand first"
                    )
            was, has = (
                options_of_words(each.prefix if each.text is None else each.text for each in words)
                for words in (old.words, new.words)
            )
            for name in was.keys() - of_layout:
                if name not in has or has[name] == was[name]:
                    continue
                change = f"{' '.join((name, *has[name]))} in this layout, and "
                change += f"{' '.join((name, *was[name]))} before"
                if name in _LOADED:
                    raise JobFileInvalidError(
                        f"{file.name}: {change}: it shares a variable with the layout; give it a "
                        "value of its own first"
                    )
                notes.append(change)
        return sorted(set(notes))

    def _unsaid(self, found: FoundJob) -> dict[str, int]:
        """What the file leaves to the program that reads it: the batch of a device."""
        layout = self.job.layout
        names = [each for each in _BATCH if found.value(each) is None]
        if found.value("global_batch_size") is not None:
            names = names[:1] if names == list(_BATCH) else []
        return {name: getattr(layout, name) for name in names}

    def new_notes(self, found: FoundJob) -> list[str]:
        """What the adapter says of the layout, and not of the file's own."""
        said = self.adapter.notes(self.job_as_read(found))
        return [each for each in self.adapter.notes(self.job) if each not in said]

    def notes(self, found: FoundJob) -> Iterator[str]:
        """What the file does not say, and what stays as it is."""
        layout, model = self.job.layout, self.job.model
        other = [
            f"{each.field}={word_of(each.value)}"
            for each in found.read
            if each.field.startswith(MODEL)
            and each.field not in (f"{MODEL}name", f"{MODEL}lacks")
            and getattr(model, each.field.removeprefix(MODEL), each.value) != each.value
        ]
        if other:
            yield (
                f"the layout is for the model {model.title}, and {found.file} says {listed(other, 5)}: "
                "is it the file of that model's job?"
            )
        if not {"num_nodes", "num_devices"} & {each.field for each in found.read}:
            yield (
                f"{found.file} does not say on how many nodes it runs: start it on "
                f"{layout.num_nodes}, with {self.job.ranks_per_node} ranks on each"
            )
        for name, value in self._unsaid(self._known(found)).items():
            yield f"{found.file} does not say {name}: give your program {value}"
        for name, each in found.open_fields.items():
            if name in self.values and name not in self.stated:
                yield f"{name} stays as the file says it, which is not understood: {each.said}"

    def job_as_read(self, found: FoundJob) -> TrainerJob:
        """The wanted job with what the file has otherwise, as far as a layout can have it."""
        read = self._known(found).values
        layout = self.job.layout
        for name in LAYOUT_FIELDS:
            value = read.get(name, self.defaults[name] if name not in _DERIVED else None)
            if name in self.values and value is not None:
                with suppress(LayoutInvalidError, TypeError, ValueError):
                    layout = replace(layout, **{name: value})
        settings = {
            name: read.get(JOB + name, self.defaults[JOB + name]) for name in self.adapter.job_knobs
        }
        settings = {
            name: value
            for name, value in settings.items()
            if value is not None
            and value != self.defaults[JOB + name]
            and JOB + name not in self.idle
        }
        with suppress(LayoutInvalidError):
            layout = replace(layout, job=JobSettings(settings))
        batch = read.get("global_batch_size")
        has_number = read.get("num_microbatches") not in (None, self.values["num_microbatches"])
        if batch is not None and not has_number and layout.global_batch_size != batch:
            at_once = layout.dp * layout.micro_batch_size
            # One that does not divide has no such layout; any other number shows as a difference.
            number = batch // at_once if batch % at_once == 0 else layout.num_microbatches + 1
            if number != self.job.layout.num_microbatches or batch % at_once == 0:
                layout = replace(layout, num_microbatches=max(number, 1))
        return replace(self.job, layout=layout)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Round:
    """One round of changes."""

    file: JobFile
    found: FoundJob
    wanted: _Wanted
    wrong: Mapping[str, Any]
    """The fields to change, with their new values."""
    is_first: bool

    def text(self) -> str:
        """The text with the changes."""
        root = root_of(self.file, *CONFIGURATIONS)
        now = self.wanted.job_as_read(self.found)
        try:
            edits = self._script_edits(now) if root is None else self._key_edits(now, root)
            return edited(self.file.text, edits)
        except EditsOverlapError as error:
            raise _unwritable(
                self.wanted, self.found, self.wrong, "two changes meet at one place"
            ) from error
        except KeyNotWritableError as error:
            raise _unwritable(
                self.wanted, self.found, self.wrong, f"{error} is no plain value there"
            ) from error

    def _literals(self) -> dict[str, tuple[ReadValue, str]]:
        """Literals that are our values as they stand, by field, with the new words."""
        found: dict[str, tuple[ReadValue, str]] = {}
        for each in self.found.read if self.is_first else ():
            place, value = each.place, self.wrong.get(each.field)
            if place is None or value is None or each.field.startswith(JOB):
                continue
            if self.file.text[place.start : place.end] == word_of(each.value):
                found[each.field] = (each, word_of(value))
        return found

    def _literal_edits(self, literals: Mapping[str, tuple[ReadValue, str]]) -> Iterator[Edit]:
        taken: dict[TextPlace, str] = {}
        for field, (each, word) in literals.items():
            assert each.place is not None
            # Of two fields that one variable carries, the second is written in the next round.
            if taken.setdefault(each.place, word) == word:
                yield Edit(start=each.place.start, end=each.place.end, text=word)
                if field == "num_nodes":
                    yield from self._head(word_of(each.value), word)

    def _head(self, old: str, new: str) -> Iterator[Edit]:
        """The nodes of Slurm's head, which the launcher's number repeats."""
        for each in _HEAD_NODES.finditer(self.file.text):
            if each[1] == old:
                yield Edit(start=each.start(1), end=each.end(1), text=new)

    def _script_edits(self, now: TrainerJob) -> Iterator[Edit]:
        adapter, job, read = self.wanted.adapter, self.wanted.job, self.found.read
        literals = self._literals()
        names = {field: option_of(each.said) for field, (each, _) in literals.items()}
        changes = self._beside(literals, names, option_changes(adapter, now, job))
        own = options_of_job(adapter, now) | options_of_job(adapter, job)
        for command in commands_of(self.file, self.found):
            written = {option_of(each.text or each.prefix) for each in command.words}
            left = {
                name: each
                for name, each in changes.items()
                if not self._stands(name, each, literals, written)
            }
            yield from script_edits(
                self.file.text,
                command,
                changes=in_spelling_of(left, written, job),
                replaced={
                    option_of(each.said)
                    for each in read
                    if each.field in self.wrong and each.field not in literals
                }
                - own.keys(),
                anchors=[
                    {option_of(each.said) for each in read if each.field in fields}
                    for fields in (_DEGREES, self.wanted.values)
                ],
                environment=environment_changes(adapter, now, job),
                at_use=not self.is_first,
            )
        yield from self._literal_edits(
            {k: v for k, v in literals.items() if names[k] not in changes}
        )

    def _key_edits(self, now: TrainerJob, root: Positioned) -> Iterator[Edit]:
        keys = KeyEdits(self.file)
        paths: dict[TextPlace | None, str] = {
            each.place: each.path for each in root.leaves() if each.place is not None
        }
        read = [
            paths[each.place]
            for each in self.found.read
            if each.place in paths and each.field in self.wanted.values
        ]
        changes = key_changes(
            self.wanted.adapter, now, self.wanted.job, like=read, states_false=not self.is_first
        )
        literals = self._literals()
        names = {
            field: paths.get(each.place, "")
            for field, (each, _) in literals.items()
            if each.place is not None
        }
        changes = self._beside(literals, names, changes)
        written = {path for path in changes if root.get(path) is not None}
        for path, value in changes.items():
            node = root.get(path)
            is_open = self.is_first and node is not None and str(node.value) in _LEFT_OPEN
            if not is_open and not self._stands(path, value, literals, written):
                keys.set(path, value)
        yield from keys.finish()
        yield from self._literal_edits(
            {k: v for k, v in literals.items() if names[k] not in changes}
        )

    def _beside(
        self,
        literals: Mapping[str, tuple[ReadValue, str]],
        names: Mapping[str, str],
        changes: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Changes of the adapter's, without options and keys that go and whose numbers change.

        The adapter leaves out what is the default, such as a degree of 1. A number stays there.
        """
        kept = {names[field] for field, (_, word) in literals.items() if word.isdigit()}
        return {
            name: each for name, each in changes.items() if each is not GONE or name not in kept
        }

    def _stands(
        self,
        name: str,
        value: Any,
        literals: Mapping[str, tuple[ReadValue, str]],
        written: Collection[str],
    ) -> bool:
        """Whether a new option or key is one whose literal stands under another name."""
        words = {word for _, word in literals.values()}
        return value is not GONE and name not in written and plain_word(value) in words
