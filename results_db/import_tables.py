"""The tables of imported campaigns: what a measurement table says that a campaign has no place for."""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, BigInteger, ForeignKey, String
from sqlalchemy.orm import Mapped, mapped_column

from results_db.base import Base


class Import(Base):
    """Where an imported campaign comes from."""

    __tablename__ = "imports"

    campaign_id: Mapped[int] = mapped_column(
        ForeignKey("campaigns.id", ondelete="CASCADE"), primary_key=True
    )
    source: Mapped[str] = mapped_column(String(1000))
    """As the rows of its cell have it; empty where they say nothing."""
    aside_columns: Mapped[list[str]] = mapped_column(JSON)
    """Names of the columns that the format does not know, in their order."""


class ImportedRow(Base):
    """What an imported table says of a trial beyond its layout and its measurement."""

    __tablename__ = "imported_rows"

    trial_id: Mapped[int] = mapped_column(
        ForeignKey("trials.id", ondelete="CASCADE"), primary_key=True
    )
    number: Mapped[int]
    """Its place in the table, from 1."""
    line: Mapped[int]
    """The line of the file that it ended on."""
    unstated: Mapped[list[str]] = mapped_column(JSON)
    """Columns that the table left empty although the layout needs them."""
    aside: Mapped[dict[str, Any]]
    """Columns that the format does not know, by name."""
    peak_memory_bytes: Mapped[int | None] = mapped_column(BigInteger)
    """A peak that the table has of a row that did not complete."""
