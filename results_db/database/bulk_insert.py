"""Inserts many rows into one table at once.

On PostgreSQL by COPY, which plans no statement and returns no answer for each row. SQLite runs in
this process, where single inserts cost the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from sqlalchemy import Connection, String, Table, insert
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session
from sqlalchemy.sql.schema import ScalarElementColumnDefault

from results_db.database.storable_values import refuse_long_text
from results_db.models.base import Base

_FEW: Final = 2
"""Up to this number of rows, plain INSERT is as fast as COPY."""


def insert_many(session: Session, kind: type[Base], rows: Sequence[Mapping[str, Any]]) -> None:
    """Inserts rows in their order; pending changes of the session are not flushed first.

    All rows have the same columns, and defaults of others must be plain values.
    """
    if not rows:
        return
    table = kind.__table__
    assert isinstance(table, Table)
    connection = session.connection()
    if len(rows) <= _FEW or connection.dialect.name == "sqlite":
        connection.execute(insert(table), [dict(row) for row in rows])
    else:
        _copy(connection, table, rows)


def _copy(connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
    defaults = {
        column.name: column.default.arg
        for column in table.c
        if column.name not in rows[0] and isinstance(column.default, ScalarElementColumnDefault)
    }
    names = [*rows[0], *defaults]
    quote = connection.dialect.identifier_preparer.quote
    statement = f"COPY {quote(table.name)} ({', '.join(map(quote, names))}) FROM STDIN"
    columns = [_written(connection, table, rows, name) for name in rows[0]]
    columns += [[value] * len(rows) for value in defaults.values()]
    cursor = connection.connection.cursor()
    driver = connection.dialect.loaded_dbapi
    try:
        with cursor.copy(statement) as copy:
            for row in zip(*columns, strict=True):
                copy.write_row(row)
    except driver.Error as error:
        # Raised as by `Connection.execute`, so that `Database` translates it.
        raise DBAPIError.instance(
            statement, None, error, driver.Error, hide_parameters=True, dialect=connection.dialect
        ) from error
    finally:
        cursor.close()


def _written(
    connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]], name: str
) -> list[Any]:
    """The values of a column, converted for the driver."""
    kind = table.c[name].type
    values = [row[name] for row in rows]
    if isinstance(kind, String) and kind.length is not None:
        for value in values:
            refuse_long_text(value, kind.length)
    process = kind.dialect_impl(connection.dialect).bind_processor(connection.dialect)
    return values if process is None else [process(value) for value in values]
