"""Limits of every document from outside: its depth, its numbers and its text.

Requests, stored documents and the documents of probes use the same rules, so that no part fails on
what another part accepted.
"""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Callable, Iterator
from typing import Any, Final

from layout_tuner.documents.reading import MAX_NAME_LENGTH, shown

MAX_DEPTH: Final = 100
"""Deepest nesting; a campaign needs five levels. Serialisers fail at about 250."""

MAX_FIELDS: Final = 1000
"""Most fields of a mapping in a request, so that it has few unknown fields to report."""

MAX_ID: Final = 2**31 - 1
"""Largest id that a database can hold."""

MAX_INTEGER_BITS: Final = 1024
"""Larger whole numbers exceed the range of floats, and Python refuses to print very large ones."""

TextRule = Callable[[str], str | None]
"""Returns what is wrong with a text, or None."""


def text_problem(text: str) -> str | None:
    """Why a text cannot be stored; None: it can.

    A lone surrogate, which JSON can spell, has no encoding in UTF-8, and PostgreSQL refuses NUL.
    """
    if "\0" in text:
        return f"{shown(text)} holds a NUL character"
    if text.isascii():
        return None
    try:
        text.encode()
    except UnicodeEncodeError:
        return f"{shown(text)} holds a lone surrogate (half of a character)"
    return None


def name_problem(name: object, most: int = MAX_NAME_LENGTH) -> str | None:
    """Why this cannot name a model, cluster, worker, host or node; None: it can.

    Names are written to tables: spreadsheets evaluate a text that begins like a formula, and
    readers of tables strip spaces.
    """
    if not (isinstance(name, str) and 1 <= len(name) <= most):
        return f"{shown(name)} is not a string of 1 to {most} characters"
    if not name.isprintable():
        return f"{shown(name)} has characters that cannot be shown"
    if name != name.strip():
        return f"{shown(name)} begins or ends with a space"
    if begins_like_formula(name):
        return f"{shown(name)} begins with {name[0]!r}, as formulas of spreadsheets do"
    return None


def begins_like_formula(text: str) -> bool:
    """Whether a text begins with a sign of formulas, or a wide or small form of one.

    Spreadsheets with East Asian input take U+FF1D for "=", and so on.
    """
    return unicodedata.normalize("NFKC", text[:1]) in tuple("=+-@")


def acceptable_log(text: str, most: int) -> str:
    """The end of a program's output, as text that can be stored: other characters are replaced."""
    return text[-most:].replace("\0", "\ufffd").encode("utf-8", "replace").decode()


def visible_line(text: str, most: int) -> str:
    """A text as `visible_text_problem` accepts it: on one line, and cut.

    Each end of a line becomes a space, as other white space does, and each other character that
    cannot be shown becomes U+FFFD.
    """
    if not text.isprintable():
        joined = " ".join(text.split())
        text = "".join(each if each.isprintable() else "\ufffd" for each in joined)
    return text[:most]


def visible_text_problem(text: str) -> str | None:
    """Why a text is not one printable line; None: it is.

    Line ends of every kind, control characters and those that change the direction of text are not
    printable. A reported text with them would leave the comment of an exported file, or show as
    another text than it is.
    """
    if text.isprintable():
        return None
    return f"the text {shown(text)} has characters that cannot be shown"


def document_problem(document: Any, text_rule: TextRule = text_problem) -> tuple[str, str] | None:
    """Where and why parsed JSON or YAML cannot be accepted; None: it can.

    It does not recurse, so it works for documents of any depth.

    Returns:
        The path of the field, empty for the document itself, and what is wrong there.
    """
    problem = _value_problem(document, text_rule)
    if problem:
        return "", problem
    waiting: list[tuple[tuple[str, ...], Any]] = [((), document)]
    while waiting:
        path, holder = waiting.pop()
        for key, value in _items(holder):
            if isinstance(value, (dict, list, tuple)):
                waiting.append(((*path, str(key)), value))
            problem = _key_problem(key, text_rule)
            if problem:
                return _joined(path), problem
            if problem := _value_problem(value, text_rule):
                return _joined((*path, str(key))), problem
        if len(path) >= MAX_DEPTH:
            return _joined(path[:5]), f"it is nested too deeply, more than {MAX_DEPTH} levels"
    return None


def _items(holder: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(holder, dict):
        return iter(holder.items())
    return enumerate(holder) if isinstance(holder, (list, tuple)) else iter(())


def _key_problem(key: object, text_rule: TextRule) -> str | None:
    if isinstance(key, str):
        problem = text_rule(key)
        return f"a key is not accepted: {problem}" if problem else None
    if type(key) is int:
        return None  # a place in a list
    return f"the key {str(key)[:80]} is not text; put it in quotes"


def _value_problem(value: object, text_rule: TextRule) -> str | None:
    if isinstance(value, str):
        return text_rule(value)
    if value is None or isinstance(value, (bool, dict, list, tuple)):
        return None
    if isinstance(value, float):
        return None if math.isfinite(value) else f"{json.dumps(value)} is not a JSON number"
    if isinstance(value, int):
        if value.bit_length() <= MAX_INTEGER_BITS:
            return None
        return f"a whole number of {value.bit_length()} bits is more than {MAX_INTEGER_BITS}"
    return f"{str(value)[:80]} is neither text, a number, true, false nor null; put it in quotes"


def _joined(path: tuple[str, ...]) -> str:
    return ".".join(part[:80] for part in path)[:400]
