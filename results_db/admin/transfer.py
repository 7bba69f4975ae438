"""Copies every row of a database into another, between SQLite and PostgreSQL.

Both have the same revision of the schema. Values are copied in the databases' own representation,
not through the classes of tables: those have this version's schema, and a backup may be older.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from sqlalchemy import (
    JSON,
    Boolean,
    Column,
    Connection,
    DateTime,
    MetaData,
    Table,
    func,
    select,
    text,
)

from results_db.errors import BackupInvalidError

ROWS_AT_ONCE: Final = 5000

Convert = Callable[[Any], Any]

_FILLED_BY_MIGRATIONS: Final = ("alembic_version",)
"""Tables that migrations fill."""


def to_sqlite(
    source: Connection, target: Connection, *, say: Callable[[str], None]
) -> dict[str, int]:
    """Copies rows from PostgreSQL into SQLite; returns the number of rows by table.

    Args:
        source: a transaction with a consistent view.
        target: a transaction; its tables contain only rows that migrations added.
        say: called with the name of each table before it is copied.
    """
    copied = {}
    for table in _tables(target):
        say(table.name)
        _empty(target, table)
        converts = [_into_sqlite(column) for column in table.columns]
        rows = (_converted(row, converts) for row in _read_postgresql(source, table))
        copied[table.name] = _insert(target, table, rows)
        _continue_after(target, table, _last_id(source, table))
    _number_events(target)
    return copied


def to_postgresql(source: Connection, target: Connection) -> dict[str, int]:
    """Copies rows from SQLite into PostgreSQL; returns the number of rows by table.

    Args:
        source: a transaction with a consistent view.
        target: a transaction; its tables contain only rows that migrations added.
    """
    copied = {}
    for table in _tables(source):
        _empty(target, table)
        converts = [_into_postgresql(column) for column in table.columns]
        names = ", ".join(_quoted(column.name) for column in table.columns)
        rows = source.exec_driver_sql(f"SELECT {names} FROM {_quoted(table.name)}")  # noqa: S608
        copied[table.name] = _copy_in(
            target, table, names, (_converted(row, converts) for row in rows)
        )
        _set_sequence(target, table, _last_assigned_id(source, table))
    return copied


def _tables(sqlite: Connection) -> list[Table]:
    """The tables in the order of foreign keys.

    Reflected from SQLite, which returns the declared types of times, booleans and JSON.
    """
    metadata = MetaData()
    metadata.reflect(sqlite, only=lambda name, _: name not in _FILLED_BY_MIGRATIONS)
    return metadata.sorted_tables


def _empty(connection: Connection, table: Table) -> None:
    """Deletes rows that migrations added."""
    connection.exec_driver_sql(f"DELETE FROM {_quoted(table.name)}")  # noqa: S608


def _quoted(name: str) -> str:
    return f'"{name}"'


def _converted(row: Sequence[Any], converts: Sequence[Convert]) -> tuple[Any, ...]:
    return tuple(
        None if value is None else convert(value)
        for value, convert in zip(row, converts, strict=True)
    )


def _as_it_is(value: Any) -> Any:
    return value


def _into_sqlite(column: Column[Any]) -> Convert:
    if isinstance(column.type, DateTime):
        return _time_into_sqlite
    if isinstance(column.type, Boolean):
        return int
    return _as_it_is


def _time_into_sqlite(value: datetime) -> str:
    return value.astimezone(UTC).replace(tzinfo=None).isoformat(sep=" ", timespec="microseconds")


def _into_postgresql(column: Column[Any]) -> Convert:
    if isinstance(column.type, DateTime):
        return _time_into_postgresql
    if isinstance(column.type, Boolean):
        return bool
    return _as_it_is


def _time_into_postgresql(value: str) -> str:
    return f"{value}+00"


def _read_postgresql(source: Connection, table: Table) -> Iterator[Sequence[Any]]:
    # JSON as text, so that numbers are copied exactly.
    names = ", ".join(
        f"CAST({_quoted(column.name)} AS TEXT)"
        if isinstance(column.type, JSON)
        else _quoted(column.name)
        for column in table.columns
    )
    key = ", ".join(_quoted(column.name) for column in table.primary_key.columns)
    query = text(f"SELECT {names} FROM {_quoted(table.name)} ORDER BY {key}")  # noqa: S608
    yield from source.execute(query, execution_options={"yield_per": ROWS_AT_ONCE})


def _insert(target: Connection, table: Table, rows: Iterable[tuple[Any, ...]]) -> int:
    marks = ", ".join("?" for _ in table.columns)
    names = ", ".join(_quoted(column.name) for column in table.columns)
    statement = f"INSERT INTO {_quoted(table.name)} ({names}) VALUES ({marks})"  # noqa: S608
    driver = target.connection.driver_connection
    assert isinstance(driver, sqlite3.Connection)
    counted = _Counted(rows)
    # Without SQLAlchemy, which would keep all rows in memory.
    driver.executemany(statement, counted)
    return counted.number


class _Counted:
    """Counts the rows that pass."""

    def __init__(self, rows: Iterable[tuple[Any, ...]]) -> None:
        self._rows = rows
        self.number = 0

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        for row in self._rows:
            self.number += 1
            yield row


def _copy_in(target: Connection, table: Table, names: str, rows: Iterable[tuple[Any, ...]]) -> int:
    number = 0
    driver: Any = target.connection.driver_connection
    try:
        with (
            driver.cursor() as cursor,
            cursor.copy(f"COPY {_quoted(table.name)} ({names}) FROM STDIN") as copy,
        ):
            for row in rows:
                copy.write_row(row)
                number += 1
    except target.dialect.loaded_dbapi.Error as error:
        said = " ".join(str(error).split())
        raise BackupInvalidError(
            f"PostgreSQL cannot keep the rows of {table.name}: {said}; nothing was restored"
        ) from error
    return number


def _counted_column(table: Table) -> str | None:
    """The column of a table whose values the database assigns in sequence."""
    keys = list(table.primary_key.columns)
    is_a_number = len(keys) == 1 and keys[0].type.python_type is int and not keys[0].foreign_keys
    return keys[0].name if is_a_number else None


def _last_id(postgresql: Connection, table: Table) -> int:
    """The last id that was assigned, even if its row was deleted."""
    column = _counted_column(table)
    if column is None or (sequence := _sequence(postgresql, table, column)) is None:
        return 0
    query = f"SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM {sequence}"  # noqa: S608
    return int(postgresql.exec_driver_sql(query).scalar_one())


def _continue_after(sqlite: Connection, table: Table, last_id: int) -> None:
    """Makes a table that never reuses ids continue after the last one."""
    if last_id and "autoincrement" in _definition(sqlite, table).lower():
        delete = "DELETE FROM sqlite_sequence WHERE name = ?"
        sqlite.exec_driver_sql(delete, (table.name,))
        sqlite.exec_driver_sql("INSERT INTO sqlite_sequence VALUES (?, ?)", (table.name, last_id))


def _definition(sqlite: Connection, table: Table) -> str:
    query = "SELECT sql FROM sqlite_master WHERE type = 'table' AND name = ?"
    return str(sqlite.exec_driver_sql(query, (table.name,)).scalar_one())


def _last_assigned_id(sqlite: Connection, table: Table) -> int:
    column = _counted_column(table)
    if column is None:
        return 0
    largest = sqlite.exec_driver_sql(f"SELECT max({_quoted(column)}) FROM {_quoted(table.name)}")  # noqa: S608
    last = largest.scalar() or 0
    if "autoincrement" in _definition(sqlite, table).lower():
        query = "SELECT seq FROM sqlite_sequence WHERE name = ?"
        last = max(last, sqlite.exec_driver_sql(query, (table.name,)).scalar() or 0)
    return int(last)


def _set_sequence(postgresql: Connection, table: Table, last_id: int) -> None:
    column = _counted_column(table)
    if column is None or (sequence := _sequence(postgresql, table, column)) is None:
        return
    postgresql.execute(select(func.setval(sequence, last_id + 1, False)))


def _sequence(postgresql: Connection, table: Table, column: str) -> str | None:
    query = select(func.pg_get_serial_sequence(_quoted(table.name), column))
    return postgresql.scalar(query)


def _number_events(sqlite: Connection) -> None:
    """Numbers the events that PostgreSQL had not numbered; SQLite numbers only new ones."""
    tables = "SELECT count(*) FROM sqlite_master WHERE name IN ('events', 'event_counter')"
    if sqlite.exec_driver_sql(tables).scalar() != 2:
        return
    waiting = "SELECT id FROM events WHERE seq IS NULL ORDER BY id"
    for (event_id,) in sqlite.exec_driver_sql(waiting).all():
        sqlite.execute(text("UPDATE event_counter SET last_seq = last_seq + 1"))
        sqlite.execute(
            text("UPDATE events SET seq = (SELECT last_seq FROM event_counter) WHERE id = :id"),
            {"id": event_id},
        )
