"""Values that PostgreSQL would refuse are refused on every database, before it is asked.

SQLite keeps a text of any length, with NULs in it; PostgreSQL does not. What passes here is kept by
both. It is the last line: the HTTP interface refuses such values with the name of their field.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from sqlalchemy import Dialect, Engine, event, types

from results_db.errors import ValueUnstorableError

Check = Callable[[Any], None]
"""Raises `ValueUnstorableError` for a value that does not fit."""

_LOOKED_AT: Final = "layout_tuner_looked_at"

_BITS: Final[Mapping[type[types.TypeEngine[Any]], int]] = {
    types.SmallInteger: 16,
    types.Integer: 32,
    types.BigInteger: 64,
}


def refuse_unstorable(engine: Engine) -> None:
    """Has every text and whole number looked at that is bound to a statement.

    A text may be longer than what it is compared with: then it is none of those that are kept.
    """
    known = dict(engine.dialect.colspecs)
    checked: dict[Any, Any] = {
        types.String: _checked(known.get(types.String, types.String), _text_check),
    }
    for kind, bits in _BITS.items():
        checked[kind] = _checked(known.get(kind, kind), partial(_integer_check, bits))
    engine.dialect.colspecs = {**known, **checked}
    event.listen(engine, "before_cursor_execute", _refuse_long_texts)


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


def _text_check(_column: types.String) -> Check:
    return _refuse_what_is_no_text


def _refuse_what_is_no_text(value: str) -> None:
    if "\0" in value:
        raise ValueUnstorableError(f"a text has a NUL in it: {value[:40]!r}")
    if value.isascii():
        return
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueUnstorableError(
            f"a text has half of a surrogate pair in it: {value[:40]!r}"
        ) from error


def _refuse_long_texts(
    _connection: Any,
    _cursor: Any,
    _statement: str,
    _parameters: Any,
    context: Any,
    _executemany: bool,
) -> None:
    if context is None or context.compiled is None or not (context.isinsert or context.isupdate):
        return
    if context.execution_options.get(_LOOKED_AT) is context:
        return  # a further part of many rows
    context.execution_options = context.execution_options.union({_LOOKED_AT: context})
    longest = {
        name: bind.type.length
        for name, bind in context.compiled.binds.items()
        if isinstance(bind.type, types.String) and bind.type.length is not None
    }
    for row in context.compiled_parameters:
        for name, most in longest.items():
            refuse_long_text(row.get(name), most)


def refuse_long_text(value: Any, most: int) -> None:
    """Refuses a text of more than so many characters.

    Raises:
        ValueUnstorableError: it is one.
    """
    if isinstance(value, str) and len(value) > most:
        raise ValueUnstorableError(
            f"a text has {len(value)} characters, and at most {most} are kept: {value[:40]!r}..."
        )


def _integer_check(bits: int, _column: types.Integer) -> Check:
    largest = 2 ** (bits - 1) - 1

    def check(value: int) -> None:
        if not -largest <= value <= largest:
            raise ValueUnstorableError(f"{value} is beyond {largest}, the most that is kept")

    return check
