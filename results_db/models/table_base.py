"""The base of all tables: names of constraints, times in UTC, and SQL of checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from importlib import import_module
from typing import Any, Final, cast

from sqlalchemy import (
    JSON,
    CursorResult,
    DateTime,
    Dialect,
    ForeignKey,
    Index,
    MetaData,
    TypeDecorator,
    insert,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, MappedColumn, Session, mapped_column

from layout_tuner.search_spaces.layouts.job_settings import NO_SETTINGS, JobSettings

FINITE: Final = "1e300"
"""An upper bound of all figures; infinity exceeds it, and on PostgreSQL also NaN."""


class UtcDateTime(TypeDecorator[datetime]):
    """A time with a time zone, stored in UTC, also by databases without time zones."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"{value!r} has no time zone")
        value = value.astimezone(UTC)
        return value.replace(tzinfo=None) if dialect.name == "sqlite" else value

    def process_result_value(
        self,
        value: datetime | None,
        dialect: Dialect,  # noqa: ARG002 - the signature is SQLAlchemy's
    ) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class StoredDocument(TypeDecorator[Any]):
    """JSON that may be damaged: what cannot be parsed is read as the text that it is.

    So one damaged row does not keep a query from reading the others.
    """

    impl = JSON
    cache_ok = True

    def coerce_compared_value(self, op: Any, value: Any) -> Any:
        """As JSON does, so that queries may name fields."""
        return self.impl_instance.coerce_compared_value(op, value)

    def result_processor(self, dialect: Dialect, coltype: object) -> Any:
        read = super().result_processor(dialect, coltype)
        if read is None:  # the driver of PostgreSQL parses it
            return None

        def read_or_text(value: Any) -> Any:
            try:
                return read(value)
            except ValueError:
                return value if isinstance(value, str) else repr(value)

        return read_or_text


class StoredSettings(TypeDecorator[JobSettings]):
    """The settings of a job as JSON; NULL: none.

    Equal settings are equal values on both kinds of database, so that queries compare and index
    them. SQLite compares texts: shorter names come first, as PostgreSQL orders and prints them.
    """

    impl = JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")
    cache_ok = True

    def process_bind_param(
        self,
        value: JobSettings | None,
        dialect: Dialect,  # noqa: ARG002 - the signature is SQLAlchemy's
    ) -> dict[str, Any] | None:
        if not value:
            return None
        return dict(sorted(value.items(), key=lambda each: (len(each[0]), each[0])))

    def process_result_value(
        self,
        value: Mapping[str, Any] | None,
        dialect: Dialect,  # noqa: ARG002 - the signature is SQLAlchemy's
    ) -> JobSettings:
        if not value:
            return NO_SETTINGS
        return _settings_of(tuple((name, type(each), each) for name, each in value.items()))


@lru_cache(maxsize=4096)
def _settings_of(items: tuple[tuple[str, type, Any], ...]) -> JobSettings:
    """Thousands of trials have the same settings. The types are there because True equals 1."""
    return JobSettings({name: value for name, _, value in items})


def one_of(column: str, values: Sequence[object]) -> str:
    """SQL: the column has one of the values."""
    return f"{column} IN ({', '.join(repr(value) for value in values)})"


def is_at_least(bound: int, *columns: str) -> str:
    """SQL: the columns have at least this value, or are NULL."""
    return " AND ".join(f"{column} >= {bound}" for column in columns)


def is_over_zero(*columns: str) -> str:
    """SQL: the columns are above 0 and finite."""
    return " AND ".join(f"{column} > 0 AND {column} < {FINITE}" for column in columns)


def sum_column() -> MappedColumn[float]:
    """The column of a sum, which begins with 0."""
    return mapped_column(default=0.0, server_default="0")


def index_where(
    name: str, column: str | Sequence[str], condition: str, *, unique: bool = True
) -> Index:
    """An index of the rows that meet a condition, on both kinds of database."""
    where = text(condition)
    columns = (column,) if isinstance(column, str) else column
    return Index(name, *columns, unique=unique, sqlite_where=where, postgresql_where=where)


def part_of(key: str) -> MappedColumn[Any]:
    """The key of a row that belongs to another row, and is deleted with it."""
    return mapped_column(ForeignKey(key, ondelete="CASCADE"), primary_key=True)


class Base(DeclarativeBase):
    """The base class; it names every constraint, so that migrations can refer to it."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012 - SQLAlchemy's own declaration
        datetime: UtcDateTime,
        dict[str, Any]: JSON,
    }


def insert_many(session: Session, kind: type[Base], rows: Sequence[Mapping[str, Any]]) -> None:
    """Inserts rows in their order; pending changes of the session are not flushed first."""
    if rows:
        session.connection().execute(insert(kind), rows)


def insert_missing(session: Session, kind: type[Base], rows: Sequence[Mapping[str, Any]]) -> int:
    """Inserts rows, without those that break a unique constraint; returns their number."""
    # Imported where it is used: the dialect of PostgreSQL is slow to import.
    dialect = import_module(f"sqlalchemy.dialects.{session.get_bind().dialect.name}")
    counted, number = {"preserve_rowcount": True}, 0
    for row in rows:
        insertion = dialect.insert(kind).values(row).on_conflict_do_nothing()
        done = session.execute(insertion, execution_options=counted)
        number += cast("CursorResult[Any]", done).rowcount
    return number
