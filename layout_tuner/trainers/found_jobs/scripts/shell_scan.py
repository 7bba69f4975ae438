"""Where words, quotes and expansions of shell code end."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

_CLOSING: Final = {"{": "}", "(": ")"}
_BLANK: Final = frozenset(" \t\n\r")


def is_continuation(text: str, at: int) -> bool:
    """Whether a backslash at this place continues the line."""
    return text.startswith(("\\\n", "\\\r\n"), at)


def end_of_single_quotes(text: str, at: int, end: int) -> int:
    """Behind the quote that closes the one at `at`; `end` where none does."""
    found = text.find("'", at + 1, end)
    return end if found < 0 else found + 1


def end_of_backticks(text: str, at: int, end: int) -> int:
    found = re.compile(r"(?:[^`\\]|\\.)*`", re.DOTALL).match(text, at + 1, end)
    return end if found is None else found.end()


def end_of_ansi_quotes(text: str, at: int, end: int) -> int:
    """Behind `$'...'`, whose `$` is at `at`."""
    found = re.compile(r"(?:[^'\\]|\\.)*'", re.DOTALL).match(text, at + 2, end)
    return end if found is None else found.end()


def end_of_group(text: str, at: int, end: int) -> int:
    """Behind the bracket or double quote that closes the one at `at`; `end` where none does.

    It reads each character once: the groups within are on a stack.
    """
    stack = [_CLOSING.get(text[at], '"')]
    at += 1
    while at < end:
        character = text[at]
        in_quotes = stack[-1] == '"'
        if character == "\\":
            at += 2
            continue
        if character == stack[-1]:
            stack.pop()
            if not stack:
                return at + 1
        elif character == '"':
            stack.append('"')
        elif character == "$" and text[at + 1 : at + 2] in ("{", "("):
            at += 1
            stack.append(_CLOSING[text[at]])
        elif character == "(" and not in_quotes and stack[-1] == ")":
            stack.append(")")
        elif character == "'" and not in_quotes:
            at = end_of_single_quotes(text, at, end)
            continue
        elif character == "`":
            at = end_of_backticks(text, at, end)
            continue
        at += 1
    return end


def end_of_expansion(text: str, at: int, end: int) -> int:
    """Behind the expansion whose `$` is at `at`; `at` where it begins none."""
    if text[at + 1 : at + 2] in ("{", "(") and at + 1 < end:
        return end_of_group(text, at + 1, end)
    found = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9@*#?$!-]").match(text, at + 1, end)
    return at if found is None else found.end()


def end_of_word(text: str, at: int, end: int, stops: str = "") -> int:
    """Behind the word that begins at `at`; `stops` are characters before which it ends, too."""
    while at < end:
        character = text[at]
        if character in _BLANK or character in stops:
            return at
        if character == "\\":
            if is_continuation(text, at):
                at = text.index("\n", at) + 1
                continue
            at += 2
        elif character == "'":
            at = end_of_single_quotes(text, at, end)
        elif character == '"':
            at = end_of_group(text, at, end)
        elif character == "`":
            at = end_of_backticks(text, at, end)
        elif text.startswith("$'", at):
            at = end_of_ansi_quotes(text, at, end)
        elif character == "$":
            at = max(end_of_expansion(text, at, end), at + 1)
        else:
            at += 1
    return min(at, end)


def words_between(text: str, at: int, end: int) -> Iterator[tuple[int, int]]:
    """The places of the words between two positions; comments are left out."""
    while at < end:
        if is_continuation(text, at):
            at = text.index("\n", at) + 1
        elif text[at] in _BLANK:
            at += 1
        elif text[at] == "#":
            line = text.find("\n", at, end)
            at = end if line < 0 else line
        else:
            behind = end_of_word(text, at, end)
            yield at, behind
            at = behind
