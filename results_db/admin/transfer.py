"""Copies every row of a database into another, between SQLite and PostgreSQL.

Both have the same revision of the schema. Values are copied in the databases' own representation,
not through the classes of tables: those have this version's schema, and a backup may be older.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC
from typing import Any, Final

from sqlalchemy import (
    JSON,
    Boolean,
    Connection,
    CursorResult,
    DateTime,
    MetaData,
    Table,
    func,
    select,
    text,
)

from layout_tuner.results_db.errors import BackupInvalidError

ROWS_AT_ONCE: Final = 5000

Convert = Callable[[Any], Any]

_INTO_SQLITE: Final[Mapping[type, Convert]] = {
    DateTime: lambda time: (
        time.astimezone(UTC).replace(tzinfo=None).isoformat(sep=" ", timespec="microseconds")
    ),
    Boolean: int,
}
_INTO_POSTGRESQL: Final[Mapping[type, Convert]] = {DateTime: "{}+00".format, Boolean: bool}
"""What makes a value of one database one of the other, by the type of its column."""


def to_sqlite(source: Connection, target: Connection, *, say: Callable[[str], None]) -> None:
    """Copies rows from PostgreSQL into SQLite.

    Both connections are in a transaction: the source has a consistent view, and tables of the
    target contain only rows that migrations added. `say` is called with the name of each table
    before it is copied.
    """
    for table in _tables(target):
        say(table.name)
        _empty(target, table)
        with _read_postgresql(source, table) as rows:
            _insert(target, table, _converted(rows, table, _INTO_SQLITE))
        _continue_after(target, table, _last_id(source, table))
    _number_events(target)


def to_postgresql(source: Connection, target: Connection) -> None:
    """Copies rows from SQLite into PostgreSQL.

    The transactions are as those of `to_sqlite`.
    """
    for table in _tables(source):
        _empty(target, table)
        names = ", ".join(_quoted(column.name) for column in table.columns)
        rows = source.exec_driver_sql(f"SELECT {names} FROM {_quoted(table.name)}")  # noqa: S608
        _copy_in(target, table, names, _converted(rows, table, _INTO_POSTGRESQL))
        if (sequence := _sequence(target, table)) is not None:
            next_id = _last_assigned_id(source, table) + 1
            target.execute(select(func.setval(sequence, next_id, False)))


def _tables(sqlite: Connection) -> list[Table]:
    """The tables in the order of foreign keys.

    Reflected from SQLite, which returns the declared types of times, booleans and JSON.
    """
    metadata = MetaData()
    metadata.reflect(sqlite, only=lambda name, _: name != "alembic_version")
    return metadata.sorted_tables


def _empty(connection: Connection, table: Table) -> None:
    """Deletes rows that migrations added."""
    connection.exec_driver_sql(f"DELETE FROM {_quoted(table.name)}")  # noqa: S608


def _quoted(name: str) -> str:
    return f'"{name}"'


def _converted(
    rows: Iterable[Sequence[Any]], table: Table, converts: Mapping[type, Convert]
) -> Iterator[tuple[Any, ...]]:
    kinds = [type(column.type) for column in table.columns]
    needed = [
        next((converts[each] for each in kind.__mro__ if each in converts), None) for kind in kinds
    ]
    for row in rows:
        yield tuple(
            value if convert is None or value is None else convert(value)
            for value, convert in zip(row, needed, strict=True)
        )


def _read_postgresql(source: Connection, table: Table) -> CursorResult[Any]:
    # JSON as text, so that numbers are copied exactly.
    names = ", ".join(
        f"CAST({_quoted(column.name)} AS TEXT)"
        if isinstance(column.type, JSON)
        else _quoted(column.name)
        for column in table.columns
    )
    key = ", ".join(_quoted(column.name) for column in table.primary_key.columns)
    query = text(f"SELECT {names} FROM {_quoted(table.name)} ORDER BY {key}")  # noqa: S608
    return source.execute(query, execution_options={"yield_per": ROWS_AT_ONCE})


def _insert(target: Connection, table: Table, rows: Iterable[tuple[Any, ...]]) -> None:
    marks = ", ".join("?" for _ in table.columns)
    names = ", ".join(_quoted(column.name) for column in table.columns)
    statement = f"INSERT INTO {_quoted(table.name)} ({names}) VALUES ({marks})"  # noqa: S608
    driver = target.connection.driver_connection
    assert isinstance(driver, sqlite3.Connection)
    try:
        # Without SQLAlchemy, which would keep all rows in memory.
        driver.executemany(statement, rows)
    except sqlite3.IntegrityError as error:
        raise BackupInvalidError(
            f"rows of {table.name} break a rule of the schema ({error}): look at the database with "
            "`layout-tuner db check`"
        ) from error


def _copy_in(target: Connection, table: Table, names: str, rows: Iterable[tuple[Any, ...]]) -> None:
    driver: Any = target.connection.driver_connection
    try:
        with (
            driver.cursor() as cursor,
            cursor.copy(f"COPY {_quoted(table.name)} ({names}) FROM STDIN") as copy,
        ):
            for row in rows:
                copy.write_row(row)
    except target.dialect.loaded_dbapi.Error as error:
        said = " ".join(str(error).split())
        raise BackupInvalidError(
            f"PostgreSQL cannot keep the rows of {table.name}: {said}; nothing was restored"
        ) from error


def _counted_column(table: Table) -> str | None:
    """The column of a table whose values the database assigns in sequence."""
    keys = list(table.primary_key.columns)
    is_a_number = len(keys) == 1 and keys[0].type.python_type is int and not keys[0].foreign_keys
    return keys[0].name if is_a_number else None


def _last_id(postgresql: Connection, table: Table) -> int:
    """The last id that was assigned, even if its row was deleted."""
    if (sequence := _sequence(postgresql, table)) is None:
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


def _sequence(postgresql: Connection, table: Table) -> str | None:
    column = _counted_column(table)
    return column and postgresql.scalar(
        select(func.pg_get_serial_sequence(_quoted(table.name), column))
    )


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
