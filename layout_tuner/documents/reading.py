"""Checks that the readers of all documents share, with errors that show the value."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TypeGuard, TypeVar

from layout_tuner.documents.not_covered import known_word
from layout_tuner.errors import SearchSpaceError, joined

T = TypeVar("T")

MAX_COUNT: Final = 1 << 20
"""Largest count a knob may have (ranks, micro-batches, sequences): products of three fit 64
bits."""

MAX_WIDTH: Final = 1 << 31
"""Largest size of a model's dimension."""

MAX_NAME_LENGTH: Final = 64

MAX_TEXT_LENGTH: Final = 1000
"""Longest line of free text: what a device is, where numbers come from, a warning."""


_URL_NAME: Final = re.compile(r"(?!\d+$)[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Problems:
    """Collects the errors of a document, which are raised together; those it makes are `error`s."""

    def __init__(self, error: type[SearchSpaceError] = SearchSpaceError) -> None:
        self._error = error
        self._found: list[SearchSpaceError] = []

    @contextmanager
    def collecting(self, field: str = "") -> Iterator[None]:
        """Keeps an error of the block, as an error of this field."""
        try:
            yield
        except SearchSpaceError as error:
            self._found.append(error.within(field) if field else error)

    def add(self, *errors: SearchSpaceError) -> None:
        self._found += errors

    def note(self, problem: str | None, *, field: str) -> None:
        if problem:
            self.add(self._error(problem, field=field))

    def refuse(self) -> None:
        """Raises the collected errors as one, if there are any."""
        if self._found:
            raise joined(self._found)


def refuse_all(errors: Iterable[SearchSpaceError]) -> None:
    problems = Problems()
    problems.add(*errors)
    problems.refuse()


def read_mapping(value: object, error: type[SearchSpaceError], what: str) -> dict[str, Any]:
    """A copy of `value`, which must be a mapping with strings as keys."""
    if not isinstance(value, Mapping):
        raise error(f"{what} is {shown(value)}, not a mapping of fields to values")
    for key in value:
        if not isinstance(key, str):
            raise error(f"{what} has the key {shown(key)}, which is not a string")
    return dict(value)


def read_named(
    value: object,
    read: Callable[[str, Any], T],
    error: type[SearchSpaceError],
    what: str,
    *,
    most: int | None = None,
) -> dict[str, T]:
    """The entries of a mapping by name, each as `read(name, entry)` makes it.

    Raises:
        SearchSpaceError: there are more than `most`, or entries are wrong: all of them are named.
    """
    given = read_mapping(value, error, what)
    if most is not None and len(given) > most:
        raise error(f"{len(given)} are more than {most}")
    problems, found = Problems(error), {}
    for name, each in given.items():
        with problems.collecting(name if name.isidentifier() else shown(name)):
            found[name] = read(name, each)
    problems.refuse()
    return found


def refuse_unknown(
    given: Collection[str], known: Collection[str], error: type[SearchSpaceError], what: str
) -> None:
    """Refuses names outside `known`; the message suggests the nearest and lists all known names."""
    refuse_all(unknown_names(given, known, error, what))


def unknown_names(
    given: Collection[str],
    known: Collection[str],
    error: type[SearchSpaceError],
    what: str,
    *,
    known_as: Callable[[str], str] = known_word,
) -> Iterator[SearchSpaceError]:
    """An error for each name outside `known`: what it is known as, or the nearest known name.

    All known names follow once, in the first error about a name that is not known as anything.
    """
    listing = _all_of(known)
    for name in given:
        if name not in known:
            field = name if is_name(name) else shown(name)
            hint = known_as(name) if known else ""
            if not hint:
                hint, listing = f"{_guess(name, known)}{listing}", ""
            yield error.of_field(field, f"unknown {what} {shown(name)}{hint}")


def read_fields_of(
    cls: Callable[..., T],
    values: Mapping[str, Any],
    known: Collection[str],
    error: type[SearchSpaceError],
    what: str,
) -> T:
    """Builds a value object; unknown names and wrong values are raised together.

    `what` is what messages call a field, such as "knob".
    """
    problems = Problems()
    problems.add(*unknown_names(values, known, error, what))
    with problems.collecting():
        built = cls(**{name: value for name, value in values.items() if name in known})
    problems.refuse()
    return built


def nearest(name: object, known: Collection[str]) -> str:
    """The end of a message about an unknown name: the nearest known name, and all known names."""
    return f"{known_word(name) or _guess(name, known)}{_all_of(known)}"


def _all_of(known: Collection[str]) -> str:
    return f"; choose from {', '.join(known)}" if known else "; there are none to choose from"


def _guess(name: object, known: Collection[str]) -> str:
    """The nearest name whose words are all like those of the name that was given."""
    if not isinstance(name, str):
        return ""
    for match in difflib.get_close_matches(name[:80], known, n=3):
        words = re.split("[_-]", match)
        if all(_is_like_one_of(word, words) for word in re.split("[_-]", name[:80])):
            return f" (did you mean {match!r}?)"
    return ""


def _is_like_one_of(word: str, words: Collection[str]) -> bool:
    """Also a word of a letter or two, which has too few to be judged by."""
    begins = any(each and (each.startswith(word) or word.startswith(each)) for each in words)
    return len(word) < 3 or begins or bool(difflib.get_close_matches(word, words, n=1))


def read_choice(
    value: object, choices: Collection[str], error: type[SearchSpaceError], *, field: str
) -> str:
    if not isinstance(value, str):
        raise error(f"{shown(value)} is not one of {', '.join(choices)}", field=field)
    if value not in choices:
        raise error(f"{shown(value)} is unknown{nearest(value, choices)}", field=field)
    return value


def whole_number_problem(value: object, low: int = 1, high: int = MAX_COUNT) -> str | None:
    """Why `value` is not a whole number from `low` to `high`, or None. A bool is not a number."""
    if isinstance(value, bool) or not isinstance(value, int):
        return f"{shown(value)} is not a whole number of at least {low}"
    if value < low:
        return f"{shown(value)} is not a whole number of at least {low}"
    if value > high:
        return f"{shown(value)} is more than {high}, the largest that is accepted"
    return None


def word_of(value: object) -> str:
    """A plain value as documents, options and URLs write it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def switch_problem(value: object) -> str | None:
    """Why `value` is neither true nor false, or None."""
    return None if isinstance(value, bool) else f"{shown(value)} is not true or false"


def is_positive_number(value: object) -> TypeGuard[int | float]:
    """Whether `value` is a finite number over 0 (and not a bool)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value) and value > 0
    except OverflowError:  # an int beyond the range of floats
        return False


def is_name(value: object) -> bool:
    """Whether `value` is a short printable string."""
    return isinstance(value, str) and 1 <= len(value) <= MAX_NAME_LENGTH and value.isprintable()


def url_name_problem(value: object) -> str | None:
    """Why `value` cannot name a campaign, or a user's own model or cluster; None: it can.

    Such names are used in URLs in place of ids, so they are neither numbers nor "..".
    """
    if isinstance(value, str) and _URL_NAME.fullmatch(value):
        return None
    return (
        f"{shown(value)} is not 1 to 64 characters of A-Z a-z 0-9 . _ - that begin with a letter or "
        "digit and are not digits alone"
    )


def is_line(value: object) -> bool:
    """Whether `value` is one line of printable text, possibly empty, without lone surrogates."""
    return isinstance(value, str) and len(value) <= MAX_TEXT_LENGTH and value.isprintable()


def why_unreadable(error: Exception) -> str:
    """Why a file cannot be read or parsed, in a few words without its name."""
    if isinstance(error, UnicodeDecodeError):
        return f"it is no text (byte {error.start} is not {error.encoding})"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, json.JSONDecodeError):
        if not error.doc.strip():
            return "it is empty"
        return f"line {error.lineno}, column {error.colno}: {error.msg}"
    return " ".join(str(error).split())


def shown(value: object) -> str:
    """The repr of `value` for a message, at most 80 characters."""
    try:
        text = repr(value)
    except ValueError:  # an int of more digits than Python prints
        return "a number of thousands of digits"
    return text if len(text) <= 80 else f"{text[:77]}..."
