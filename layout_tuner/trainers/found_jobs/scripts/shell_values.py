"""Texts of a shell script in pieces that remember where in the file they come from."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Final

from layout_tuner.trainers.found_jobs.found_job import TextPlace
from layout_tuner.trainers.found_jobs.job_file import JobFile
from layout_tuner.trainers.found_jobs.program_command import Word


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A part of a text."""

    text: str | None
    """None: it is not known without running the script."""
    start: int | None = None
    """Position in the file of its first character; the others follow there. None: it was
    computed."""
    said: str = ""
    """Of an unknown text: what the script says."""
    why: str = ""
    """Why it is not known, or not certain."""
    is_certain: bool = True
    """Whether it is there at all, or depends on a condition that is not known."""
    is_filled: bool = False
    """Of an unknown text: whether it is not empty."""
    default_of: str = ""
    """The variable whose default it is in `${X:-default}`, where the script does not set it."""

    def part(self, first: int, last: int) -> TextPiece:
        """The characters from `first` to before `last`."""
        if self.text is None:
            return self
        start = None if self.start is None else self.start + first
        return replace(self, text=self.text[first:last], start=start)


Pieces = tuple[TextPiece, ...]

_PLACEHOLDER: Final = re.compile(r"(?<![^=\s])<[A-Za-z](?:[^<>\n|&;]{0,100}[\w)])?>")


@dataclass(frozen=True, slots=True)
class Value:
    """What a variable holds; a plain one has one element."""

    elements: tuple[Pieces, ...]
    is_array: bool = False


UNSET: Final = Value(elements=())
"""Of a variable that the script unsets; one that it never assigns has no value in the tables."""


def unknown(said: str, why: str) -> Pieces:
    """A text that is not known."""
    return (TextPiece(None, said=shortened(said), why=why),)


def uncertain(pieces: Pieces, why: str) -> Pieces:
    """A text of which it is not known whether it is there, with the first reason for that."""
    return tuple(replace(each, is_certain=False, why=each.why or why) for each in pieces)


def shortened(said: str) -> str:
    """A line of at most 60 characters, for people."""
    short = " ".join(said[:200].split())
    return short if len(short) <= 60 else f"{short[:57]}..."


def known_text(pieces: Sequence[TextPiece]) -> str | None:
    """The text of pieces; None: one is not known, or may not be there."""
    texts = [each.text for each in pieces if each.is_certain and each.text is not None]
    return "".join(texts) if len(texts) == len(pieces) else None


def is_filled(pieces: Iterable[TextPiece]) -> bool:
    """Whether a text is not empty, whatever it is."""
    return any(each.is_certain and (each.text or each.is_filled) for each in pieces)


def said_text(pieces: Iterable[TextPiece]) -> str:
    """The text of pieces, with what the script says for what is not known."""
    return "".join(each.said if each.text is None else each.text for each in pieces)


def without_placeholders(pieces: Iterable[TextPiece]) -> Iterator[TextPiece]:
    """The pieces, with `<path to data>`, which people write for a value, as unknown ones."""
    for each in pieces:
        behind = 0
        for match in _PLACEHOLDER.finditer(each.text or ""):
            yield each.part(behind, match.start())
            yield from unknown(match[0], "it stands for a value that the file does not state")
            behind = match.end()
        yield each.part(behind, len(each.text or ""))


def file_text(pieces: Pieces) -> str:
    """A text for a reader of JSON or YAML: what is not known is a string, as the script says it.

    Empty where nothing of it is known.
    """
    if not any((each.text or "").strip() for each in pieces):
        return ""
    found: list[str] = []
    quotes = 0
    for each in pieces:
        said = each.said if each.text is None else each.text
        found.append(said if each.text is not None or quotes % 2 else f'"{said}"')
        quotes += 0 if each.text is None else each.text.count('"')
    return "".join(found)


def why_unknown(pieces: Iterable[TextPiece]) -> str:
    """Why the text of pieces is not known or not certain; empty: it is both."""
    doubtful = (each for each in pieces if each.text is None or not each.is_certain)
    return next((each.why for each in doubtful), "")


def merged(pieces: Iterable[TextPiece]) -> Pieces:
    """The same text, with neighbours in the file as one piece and without empty ones."""
    found: list[TextPiece] = []
    for each in pieces:
        if each.text == "":
            continue
        last = found[-1] if found else None
        if (
            last is not None
            and last.text is not None
            and last.start is not None
            and each.text is not None
            and each.start == last.start + len(last.text)
            and each.is_certain == last.is_certain
            and each.default_of == last.default_of
        ):
            found[-1] = replace(last, text=last.text + each.text)
        else:
            found.append(each)
    return tuple(found)


def word_from(pieces: Pieces, file: JobFile, line: int) -> Word:
    """A word of a command; `line` is that of the command, for a text that was computed."""
    whole = merged(pieces)
    is_known = all(each.text is not None for each in whole)
    text = said_text(whole)
    decisive = whole
    if is_known and text.startswith("-") and "=" in text and len(whole) > 1:
        decisive = _after_equals(whole)
    place = None
    if is_known and len(decisive) == 1 and decisive[0].start is not None:
        start = decisive[0].start
        end = start + len(decisive[0].text or "")
        place = TextPlace(line=file.line_of(start), start=start, end=end)
    first = next((each.start for each in whole if each.start is not None), None)
    known = []
    for each in whole:
        if each.text is None:
            break
        known.append(each.text)
    return Word(
        text=text if is_known else None,
        said=text,
        line=line if first is None else file.line_of(first),
        place=place,
        why=why_unknown(whole),
        prefix="" if is_known else "".join(known),
        is_certain=all(each.is_certain for each in whole),
        default_of=next((each.default_of for each in decisive if each.default_of), ""),
    )


def _after_equals(pieces: Pieces) -> Pieces:
    """The pieces of the value of `--name=value`."""
    for number, each in enumerate(pieces):
        text = each.text or ""
        if "=" in text:
            rest = each.part(text.index("=") + 1, len(text))
            return merged((rest, *pieces[number + 1 :]))
    return ()


def appended(before: Value, value: Value) -> Value:
    """What `X+=...` gives."""
    if value.is_array:
        return Value((*before.elements, *value.elements), is_array=True)
    if not before.elements:
        return value
    first = merged((*before.elements[0], *(value.elements[0] if value.elements else ())))
    return Value((first, *before.elements[1:]), is_array=before.is_array)


def spaced(words: Sequence[Pieces]) -> Pieces:
    """Words with blanks between them."""
    return tuple(
        piece
        for number, each in enumerate(words)
        for piece in ((TextPiece(" "), *each) if number else each)
    )


class FieldsBuilder:
    """Makes words of an expansion: what is quoted stays whole, the rest is split at blanks."""

    def __init__(self) -> None:
        self.words: list[Pieces] = []
        self._current: list[TextPiece] = []
        self._is_open = False
        self._was_open = False
        self._arrays: set[bool] = set()

    def add(self, pieces: Iterable[TextPiece]) -> None:
        """Literal or quoted text, also an empty one."""
        self._current += pieces
        self._is_open = True

    def add_split(self, pieces: Iterable[TextPiece]) -> None:
        """What an unquoted expansion gives."""
        for each in pieces:
            if each.text is None:
                self.add((each,))
                continue
            for match in re.finditer(r"[ \t\r\n]+|[^ \t\r\n]+", each.text):
                if match[0].isspace():
                    self.end()
                else:
                    self.add((each.part(*match.span()),))

    def note_array(self, *, is_empty: bool) -> None:
        """Notes that an array is expanded by `[@]`."""
        self._arrays.add(is_empty)

    def open_quotes(self) -> None:
        """Quotes make a word, also an empty one."""
        self._was_open, self._arrays = self._is_open, set()
        self._is_open = True

    def close_quotes(self) -> None:
        """Takes an empty word back where only empty arrays stand in the quotes, as bash does."""
        if self._arrays == {True} and not any(piece.text != "" for piece in self._current):
            self._is_open = self._was_open

    def end(self) -> None:
        """Ends the current word."""
        if self._is_open:
            self.words.append(merged(self._current))
        self._current, self._is_open = [], False


class Code:
    """Code of a script: the file's own text, or a text that one of its commands runs.

    A character of a private plane stands for each unknown piece of such a text.
    """

    def __init__(self, pieces: Sequence[TextPiece]) -> None:
        names = (chr(each) for each in range(0xF0000, 0xFFFFE))
        given = said_text(pieces)
        free = (each for each in names if each not in given)
        self._pieces = tuple(pieces)
        texts = [next(free) if each.text is None else each.text for each in pieces]
        self.text = "".join(texts)
        self._starts = [0, *accumulate(len(each) for each in texts)][:-1]
        self.is_certain = all(each.is_certain for each in pieces)
        self._positions: list[int] | None = None
        if not self.text.isascii():
            self._positions = []
            for number, character in enumerate(self.text):
                self._positions += [number] * len(character.encode())
            self._positions.append(len(self.text))

    @property
    def content(self) -> bytes:
        """The text for the parser, without what it does not take and bash does.

        That is a continued line at the end, and `[ $X = - ]`.
        """
        text = re.sub(rb"(?<== )[-+]+(?= \])", lambda m: b"x" * len(m[0]), self.text.encode())
        return re.sub(rb"\\(\r?\n\s*)$", rb" \1", text)

    def position(self, byte: int) -> int:
        """The position in the text of a byte of its UTF-8."""
        return byte if self._positions is None else self._positions[byte]

    def pieces(self, first: int, last: int) -> Iterator[TextPiece]:
        """The text from `first` to before `last`."""
        number = max(bisect_right(self._starts, first) - 1, 0)
        while number < len(self._pieces) and self._starts[number] < last:
            start, each = self._starts[number], self._pieces[number]
            length = 1 if each.text is None else len(each.text)
            if start + length > first:
                yield each.part(max(first - start, 0), min(last - start, length))
            number += 1

    def said(self, first: int, last: int) -> str:
        """The same as plain text, of what is not known as the script says it."""
        return said_text(self.pieces(first, last))

    def start(self, position: int) -> int | None:
        """Where in the file a position of the text lies; None: it was computed."""
        found = next(self.pieces(position, position + 1), None)
        return None if found is None else found.start
