"""What every table stands on: names of constraints, points in time, and checks of columns."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

from sqlalchemy import JSON, DateTime, Dialect, MetaData, TypeDecorator
from sqlalchemy.orm import DeclarativeBase, MappedColumn, mapped_column

FINITE: Final = "1e300"
"""No figure reaches it: infinity does, and on PostgreSQL a NaN, which counts as larger still."""


class UtcDateTime(TypeDecorator[datetime]):
    """An aware point in time; kept in UTC, also by databases that know no time zones."""

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
        return value.astimezone(UTC)

    def result_processor(
        self, dialect: Dialect, coltype: object
    ) -> Callable[[Any], datetime | None] | None:
        # The way over a naive point in time takes five times as long, and pages have hundreds.
        return (
            _from_text if dialect.name == "sqlite" else super().result_processor(dialect, coltype)
        )


def _from_text(value: str | None) -> datetime | None:
    return None if value is None else datetime.fromisoformat(f"{value}+00:00")


def one_of(column: str, values: tuple[str, ...]) -> str:
    """The SQL that holds a column to a list of words."""
    return f"{column} IN ({', '.join(repr(value) for value in values)})"


def is_at_least(bound: int, *columns: str) -> str:
    """The SQL that holds numbers to a least value; what is NULL is not held to it."""
    return " AND ".join(f"{column} >= {bound}" for column in columns)


def is_over_zero(*columns: str) -> str:
    """The SQL that holds figures to be over 0 and finite."""
    return " AND ".join(f"{column} > 0 AND {column} < {FINITE}" for column in columns)


def nothing_yet() -> MappedColumn[float]:
    """A sum's column, which rows that were there before it begin with 0."""
    return mapped_column(default=0.0, server_default="0")


class Base(DeclarativeBase):
    """Names every constraint, so that migrations can find it again on every database."""

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
