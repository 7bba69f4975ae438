"""Values that PostgreSQL would refuse are refused on every database, before it is asked.

SQLite keeps a text of any length, with NULs in it; PostgreSQL does not. What passes here is kept by
both. It is the last line: the HTTP interface refuses such values with the name of their field.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from sqlalchemy import Dialect, Engine, types

from results_db.errors import ValueUnstorableError

Check = Callable[[Any], None]
"""Raises `ValueUnstorableError` for a value that does not fit."""

_BITS: Final[Mapping[type[types.TypeEngine[Any]], int]] = {
    types.SmallInteger: 16,
    types.Integer: 32,
    types.BigInteger: 64,
}


def refuse_unstorable(engine: Engine) -> None:
    """Has every text and whole number looked at that is bound to a statement."""
    known = dict(engine.dialect.colspecs)
    checked: dict[Any, Any] = {
        types.String: _checked(known.get(types.String, types.String), _text_check),
    }
    for kind, bits in _BITS.items():
        checked[kind] = _checked(known.get(kind, kind), partial(_integer_check, bits))
    engine.dialect.colspecs = {**known, **checked}


def _checked(base: Any, make_check: Callable[[Any], Check]) -> Any:
    """A dialect's type of column, which refuses what does not fit it."""

    class Checked(base):  # type: ignore[misc]
        def bind_processor(self, dialect: Dialect) -> Callable[[Any], Any]:
            check, inherited = make_check(self), super().bind_processor(dialect)

            def process(value: Any) -> Any:
                if value is not None:
                    check(value)
                return value if inherited is None else inherited(value)

            return process

    return Checked


def _text_check(column: types.String) -> Check:
    longest = column.length

    def check(value: str) -> None:
        if longest is not None and len(value) > longest:
            raise ValueUnstorableError(
                f"a text has {len(value)} characters, and at most {longest} are kept: "
                f"{value[:40]!r}..."
            )
        if "\0" in value:
            raise ValueUnstorableError(f"a text has a NUL in it: {value[:40]!r}")
        if not value.isascii():
            _refuse_half_pairs(value)

    return check


def _refuse_half_pairs(value: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueUnstorableError(
            f"a text has half of a surrogate pair in it: {value[:40]!r}"
        ) from error


def _integer_check(bits: int, _column: types.Integer) -> Check:
    largest = 2 ** (bits - 1) - 1

    def check(value: int) -> None:
        if not -largest <= value <= largest:
            raise ValueUnstorableError(f"{value} is beyond {largest}, the most that is kept")

    return check
