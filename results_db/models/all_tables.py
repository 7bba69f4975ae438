"""Every table of the schema: SQLAlchemy knows a table once its module is imported."""

from typing import Final

from sqlalchemy import MetaData

from layout_tuner.results_db.models import service_tables, tables
from layout_tuner.results_db.models.table_base import Base

__all__ = ["METADATA", "service_tables", "tables"]

METADATA: Final[MetaData] = Base.metadata
