"""Compares the schema of a database with the one that the migrations of its revision create.

No list of tables is kept for this. The migrations run in an empty SQLite database in memory, or in
a schema of the same PostgreSQL that is rolled back, and both schemas are described alike.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Final

from sqlalchemy import Connection, NullPool, create_engine, text

from layout_tuner.results_db.database.postgresql import take_migration_lock
from layout_tuner.results_db.migrations import migrate

_Objects = dict[str, tuple[str, str]]
"""By kind and name, such as "index ix_trials_state": its table, and its definition."""

_ON_SQLITE: Final = (
    "SELECT type || ' ' || name, tbl_name, sql FROM sqlite_master "
    "WHERE name NOT GLOB 'sqlite_stat*' ORDER BY type DESC, name"
)

_ON_POSTGRESQL: Final = """
WITH relation AS (SELECT * FROM pg_class WHERE relnamespace = current_schema()::regnamespace)
SELECT CASE relkind WHEN 'r' THEN 'table ' ELSE 'view ' END || relname AS what, relname, concat_ws(
  '; ', relpersistence, relrowsecurity, (SELECT count(*) FROM pg_rewrite WHERE ev_class = r.oid), (
    SELECT string_agg(concat_ws(' ', attname, format_type(atttypid, atttypmod), attnotnull,
                      attidentity, attgenerated, pg_get_expr(adbin, adrelid)), ', ' ORDER BY attname)
    FROM pg_attribute LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum
    WHERE attrelid = r.oid AND attnum > 0 AND NOT attisdropped
  ), (
    SELECT string_agg(concat_ws(' ', conname, pg_get_constraintdef(c.oid), (
      SELECT bool_and(tgenabled = 'O') FROM pg_trigger WHERE tgconstraint = c.oid
    )), ', ' ORDER BY conname)
    FROM pg_constraint c WHERE conrelid = r.oid AND contype NOT IN ('n', 't')
  )) FROM relation r WHERE relkind IN ('r', 'p', 'v', 'm', 'f')
UNION ALL
SELECT 'index ' || indexrelid::regclass, relname, pg_get_indexdef(indexrelid, 0, true) || indisvalid
FROM pg_index JOIN relation r ON r.oid = indrelid
UNION ALL
SELECT 'trigger ' || tgname || ' of ' || relname, relname, concat_ws(
  '; ', pg_get_triggerdef(t.oid, true), tgenabled, (SELECT prosrc FROM pg_proc WHERE oid = tgfoid))
FROM pg_trigger t JOIN relation r ON r.oid = tgrelid WHERE NOT tgisinternal
ORDER BY what
"""


def schema_differences(connection: Connection, revision: str | None) -> list[str]:
    """Names tables, indexes, triggers and views that are not as a revision has them.

    Tables of other programs, which may be in the same PostgreSQL, are left out. A transaction on
    PostgreSQL must be one that writes: the expected schema is created in it and rolled back.
    """
    if revision is None:
        return ["it states no revision"]
    found = _objects(connection)
    if is_sqlite := connection.dialect.name == "sqlite":
        expected = _expected_on_sqlite(migrate.VERSIONS, revision)
    elif connection.scalar(text("SELECT has_database_privilege(current_database(), 'CREATE')")):
        expected = _expected_on_postgresql(connection, revision)
    else:
        return [
            "the schema was not compared with that of its revision, since this user may not create "
            "one for comparison: GRANT CREATE ON DATABASE ... TO ..."
        ]
    ours = {table for table, _ in expected.values()}
    wrong = {what: "is missing: restore a backup" for what in expected if what not in found}
    for what, (table, definition) in found.items():
        if what not in expected and (is_sqlite or table in ours):
            wrong[what] = f"is not part of revision {revision}: drop it"
        elif (table, definition) != expected.get(what, (table, definition)):
            wrong[what] = f"is not as revision {revision} has it: restore a backup"
    return [f"the {what} {problem}" for what, problem in wrong.items()]


def _objects(connection: Connection) -> _Objects:
    is_sqlite = connection.dialect.name == "sqlite"
    rows = connection.exec_driver_sql(_ON_SQLITE if is_sqlite else _ON_POSTGRESQL)
    return {
        what: (table, _normalized(str(definition)) if is_sqlite else definition)
        for what, table, definition in rows
    }


def _normalized(sql: str) -> str:
    """A definition without what depends on the way to a revision.

    That is spaces, quotes, the order, and whether a check is a part of its column.
    """
    head, _, rest = re.sub(r'[\s"]', "", sql).partition("(")
    body, _, tail = rest.replace("CONSTRAINT", ",CONSTRAINT").rpartition(")")
    parts = sorted(filter(None, body.split(","))) if head.startswith("CREATETABLE") else [body]
    return ",".join([head, *parts, tail])


@functools.cache
def _expected_on_sqlite(_versions: tuple[Path, ...], revision: str) -> _Objects:
    with create_engine("sqlite://", poolclass=NullPool).begin() as connection:
        migrate.upgrade_within(connection, revision)
        return _objects(connection)


def _expected_on_postgresql(connection: Connection, revision: str) -> _Objects:
    take_migration_lock(connection)
    with connection.begin_nested() as savepoint:
        connection.execute(text("CREATE SCHEMA layout_tuner_expected"))
        connection.execute(text("SET LOCAL search_path TO layout_tuner_expected"))
        migrate.upgrade_within(connection, revision)
        expected = _objects(connection)
        savepoint.rollback()
    return expected
