"""The storage part of `db check`: whether every table and every index can be read.

SQLite checks itself. PostgreSQL does with its extension amcheck. Where that is not installed or not
permitted, every table and every index is read in full, which finds pages that cannot be read and
misses an index that contradicts its table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

MOST_LINES: Final = 20
"""Most lines about damage that belongs to no table of a SQLite file."""

RESTORE: Final = "stop the service and restore the last good backup with `layout-tuner db restore`"

_DAMAGE_STATES: Final = ("XX001", "XX002", "58030", "58P01")
"""PostgreSQL: damaged data, a damaged index, an unreadable file, a missing file."""

_TREE: Final = re.compile(r"\b[Tt]ree (?:page )?(\d+)")
"""SQLite identifies a table or an index by the number of its first page."""

_NAMED_INDEX: Final = re.compile(r"\bindex (\w+)")


def check_storage(session: Session) -> tuple[str, list[str]]:
    """Checks every table and every index; returns the method, and what is damaged."""
    if session.connection().dialect.name == "sqlite":
        return "integrity_check", list(_sqlite_damages(session))
    schema = _amcheck_schema(session)
    if schema is not None:
        return "amcheck", list(_damages(session, *_amcheck_queries(session, schema)))
    method = "a full read, as amcheck is not installed or not permitted"
    return method, list(_damages(session, _table_reads(session), _index_reads(session)))


def _message(what: str, places: Sequence[str], advice: str) -> str:
    """A line about a table or an index, with the first messages of the database about it."""
    shown = "; ".join(places[:3])
    more = f"; and {len(places) - 3} more" if len(places) > 3 else ""
    return f"the {what} is damaged ({shown}{more}): {advice}"


def _sqlite_damages(session: Session) -> Iterator[str]:
    connection = session.connection()
    schema = connection.exec_driver_sql(
        "SELECT rootpage, type, name, tbl_name FROM sqlite_master WHERE rootpage > 0 ORDER BY name"
    ).all()
    objects = {page: f"{kind} {name}" for page, kind, name, _ in schema}
    found: dict[str, list[str]] = {}
    for table in [name for _, kind, name, _ in schema if kind == "table"]:
        try:
            lines = _integrity_lines(connection, f'integrity_check("{table}")')
            for _ in connection.exec_driver_sql(f'SELECT * FROM "{table}"'):  # noqa: S608
                pass
        except DBAPIError:
            # The first page of the table or of an index is damaged, or a text is not UTF-8.
            indexes = [name for _, kind, name, of in schema if kind == "index" and of == table]
            found |= _unreadable(connection, table, indexes)
            continue
        for line in lines:
            found.setdefault(_sqlite_object(line, objects), []).append(line)
    if not found:
        # Damage that belongs to no table: pages that are used twice or never.
        found = {"file": _integrity_lines(connection, f"integrity_check({MOST_LINES})")}
    tables_are_whole = all(what.startswith("index") for what in found)
    for what, places in found.items():
        advice = RESTORE
        if tables_are_whole:
            advice = (
                "its table is whole: stop the service and rebuild it in `sqlite3 results.sqlite3` "
                f'with REINDEX "{what.removeprefix("index ")}"; where that fails, restore a backup'
            )
        if places:
            yield _message(what, places, advice)


def _integrity_lines(connection: Connection, pragma: str) -> list[str]:
    rows = connection.exec_driver_sql(f"PRAGMA {pragma}").scalars()
    lines = [line for row in rows for line in str(row).splitlines()]
    # Without the heading "*** in database main ***".
    return [line for line in lines if line != "ok" and not line.startswith("***")]


def _unreadable(connection: Connection, table: str, indexes: Sequence[str]) -> dict[str, list[str]]:
    """Reads a table without its indexes, and then by each index."""
    queries = {f"table {table}": f'SELECT * FROM "{table}" NOT INDEXED'}  # noqa: S608
    for index in indexes:
        columns = connection.exec_driver_sql(f'PRAGMA index_info("{index}")').all()
        keys = ", ".join(f'"{name}"' for _, _, name in columns)
        query = f'SELECT {keys} FROM "{table}" INDEXED BY "{index}" ORDER BY {keys}'  # noqa: S608
        queries[f"index {index}"] = query
    found: dict[str, list[str]] = {}
    for what, query in queries.items():
        try:
            for _ in connection.exec_driver_sql(query):
                pass
        except DBAPIError as error:
            if "no query solution" not in str(error.orig):  # a partial index
                found[what] = [str(error.orig)[:200]]
    return found or {f"table {table}": ["it, or one of its indexes, cannot be read"]}


def _sqlite_object(line: str, objects: dict[int, str]) -> str:
    tree = _TREE.search(line)
    if tree is not None:
        return objects.get(int(tree[1]), "table sqlite_schema" if tree[1] == "1" else "file")
    index = _NAMED_INDEX.search(line)
    return "file" if index is None else f"index {index[1]}"


@dataclass(frozen=True, slots=True)
class _Query:
    """A query that fails, or returns a text, if a table or an index is damaged."""

    name: str
    table: str
    sql: str


def _damages(
    session: Session, tables: Iterable[_Query], indexes: Iterable[_Query]
) -> Iterator[str]:
    """Runs the queries. An index of a damaged table is left out: its query reads the table too."""
    damaged = set()
    for table in tables:
        problem = _problem(session, table.sql)
        if problem is not None:
            damaged.add(table.name)
            yield _message(f"table {table.name}", [problem], RESTORE)
    for index in indexes:
        problem = None if index.table in damaged else _problem(session, index.sql)
        if problem is not None:
            advice = f'its table is whole: rebuild it with REINDEX INDEX "{index.name}"'
            yield _message(f"index {index.name}", [problem], advice)


def _problem(session: Session, query: str) -> str | None:
    """The damage that a query reports or meets; None: it meets none."""
    try:
        with session.begin_nested():
            problem: str | None = session.scalar(text(query.replace(":", r"\:")))
            return problem
    except DBAPIError as error:
        if getattr(error.orig, "sqlstate", None) not in _DAMAGE_STATES:
            raise
        return " ".join(str(error.orig).split("\n")[0].split())


def _amcheck_schema(session: Session) -> str | None:
    """The schema of amcheck's functions; None: it is not installed, or this role may not call them.

    PostgreSQL 13 and older have no `verify_heapam`.
    """
    query = text(
        "SELECT quote_ident(nspname) FROM pg_extension JOIN pg_namespace AS n ON n.oid = extnamespace "
        "WHERE extname = 'amcheck' AND has_schema_privilege(n.oid, 'USAGE') AND 2 <= ("
        "  SELECT count(DISTINCT proname) FROM pg_proc WHERE pronamespace = n.oid "
        "  AND proname IN ('verify_heapam', 'bt_index_check') "
        "  AND has_function_privilege(pg_proc.oid, 'EXECUTE'))"
    )
    schema: str | None = session.scalar(query)
    return schema


def _amcheck_queries(session: Session, schema: str) -> tuple[list[_Query], list[_Query]]:
    """A query of amcheck for each table and each index.

    `verify_heapam` returns a row for each damaged place. `bt_index_check` fails at the first; it
    also looks whether each row of the table is in the index.
    """
    place = "SELECT 'block ' || blkno || ': ' || msg"
    tables = [
        _Query(name, name, f"""{place} FROM {schema}.verify_heapam('"{name}"') LIMIT 1""")
        for name in _tables(session)
    ]
    indexes = [
        _Query(name, table, f"""SELECT NULL FROM {schema}.bt_index_check('"{name}"', true)""")  # noqa: S608
        for name, table, _, _ in _indexes(session)
    ]
    return tables, indexes


def _table_reads(session: Session) -> Iterator[_Query]:
    """For each table, a query that reads all of it, with long values, which are in another file."""
    for name in _tables(session):
        number = "count(whole.*)"
        yield _Query(name, name, f'SELECT nullif({number}, {number}) FROM "{name}" AS whole')  # noqa: S608


def _index_reads(session: Session) -> Iterator[_Query]:
    """For each index, a query for its order, which PostgreSQL can then only get from the index."""
    for scan in ("enable_seqscan", "enable_sort", "enable_bitmapscan", "enable_incremental_sort"):
        session.execute(text(f"SET LOCAL {scan} = off"))
    for name, table, predicate, keys in _indexes(session):
        where = f"WHERE {predicate} " if predicate else ""
        rows = f'SELECT 1 FROM "{table}" {where}ORDER BY {", ".join(keys)}'  # noqa: S608
        sql = f"SELECT nullif(count(*), count(*)) FROM ({rows}) AS whole"  # noqa: S608
        yield _Query(name, table, sql)


def _tables(session: Session) -> list[str]:
    query = text(
        "SELECT relname FROM pg_class WHERE relkind = 'r' "
        "AND relnamespace = current_schema()::regnamespace ORDER BY relname"
    )
    return list(session.scalars(query))


def _indexes(session: Session) -> Sequence[Any]:
    """Of each index its name, its table, its condition, and the expressions of its keys."""
    query = text(
        "SELECT index.relname, of.relname, pg_get_expr(indpred, indrelid), "
        "ARRAY(SELECT pg_get_indexdef(indexrelid, place, true) "
        "      FROM generate_series(1, indnkeyatts) AS place) "
        "FROM pg_index JOIN pg_class AS index ON index.oid = indexrelid "
        "JOIN pg_class AS of ON of.oid = indrelid "
        "WHERE index.relnamespace = current_schema()::regnamespace ORDER BY 1"
    )
    return session.execute(query).all()
