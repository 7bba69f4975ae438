"""Statements that are compiled once and run by the driver: frequent ones, and those of many rows.

SQLAlchemy computes a cache key of a statement at each run, and an object for each row. For a
statement of 80 columns and 100 rows this takes as long as the database itself. Types are converted
as by SQLAlchemy, in the columns that need it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from sqlalchemy import Dialect, Float, Select
from sqlalchemy.orm import Session

_STATEMENTS_KEPT: Final = 1000

Convert = Callable[[Any], Any]
Place = tuple[Any, ...]


@dataclass(frozen=True, eq=False, slots=True)
class DriverStatement:
    """A statement without lists among its parameters; create it once, and run it often."""

    query: Select[*tuple[Any, ...]]
    """Its parameters are `bindparam`s."""

    def rows(self, session: Session, **values: Any) -> Iterable[Place]:
        """Runs it in a transaction; yields plain tuples, with values of the columns' types."""
        connection = session.connection()
        compiled = _compiled(self, connection.dialect)
        found = connection.exec_driver_sql(compiled.sql, compiled.parameters(values)).cursor
        assert found is not None  # it is a SELECT
        rows: Sequence[Place] = found.fetchall()
        return compiled.converted(rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Compiled:
    sql: str
    constants: Mapping[str, Any]
    order: Sequence[str] | None
    """Names of the parameters in order, for a driver with positional parameters; else None."""
    checks: Mapping[str, Convert]
    """Checks and conversions of parameters; they raise for values that do not fit."""
    converters: Sequence[tuple[int, Convert]]

    def parameters(self, values: Mapping[str, Any]) -> Any:
        given = {**self.constants, **values}
        for name, check in self.checks.items():
            given[name] = check(given[name])
        return given if self.order is None else tuple(given[name] for name in self.order)

    def converted(self, rows: Sequence[Place]) -> Iterable[Place]:
        if not (self.converters and rows):
            return rows
        # By columns, in a third of the time that it would take by rows.
        columns: list[Iterable[Any]] = list(zip(*rows, strict=True))
        for place, convert in self.converters:
            columns[place] = map(convert, columns[place])
        return zip(*columns, strict=True)


@lru_cache(maxsize=_STATEMENTS_KEPT)
def _compiled(statement: DriverStatement, dialect: Dialect) -> _Compiled:
    compiled = statement.query.compile(dialect=dialect)
    converters = []
    for place, column in enumerate(statement.query.selected_columns):
        if isinstance(column.type, Float):
            continue  # both drivers return floats
        convert = column.type.dialect_impl(dialect).result_processor(dialect, None)
        if convert is not None:
            converters.append((place, convert))
    checks = {
        name: check
        for bound, name in compiled.bind_names.items()
        if (check := bound.type.dialect_impl(dialect).bind_processor(dialect)) is not None
    }
    order = getattr(compiled, "positiontup", None) if dialect.positional else None
    return _Compiled(
        sql=str(compiled),
        constants=compiled.params,
        order=order,
        checks=checks,
        converters=converters,
    )
