"""Conditions of a shell script: true, false, or not known (None) without running it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Final

from layout_tuner.trainers.found_jobs.scripts.shell_expansion import Expander
from layout_tuner.trainers.found_jobs.scripts.shell_scan import words_between
from layout_tuner.trainers.found_jobs.scripts.shell_values import (
    UNSET,
    Code,
    Pieces,
    is_filled,
    known_text,
)

MAX_WORDS: Final = 100
"""Most words of a condition that is evaluated."""

_UNARY: Final = re.compile(r"-[a-zA-Z]")
_NUMBERS: Final = {
    "-eq": int.__eq__,
    "-ne": int.__ne__,
    "-lt": int.__lt__,
    "-le": int.__le__,
    "-gt": int.__gt__,
    "-ge": int.__ge__,
}
_BINARY: Final = ("=", "==", "!=", "=~", "<", ">", "-nt", "-ot", "-ef", *_NUMBERS)
_QUOTED: Final = re.compile(r"\"[^\"]*\"|'[^']*'")


def both(left: bool | None, right: bool | None) -> bool | None:
    if left is False or right is False:
        return False
    return None if left is None or right is None else True


def either(left: bool | None, right: bool | None) -> bool | None:
    if left or right:
        return True
    return None if left is None or right is None else False


def opposite(holds: bool | None) -> bool | None:
    return None if holds is None else not holds


def matches(text: str, code: str, pattern: str | None) -> bool | None:
    """Whether a text matches a pattern, as `case` and `[[ == ]]` do; None: it is not known.

    Args:
        text: the text.
        code: the pattern as the script writes it: what it quotes is literal.
        pattern: the expanded pattern.
    """
    quoted = "".join(_QUOTED.findall(code))
    if pattern is None or re.search(r"[*?\[\\]", quoted) or "[" in pattern or "\\" in pattern:
        return text == pattern if pattern is not None and not re.search(r"[*?]", code) else None
    return fnmatchcase(text, pattern)


def test_holds(
    expander: Expander, code: Code, first: int, last: int, *, is_extended: bool
) -> bool | None:
    """Whether `[ ... ]` holds, given without its brackets; `is_extended`: it is `[[ ... ]]`."""
    places = list(words_between(code.text, first, last))
    if len(places) > MAX_WORDS:
        return None
    words = [code.text[start:end] for start, end in places]
    pieces = [expander.text(code, start, end) for start, end in places]
    test = _Test(expander, words, pieces, is_extended)
    holds = test.any_holds()
    return holds if test.at == len(words) else None


class _Test:
    """A test, read by its grammar (the manual of bash, Bash Conditional Expressions)."""

    def __init__(
        self, expander: Expander, words: Sequence[str], pieces: Sequence[Pieces], is_extended: bool
    ) -> None:
        self._expander = expander
        self._words = words
        self._texts = [known_text(each) for each in pieces]
        self._are_filled = [is_filled(each) for each in pieces]
        self._is_extended = is_extended
        self.at = 0

    def _word(self, ahead: int = 0) -> str:
        at = self.at + ahead
        return self._words[at] if at < len(self._words) else ""

    def any_holds(self) -> bool | None:
        holds = self._all_hold()
        while self._word() in ("-o", "||"):
            self.at += 1
            holds = either(holds, self._all_hold())
        return holds

    def _all_hold(self) -> bool | None:
        holds = self._one_holds()
        while self._word() in ("-a", "&&"):
            self.at += 1
            holds = both(holds, self._one_holds())
        return holds

    def _one_holds(self) -> bool | None:
        if self._word() == "!":
            self.at += 1
            return opposite(self._one_holds())
        if self._word() in ("(", "\\("):
            self.at += 1
            holds = self.any_holds()
            self.at += 1
            return holds
        if self._word(1) in _BINARY:
            self.at += 3
            return self._binary(self.at - 3) if self.at <= len(self._words) else None
        if _UNARY.fullmatch(self._word()) and self._word(1) and self._word(1) not in ("]", ")"):
            self.at += 2
            return self._unary(self._words[self.at - 2], self.at - 1)
        self.at += 1
        return self._unary("-n", self.at - 1) if self.at <= len(self._texts) else None

    def _unary(self, operator: str, at: int) -> bool | None:
        text = self._texts[at]
        if operator in ("-z", "-n") and self._are_filled[at]:
            return operator == "-n"
        if text is None or operator not in ("-z", "-n", "-v"):
            return None
        if operator == "-v":
            value = self._expander.variables.get(text)
            return None if value is None else value is not UNSET
        return (operator == "-n") == bool(text)

    def _binary(self, at: int) -> bool | None:
        left, operator, right = self._texts[at], self._words[at + 1], self._texts[at + 2]
        if left is None:
            return None
        if operator in _NUMBERS:
            if not all(re.fullmatch(r"\s*-?\d{1,18}\s*", each or "") for each in (left, right)):
                return None
            return bool(_NUMBERS[operator](int(left), int(right or "")))
        if operator not in ("=", "==", "!="):
            return None
        same = None if right is None else left == right
        if self._is_extended:
            same = matches(left, self._words[at + 2], right)
        return opposite(same) if operator == "!=" else same
