"""Long work on a whole database: limits of ordinary statements do not hold for it."""

from __future__ import annotations

from typing import Final

from sqlalchemy import Connection, text

MIGRATION_LOCK: Final = 0x6C74_6D69
"""PostgreSQL's advisory lock of whoever changes the schema."""

MIGRATION_PATIENCE_S: Final = 60
"""Seconds that a process waits for another that changes the schema, or that uses a table of it."""


def lift_limits(connection: Connection) -> None:
    """Lets the statements of this transaction take as long as they take, on PostgreSQL."""
    if connection.dialect.name == "sqlite":
        return
    connection.execute(text("SET LOCAL statement_timeout = 0"))
    connection.execute(text("SET LOCAL idle_in_transaction_session_timeout = 0"))
    connection.execute(text(f"SET LOCAL lock_timeout = '{MIGRATION_PATIENCE_S}s'"))


def take_migration_lock(connection: Connection) -> None:
    """Waits until no other process changes the schema; the lock goes with the transaction.

    On SQLite the transaction itself is the lock.
    """
    lift_limits(connection)
    if connection.dialect.name != "sqlite":
        connection.execute(text(f"SELECT pg_advisory_xact_lock({MIGRATION_LOCK})"))
