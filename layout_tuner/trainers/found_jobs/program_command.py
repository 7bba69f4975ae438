"""The command that a launch script starts on every rank, as its words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Final

from layout_tuner.trainers.found_jobs.found_job import (
    LaunchCommand,
    NotUnderstood,
    ProgramStart,
    ReadValue,
    TextPlace,
)

CONDITIONAL: Final = "it depends on a condition that is not known"
"""Why it is not known whether a command has a word."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Word:
    """A word of a command, expanded."""

    text: str | None
    """None: it is not known without running the script."""
    said: str
    """The text; of what is not known, as the script says it: `--nnodes=$WORLD_SIZE`."""
    line: int
    """Where it stands, from 1."""
    place: TextPlace | None = None
    """The one literal that decides the text: the word's own, or that which its variable is
    assigned; None: several do, or none. Of `--name=$VALUE`, the literal of the value."""
    why: str = ""
    """Why the text is not known, or whether it is there."""
    prefix: str = ""
    """Of a text that is not known, the beginning that is: `--nnodes=`."""
    is_certain: bool = True
    """Whether the command has it; False: it depends on a condition that is not known."""
    default_of: str = ""
    """The variable whose default it is, as in `ReadValue`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """An option of a command, with the words up to the next; `--name=value` is one such word."""

    name: str
    """With its dashes."""
    word: Word
    values: tuple[Word, ...] = ()

    @property
    def said(self) -> str:
        """As the script says it."""
        if "=" in self.word.said:
            return " ".join((self.word.said, *(each.said for each in self.values[1:])))
        return " ".join(filter(None, (self.word.said, *(each.said for each in self.values))))


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramCommand(ProgramStart):
    """What a script starts on every rank, without its launcher (torchrun, srun, ...)."""

    words: tuple[Word, ...]
    """Program and arguments: the program, also behind `python -m`, is the first."""
    launcher: str = ""
    """`torchrun`, `srun`, `deepspeed`, `accelerate` or empty."""
    launcher_options: tuple[Option, ...] = ()
    """Those that the launcher takes, as of `accelerate launch --config_file`."""
    ranks: tuple[ReadValue, ...] = ()
    """What launcher and head of the script say of `num_nodes`, `devices_per_node` and
    `num_devices`."""
    not_understood: tuple[NotUnderstood, ...] = ()
    """What of the script may concern the command, and is not understood."""
    line: int = 1
    """Where the command begins."""

    @property
    def program(self) -> str:
        """The first word; of a path that is not known, as the script says it: `$DIR/train.py`."""
        return self.words[0].said if self.words else ""

    @property
    def launch(self) -> LaunchCommand:
        """The same as plain texts."""
        return LaunchCommand(
            words=tuple(each.said if each.text is None else each.text for each in self.words),
            unknown=tuple(each.said for each in self.words if each.text is None),
            **{each.name: getattr(self, each.name) for each in fields(ProgramStart)},
        )


def options_of(words: Sequence[Word], marks: str = r"--.") -> Iterator[Option]:
    """The options among words, each with the values behind it; other words are left out.

    `marks` is a regular expression of their beginnings.
    """
    current: Option | None = None
    for word in words:
        text = word.prefix if word.text is None else word.text
        if re.match(marks, text):
            if current is not None:
                yield current
            name, equals, value = text.partition("=")
            values = (value_of(word, value),) if equals else ()
            current = Option(name=name, word=word, values=values)
        elif current is not None:
            current = Option(name=current.name, word=current.word, values=(*current.values, word))
    if current is not None:
        yield current


def value_of(word: Word, value: str) -> Word:
    """The value of a word `--name=value`, with the place of the value alone."""
    place = word.place
    if place is not None:
        place = TextPlace(line=place.line, start=place.end - len(value), end=place.end)
    said = word.said.partition("=")[2]
    text = None if word.text is None else value
    return replace(word, text=text, said=said, place=place, prefix=value if text is None else "")


def options_of_words(words: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Options of a command and overrides `key=value` by name, with their values."""
    found: dict[str, tuple[str, ...]] = {}
    name = ""
    for word in words:
        key, equals, value = word.lstrip("+").partition("=")
        if word.startswith("--") or equals:
            name = key
            found[name] = (value,) if equals else ()
        else:
            found[name] = (*found.get(name, ()), word)
    return found
