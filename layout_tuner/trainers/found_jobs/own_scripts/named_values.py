"""What a configuration or a command line states, by name: each statement is read once.

What no reader takes is listed as not understood, unless it is known to leave layout, model and
batch as they are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NoReturn

from layout_tuner.documents.reading import word_of
from layout_tuner.terminal.plurals import listed
from layout_tuner.trainers.found_jobs.found_job import Findings, JobFileInvalidError, Stated
from layout_tuner.trainers.found_jobs.job_file import JobFile
from layout_tuner.trainers.found_jobs.positioned import YAML_SUFFIXES, plain_value, positioned
from layout_tuner.trainers.found_jobs.positioned_node import Positioned
from layout_tuner.trainers.found_jobs.program_command import Option

AUTO: Final = "auto"
"""A value that Hugging Face's Trainer or Accelerate fills in."""
ADAM: Final = re.compile(
    r"(?i)(paged_|fused|torch|deepspeedcpu)?adamw?(_torch|_hf|_torch_fused|_apex_fused|_fused)?"
)
"""Optimizers with the two states of Adam in fp32, by the names of any trainer."""
NOT_ADAM: Final = "its states or its exchange are not those of Adam in fp32"
_HAS_NO_COUNTERPART: Final = "it is not known here"
_CONFIGURATIONS: Final = (*YAML_SUFFIXES, ".json")


def names(text: str, *, section: str = "") -> frozenset[str]:
    """The words of a text, each below a section."""
    return frozenset(f"{section}.{each}" if section else each for each in text.split())


class Statements:
    """Statements by name, which readers take one after the other."""

    def __init__(self, stated: Mapping[str, Stated]) -> None:
        """Takes `stated` without what is null or an empty section."""
        self._stated = {
            name: each
            for name, each in stated.items()
            if each.value not in (None, {}) or each.unknown
        }
        self._used: set[str] = set()

    def take(self, *among: str) -> Stated | None:
        """The first of some names that is stated and was not taken yet; all of them are taken."""
        found = [each for each in among if each in self._stated and each not in self._used]
        self._used.update(found)
        return self._stated[found[0]] if found else None

    def look(self, name: str) -> Stated | None:
        """A statement that stays to be taken."""
        return self._stated.get(name)

    def take_all(self, prefix: str) -> Iterator[tuple[str, Stated]]:
        """All whose names begin so."""
        for name in self._stated:
            if name.startswith(prefix) and (found := self.take(name)) is not None:
                yield name, found

    def rest(self) -> list[tuple[str, Stated]]:
        """What was not taken, by name."""
        return [(name, each) for name, each in self._stated.items() if name not in self._used]

    def list_rest(
        self, findings: Findings, irrelevant: Collection[str], prefixes: Collection[str] = ()
    ) -> None:
        """Lists what was not taken, apart from names that change nothing here."""
        for name, each in self.rest():
            if name in irrelevant or name.startswith(tuple(prefixes)):
                continue
            findings.miss(each.said, each.unknown or _HAS_NO_COUNTERPART, line=each.line)


def note(findings: Findings, name: str, stated: Stated, value: Any) -> None:
    """Notes the value of a field that a statement stands for."""
    findings.note(name, value, stated.said, stated.place)


def miss(findings: Findings, stated: Stated, why: str, *, name: str = "") -> None:
    """Notes that a statement is not understood."""
    findings.miss(stated.said, stated.unknown or why, name=name, line=stated.line)


def assume_rest(findings: Findings, name: str, value: Any, why: str) -> None:
    """Assumes a value where neither a statement nor an assumption gives one."""
    if name not in findings.assumed:
        findings.assume(name, value, why)


def leave_open(
    findings: Findings, fields: Iterable[str], said: str, why: str, *, line: int | None = None
) -> None:
    """Leaves those of some fields open that have no value yet."""
    for name in fields:
        if findings.value(name) is None and not findings.is_open(name):
            findings.miss(said, why, name=name, line=line)


def note_count(findings: Findings, name: str, stated: Stated | None) -> None:
    """Notes a whole number, or that it is none; nothing where nothing is stated."""
    if stated is None:
        return
    number = whole_number(stated)
    if number is None or number < 1:
        miss(findings, stated, "it is not a whole number of at least 1", name=name)
    else:
        note(findings, name, stated, number)


def note_choice(
    findings: Findings, name: str, stated: Stated | None, choices: Mapping[str, Any]
) -> None:
    """Notes what a word stands for, in small letters or large ones; or that it is none of them."""
    if stated is None:
        return
    word = word_of(stated.value).lower()
    if stated.unknown or word not in choices:
        miss(findings, stated, f"it is none of {listed([*choices], 10)}", name=name)
    else:
        note(findings, name, stated, choices[word])


def whole_number(stated: Stated | None) -> int | None:
    """The whole number that a statement has, also as a text or as 8.0; None: it has none."""
    value = None if stated is None or stated.unknown else stated.value
    if isinstance(value, str):
        value = plain_value(value.strip())
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def is_on(stated: Stated | None) -> bool | None:
    """The switch that a statement is, also as a text; None: it is none, or not known."""
    value = None if stated is None or stated.unknown else stated.value
    if isinstance(value, str):
        value = {"true": True, "false": False, "yes": True, "no": False}.get(value.strip().lower())
    return bool(value) if value in (True, False) else None


def statements_of(node: Positioned, *, named: str = "") -> dict[str, Stated]:
    """The values of a configuration by their paths; `named` as of `Positioned.stated`."""
    return {each.path: each.stated(named) for each in node.leaves()}


def options_by_name(options: Iterable[Option]) -> dict[str, Stated]:
    """Options by name, without dashes at the front and with _ for those within; the last counts.

    A switch is true, and several values are one text.
    """
    found: dict[str, Stated] = {}
    for option in options:
        name = option.name.lstrip("-").replace("-", "_")
        texts = [each.text for each in option.values]
        unknown = next(
            (each.why or "its value is not known" for each in option.values if each.text is None),
            "",
        )
        words = (option.word, *option.values)
        if not unknown and not all(each.is_certain for each in words):
            unknown = "whether it is given depends on a condition that is not known"
        value: Any = True
        if texts:
            text = " ".join(each or "" for each in texts)
            value = plain_value(text) if len(texts) == 1 else text
        found[name] = Stated(
            value=None if unknown else value,
            said=option.said,
            place=option.values[0].place if len(texts) == 1 else None,
            line=option.word.line,
            unknown=unknown,
        )
    return found


def file_named(file: JobFile, stated: Stated) -> JobFile | None:
    """The file that a statement names; None: it does not lie beside the job's file.

    Of a path that leads elsewhere, or begins with a variable that is not known, the end counts:
    `$HERE/ds_config.json`, or `configs/ds.json` where both lie in that folder.
    """
    path = stated.value if isinstance(stated.value, str) else stated.said.split()[-1]
    parts = path.strip("\"'").split("/")
    for first in range(len(parts)):
        end = "/".join(parts[first:])
        if "$" not in end and (found := file.beside(end)) is not None:
            return found
    return None


def configuration_named(file: JobFile, stated: Stated) -> tuple[str, Positioned] | None:
    """Name and content of the YAML or JSON file that a statement names; None: it is not there."""
    found = file_named(file, stated)
    if found is None or not (
        found.name.lower().endswith(_CONFIGURATIONS) or found.text.lstrip().startswith("{")
    ):
        return None
    root = positioned(found)
    return (found.name, root) if root.is_mapping else None


def stated_beside(file: JobFile, path: Stated) -> dict[str, Stated] | None:
    """The values of a configuration that a script names; None: it does not lie beside the script.

    Their places are not in the text of the script, and are left out.
    """
    found = file_named(file, path)
    return None if found is None else statements_of(positioned(found), named=found.name)


def default_of(value: Any) -> Stated:
    """A value that nothing states."""
    return Stated(value=value, said="")


class StatedValues(Statements):
    """Values of a configuration, of which each notes what a field follows from."""

    def __init__(
        self,
        file: JobFile,
        stated: Mapping[str, Stated],
        *,
        trainer: str,
        unread: Stated | None = None,
    ) -> None:
        """Reads `stated`, of the configuration of a trainer.

        Args:
            file: where they stand.
            stated: values by dotted key.
            trainer: its name, for people.
            unread: what else sets values, and cannot be read: then nothing has its default.
        """
        super().__init__(stated)
        self.findings = Findings()
        self._file, self._unread = file, unread
        self._default = f"{trainer}'s default"

    def find(self, paths: Sequence[str], default: Any = None) -> Stated:
        """The value at the first of some keys; else the trainer's default."""
        found = [path for path in paths if path in self._stated]
        self._used.update(found)
        return self._stated[found[0]] if found else self._unread or default_of(default)

    def word(self, default: str, *paths: str) -> Stated:
        """A text; of a number or switch its text, as of an option."""
        found = self.find(paths, default)
        if found.unknown or isinstance(found.value, str):
            return found
        if not isinstance(found.value, (bool, int)):
            self.refuse(f"{found.said} is not a text")
        return replace(found, value=word_of(found.value))

    def names(self, default: Sequence[str], *paths: str) -> tuple[Stated, list[str]]:
        """A list of words, also one that a command line writes with commas."""
        found = self.find(paths, default)
        if found.unknown:
            return found, []
        if not isinstance(found.value, (str, list, tuple)):
            self.refuse(f"{found.said} is not a list")
        value = found.value.split(",") if isinstance(found.value, str) else found.value
        return found, [str(each) for each in value if each]

    def switch(self, *paths: str, default: bool = False) -> Stated:
        found = self.find(paths, default)
        if not found.unknown and not isinstance(found.value, bool):
            self.refuse(f"{found.said} is not true or false")
        return found

    def whole(self, default: int | None, *paths: str, least: int = 1) -> Stated:
        """A whole number; JobFileInvalidError for anything else."""
        found = self.find(paths, default)
        if found.said and not found.unknown:
            value = found.value
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                self.refuse(f"{found.said} is not a whole number of at least {least}")
        return found

    def choice(
        self, name: str, found: Stated, choices: Mapping[str, Any], *, why: str = "", **about: Any
    ) -> None:
        """Notes what a word stands for; or that it is none of the known ones, or `why`."""
        if found.unknown or found.value in choices:
            self.put(name, lambda word, *_: choices[word], found, *about.pop("beside", ()), **about)
        else:
            self.miss(found, why or f"it is none of {listed([*choices], 4)}", name)

    def refuse(self, problem: str) -> NoReturn:
        raise JobFileInvalidError(f"{self._file.name}: {problem}")

    def put(
        self,
        name: str,
        compute: Callable[..., Any],
        *of: Stated,
        shown: Sequence[Stated] | None = None,
        why: str = "",
    ) -> Any:
        """Notes a field that is computed of some values.

        Args:
            name: the field.
            compute: takes the values of `of`.
            of: where one of them is not known, the field is open.
            shown: those that decide it by themselves; None: all. The others matter by default.
            why: why it has its value where none of `shown` is stated; empty: it is the trainer's
                default.

        Returns:
            The field's value; None: it is open.
        """
        if unknown := next((each for each in of if each.unknown), None):
            self.miss(unknown, unknown.unknown, name)
            return None
        value = compute(*(each.value for each in of))
        stated = [each for each in (of if shown is None else shown) if each.said]
        if stated:
            said = ", ".join(each.said for each in stated)
            self.findings.note(name, value, said, stated[0].place if len(stated) == 1 else None)
        else:
            self.findings.assume(name, value, why or self._default)
        return value

    def miss(self, found: Stated | Sequence[Stated], why: str, *names: str) -> None:
        """Notes that values are not understood, and the fields that are open by them."""
        several = [found] if isinstance(found, Stated) else [each for each in found if each.said]
        said = ", ".join(each.said for each in several) or " of ".join(
            (self._default, *([", ".join(names)] if names else []))
        )
        line = next((each.line for each in several), None)
        for name in names or ("",):
            self.findings.miss(said, why, name=name, line=line)

    def check_optimizer(self, path: str) -> None:
        """Names an optimizer with other states than those of Adam."""
        found = self.find((path,), "adam")
        if found is not self._unread and not ADAM.fullmatch(str(found.value)):
            self.miss(found, found.unknown or NOT_ADAM)

    def keys_below(self, path: str) -> Iterator[str]:
        """The keys that begin with a path, without it."""
        return (key.removeprefix(path) for key in self._stated if key.startswith(path))
