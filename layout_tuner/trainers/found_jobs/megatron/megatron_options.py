"""The options of a command of Megatron's family, each read once and with its place."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from layout_tuner.documents.reading import word_of
from layout_tuner.trainers.found_jobs.found_job import Findings, Stated
from layout_tuner.trainers.found_jobs.positioned_node import Positioned
from layout_tuner.trainers.found_jobs.program_command import CONDITIONAL, Option, Word

_WHOLE: Final = re.compile(r"[0-9]+(_[0-9]+)*")


@dataclass(kw_only=True)
class Arguments:
    """Options by name; of an option that is there twice the last use counts, as in argparse."""

    trainer: str
    """For people: `Megatron-LM`."""
    findings: Findings
    """Where what is read is noted."""
    environment: Mapping[str, str] = field(default_factory=dict)
    program: str = ""
    """The file name of the program."""
    asked: set[str] = field(default_factory=set)
    """The names that the reader knows."""
    _given: dict[str, Option] = field(default_factory=dict)
    _doubtful: dict[str, Option] = field(default_factory=dict)

    def take(self, options: Iterable[Option]) -> None:
        """Takes options in the order in which the program reads them."""
        for option in options:
            name = named(option.name)
            self._given.pop(name, None)  # the last use is the last of the dictionary, too
            if option.word.is_certain:
                self._given[name] = option
                self._doubtful.pop(name, None)
            else:
                self._doubtful[name] = option

    @property
    def options(self) -> Mapping[str, Option]:
        """The last use of each option."""
        return {**self._given, **self._doubtful}

    def is_given(self, *names: str) -> bool:
        """Whether one of these options is there, or may be."""
        self.asked.update(names)
        return any(name in self._given or name in self._doubtful for name in names)

    def option(self, ours: str, *names: str) -> Option | None:
        """The last of some options of one meaning; None: none is there, or `ours` is open now."""
        self.asked.update(names)
        doubtful = [self._doubtful[name] for name in names if name in self._doubtful]
        if doubtful:
            self.miss(doubtful[-1], doubtful[-1].word.why or CONDITIONAL, ours)
            return None
        found = [name for name in self._given if name in names]
        return self._given[found[-1]] if found else None

    def switch(self, ours: str, *names: str) -> Option | None:
        """A switch that is given; one that is given certainly stays so."""
        self.asked.update(names)
        certain = [self._given[name] for name in names if name in self._given]
        return certain[-1] if certain else self.option(ours, *names)

    def word(self, ours: str, *names: str) -> tuple[Option, Word] | None:
        """The option and its value; None: it is not there, or `ours` is open now."""
        option = self.option(ours, *names)
        if option is None:
            return None
        if not option.values:
            self.miss(option, "it has no value", ours)
            return None
        value = option.values[0]
        if value.text is None or not value.is_certain:
            self.miss(option, value.why or CONDITIONAL, ours)
            return None
        return option, value

    def text(self, ours: str, *names: str) -> str | None:
        """The value as a text, which is not noted."""
        found = self.word(ours, *names)
        return None if found is None else found[1].text

    def texts(self, ours: str, *names: str) -> tuple[str, ...] | None:
        """All values of an option, which are not noted; None: not there, or `ours` is open now."""
        if self.word(ours, *names) is None:
            return None
        option = self.options[next(name for name in reversed(self._given) if name in names)]
        unknown = next((each for each in option.values if each.text is None), None)
        if unknown is not None:
            self.miss(option, unknown.why, ours)
            return None
        return tuple(each.text for each in option.values if each.text is not None)

    def whole(self, ours: str, *names: str, notes: bool = True) -> int | None:
        """The value as a whole number, noted as `ours`; None: not there, or `ours` is open now."""
        found = self.word(ours, *names)
        if found is None:
            return None
        option, word = found
        if not _WHOLE.fullmatch(word.text or "") or len(word.text or "") > 18:
            self.miss(option, "it is not a whole number", ours)
            return None
        value = int(word.text or "")
        if notes:
            self.note(ours, value, option, word)
        return value

    def number(self, ours: str, *names: str) -> float | None:
        """The value as a number, noted as `ours` unless it is 0; None as of `whole`."""
        found = self.word(ours, *names)
        if found is None:
            return None
        try:
            value = float(found[1].text or "")
        except ValueError:
            self.miss(found[0], "it is not a number", ours)
            return None
        if value:
            self.note(ours, value, *found)
        return value

    def note(self, ours: str, value: object, option: Option, word: Word | None = None) -> None:
        """Notes a value, unless an option that is not certain leaves the field open."""
        if not self.findings.is_open(ours):
            self.findings.note(ours, value, option.said, None if word is None else word.place)

    def miss(self, option: Option, why: str, ours: str = "") -> None:
        self.findings.miss(option.said, why, name=ours, line=option.word.line)

    def miss_all(self, option: Option, why: str, fields: Iterable[str]) -> None:
        for ours in fields:
            self.miss(option, why, ours)

    def assume(self, ours: str, value: object, without: str) -> None:
        """Assumes the trainer's default, unless something is read, open or assumed before."""
        if ours not in self.findings.assumed:
            self.findings.assume(ours, value, f"{self.trainer}'s default without {without}")

    def stated(self) -> dict[str, Stated]:
        """All options as `knob_settings` takes them."""
        found = {}
        for name, option in self.options.items():
            unsure = [each for each in (option.word, *option.values) if not each.is_certain]
            unknown = next((each.why for each in option.values if each.text is None), "")
            places = [each.place for each in option.values]
            found[name] = Stated(
                value=tuple(each.text or "" for each in option.values),
                said=option.said,
                place=places[0] if len(places) == 1 else None,
                line=option.word.line,
                unknown=unknown or (CONDITIONAL if unsure else ""),
            )
        return found


def named(name: str) -> str:
    """An option's name with hyphens, as most have it."""
    return "--" + name.removeprefix("--").replace("_", "-")


def stated_of(node: Positioned) -> Stated:
    """The value of a node of a file; one with a variable in it is not known."""
    if isinstance(node.value, str) and "$" in node.value:
        why = "its variable has a value only where the job runs"
        return replace(node.stated(), value=None, unknown=why)
    return node.stated()


def options_of_values(values: Mapping[str, Stated], off: tuple[str, ...] = ()) -> Iterator[Option]:
    """Arguments as options of the command line: true is a switch, false and null are absent.

    Args:
        values: by names, with underscores or as options. `[layernorm moe_act]` is a list in a text,
            which Megatron's tests hand on so.
        off: arguments of which 0 is false and 1 is true.
    """
    for key, each in values.items():
        value = bool(each.value) if key in off and each.value in (0, 1) else each.value
        if not each.unknown and (value is None or value is False or value == []):
            continue
        name, line = named(key), each.line or 1
        if value is True and not each.unknown:
            yield Option(name=name, word=Word(text=name, said=each.said, line=line))
            continue
        begin, colon, literal = each.said.partition(": ")
        if not colon and "=" not in each.said and " " in each.said:
            begin, _, literal = each.said.rpartition(" ")  # an option: `-tp 4`
        if isinstance(value, str) and re.fullmatch(r"\[[a-z_. ]+\]", value):
            value = value.strip("[]").split()
        words = value if isinstance(value, list) else [value]
        why = each.unknown or ("it is not a plain value" if isinstance(value, dict) else "")
        yield Option(
            name=name,
            word=Word(text=name, said=f"{begin}{colon.strip()}", line=line),
            values=tuple(
                Word(
                    text=None if why else word_of(word),
                    said=literal if index == 0 else "",
                    line=line,
                    place=each.place if len(words) == 1 else None,
                    why=why,
                )
                for index, word in enumerate(words)
            ),
        )
