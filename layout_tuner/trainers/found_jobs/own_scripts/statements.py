"""What a configuration or a command line states, by name: each statement is read once.

What no reader takes is listed as not understood, unless it is known to leave layout, model and
batch as they are.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Final

from layout_tuner.documents.reading import word_of
from layout_tuner.terminal.plurals import listed
from layout_tuner.trainers.found_jobs.found_job import Findings
from layout_tuner.trainers.found_jobs.job_file import JobFile
from layout_tuner.trainers.found_jobs.knob_settings import Stated
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
        self._left = dict(stated)

    def take(self, *among: str) -> Stated | None:
        """The first of some names that is stated, other than as null; all of them are taken."""
        taken = [self._left.pop(name) for name in among if name in self._left]
        return next((each for each in taken if each.value is not None or each.unknown), None)

    def take_all(self, prefix: str) -> Iterator[tuple[str, Stated]]:
        """All whose names begin so, without those that are null."""
        for name in [each for each in self._left if each.startswith(prefix)]:
            if (found := self.take(name)) is not None:
                yield name, found

    def rest(self) -> list[tuple[str, Stated]]:
        """What was not taken, by name."""
        return [*self._left.items()]

    def list_rest(
        self, findings: Findings, irrelevant: Collection[str], prefixes: tuple[str, ...] = ()
    ) -> None:
        """Lists what was not taken, apart from names that change nothing here."""
        for name, each in self._left.items():
            if name in irrelevant or name.startswith(prefixes):
                continue
            if each.value in (None, {}) and not each.unknown:
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


def note_count(findings: Findings, name: str, stated: Stated | None, *, least: int = 1) -> None:
    """Notes a whole number, or that it is none; nothing where nothing is stated."""
    if stated is None:
        return
    number = whole_number(stated)
    if number is None or number < least:
        miss(findings, stated, f"it is not a whole number of at least {least}", name=name)
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


def statements_of(node: Positioned, *, named: str = "", sections: bool = True) -> dict[str, Stated]:
    """The values of a configuration by their paths.

    Args:
        node: its top.
        named: the file's name, where the job is another file's: then values have no place.
        sections: whether the values of sections are by themselves, as `section.key`.
    """
    leaves = node.leaves() if sections else (node.entries or {}).values()
    return {
        each.path: Stated(
            value=each.value,
            said=f"{named}: {each.said}" if named else each.said,
            place=None if named else each.place,
            line=None if named else each.line,
            unknown=each.why,
        )
        for each in leaves
    }


def statements_within(stated: Stated) -> dict[str, Stated]:
    """The values of a section that one statement has, by their paths below it."""
    found: dict[str, Stated] = {}
    waiting = [("", stated.value)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, dict) and value:
            waiting += [(f"{path}.{name}".lstrip("."), each) for name, each in value.items()]
        else:
            said = f"{stated.said.partition(':')[0]}.{path}: {word_of(value)}"
            found[path] = Stated(value=value, said=said, line=stated.line)
    return found


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
