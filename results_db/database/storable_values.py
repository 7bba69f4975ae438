"""Refuses values on every database that PostgreSQL could not store.

SQLite stores texts of any length, with NULs; PostgreSQL does not. The HTTP API refuses such values
earlier, with the name of their field.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from sqlalchemy import Dialect, Engine, event, types
from sqlalchemy.dialects import postgresql

from layout_tuner.documents.limits import document_problem, text_problem
from layout_tuner.results_db.errors import ValueUnstorableError

Check = Callable[[Any], None]
"""Raises `ValueUnstorableError` for a value that does not fit."""

_POSTGRESQL: Final[Dialect] = postgresql.dialect()  # type: ignore[no-untyped-call]
_CHECKED: Final = "layout_tuner_checked"
"""Execution option of a statement whose rows were checked."""

_BITS: Final[Mapping[type[types.TypeEngine[Any]], int]] = {
    types.SmallInteger: 16,
    types.Integer: 32,
    types.BigInteger: 64,
}


def refuse_unstorable(engine: Engine) -> None:
    """Makes an engine check every text and integer that is bound to a statement.

    A text that is only compared may be longer than the column: then it equals no stored value.
    """
    checks: dict[Any, Check] = {types.String: _refuse_what_is_no_text}
    for kind, bits in _BITS.items():
        checks[kind] = partial(_refuse_large_integer, 2 ** (bits - 1) - 1)
    known = dict(engine.dialect.colspecs)
    engine.dialect.colspecs = known | {
        kind: _checked(known.get(kind, kind), check) for kind, check in checks.items()
    }
    event.listen(engine, "before_cursor_execute", _refuse_long_texts)


def _checked(base: Any, check: Check) -> Any:
    """A column type of a dialect that refuses values that do not fit."""

    class Checked(base):  # type: ignore[misc]
        def bind_processor(self, dialect: Dialect) -> Callable[[Any], Any]:
            inherited = super().bind_processor(dialect)

            def process(value: Any) -> Any:
                if value is not None:
                    check(value)
                return value if inherited is None else inherited(value)

            return process

    return Checked


def _refuse_what_is_no_text(value: str) -> None:
    if problem := text_problem(value):
        raise ValueUnstorableError(f"a text cannot be kept: {problem}")


def _refuse_large_integer(largest: int, value: int) -> None:
    if not -largest <= value <= largest:
        raise ValueUnstorableError(f"{value} is beyond {largest}, the most that is kept")


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
    if context.execution_options.get(_CHECKED) is context:
        return  # a further batch of the same statement
    context.execution_options = context.execution_options.union({_CHECKED: context})
    texts = {
        name: bind.type.dialect_impl(_POSTGRESQL)
        for name, bind in context.compiled.binds.items()
        if isinstance(bind.type, types.String)
    }
    longest = {name: most for name, each in texts.items() if (most := _length(each)) is not None}
    for row in context.compiled_parameters:
        for name, most in longest.items():
            value = row.get(name)
            if isinstance(value, str) and len(value) > most:
                raise ValueUnstorableError(
                    f"a text has {len(value)} characters, and at most {most} are kept: "
                    f"{value[:40]!r}..."
                )


def _length(column: types.TypeEngine[Any]) -> int | None:
    return column.length if isinstance(column, types.String) else None


def write_document(document: Any) -> str:
    """A document as JSON columns store it; ValueUnstorableError if it is too deep, or no JSON."""
    if problem := document_problem(document):
        raise ValueUnstorableError(f"a document cannot be kept: {': '.join(filter(None, problem))}")
    return json.dumps(document)


def read_document(stored: str | bytes) -> Any:
    """Reads a JSON column; psycopg returns bytes. What is too deep to parse stays a text."""
    try:
        return json.loads(stored)
    except RecursionError:
        return stored if isinstance(stored, str) else stored.decode()
