"""Every table of the schema: a table is known once its module is imported, and a command imports few."""

from typing import Final

from sqlalchemy import MetaData

from results_db import (
    analysis_tables,
    event_tables,
    import_tables,
    models,
    service_tables,
    standing_tables,
    worker_tables,
)
from results_db.base import Base

__all__ = [
    "METADATA",
    "analysis_tables",
    "event_tables",
    "import_tables",
    "models",
    "service_tables",
    "standing_tables",
    "worker_tables",
]

METADATA: Final[MetaData] = Base.metadata
"""The whole schema, as this version has it."""
