"""Models and clusters that users stored under names of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal

from sqlalchemy import func, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from layout_tuner.results_db.database.retry import retried
from layout_tuner.results_db.database.store_base import StoreSection
from layout_tuner.results_db.errors import (
    DatabaseConflictError,
    DescriptionLimitError,
    DescriptionNotFoundError,
    DescriptionOwnedError,
)
from layout_tuner.results_db.models.service_tables import OwnDescription, UserCluster, UserModel
from layout_tuner.results_db.rows import record_of

DescriptionKind = Literal["model", "cluster"]

MAX_DESCRIPTIONS: Final = 500
"""Most models, and most clusters, that are stored: one list shows them all."""

_TABLES: Final[Mapping[DescriptionKind, type[OwnDescription]]] = {
    "model": UserModel,
    "cluster": UserCluster,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class DescriptionRecord:
    """A model or a cluster of a user."""

    name: str
    description: Mapping[str, Any]
    """`ModelShape.to_mapping()` or `Cluster.to_mapping()`."""
    notes: str
    """Values that were assumed; empty: none."""
    created_by: str
    """Its owner, for whom it was stored first."""
    created_at: datetime
    updated_at: datetime


class Descriptions(StoreSection):
    """The store's methods for models and clusters of users."""

    def find(self, kind: DescriptionKind) -> list[DescriptionRecord]:
        """All models or all clusters, by name."""
        table = _TABLES[kind]
        with self._db.read() as session:
            return [
                record_of(DescriptionRecord, row)
                for row in session.scalars(select(table).order_by(table.name))
            ]

    def get(self, kind: DescriptionKind, name: str) -> DescriptionRecord:
        """One model or cluster. Raises DescriptionNotFoundError if there is none of this name."""
        with self._db.read() as session:
            return record_of(DescriptionRecord, _row(session, kind, name))

    def owner_of(self, kind: DescriptionKind, name: str) -> str | None:
        """The owner of one; None: there is none of this name."""
        table = _TABLES[kind]
        return self._scalar(select(table.created_by).where(table.name == name))

    @retried
    def put(
        self, kind: DescriptionKind, name: str, description: Mapping[str, Any], *, notes: str = ""
    ) -> tuple[DescriptionRecord, bool]:
        """Stores one under its name, replacing an earlier one; returns whether it is new.

        Raises:
            DescriptionLimitError: the limit is reached.
            DescriptionOwnedError: it belongs to another user, and the actor is not an admin.
        """
        now = self._clock()
        table = _TABLES[kind]
        with self._db.write() as session:
            row = session.get(table, name, with_for_update=True)
            is_new = row is None
            if row is None:
                number = session.scalar(select(func.count()).select_from(table)) or 0
                if number >= MAX_DESCRIPTIONS:
                    raise DescriptionLimitError(
                        f"there are {MAX_DESCRIPTIONS} {kind}s already, the most that are kept; "
                        "delete one first"
                    )
                row = table(name=name, created_by=self._actor.owner, created_at=now)
                session.add(row)
            self._refuse_others(kind, row)
            row.description, row.notes, row.updated_at = dict(description), notes, now
            try:
                session.flush()
            except IntegrityError as error:
                # Two requests created it at once: the other's row exists now, and can be replaced.
                raise DatabaseConflictError(f"{kind} {name!r} was put at the same time") from error
            self._audit(session, f"{kind}.put", kind, name, new=is_new)
            return record_of(DescriptionRecord, row), is_new

    @retried
    def delete(self, kind: DescriptionKind, name: str) -> None:
        """Deletes one; campaigns contain copies of their models and clusters.

        Raises:
            DescriptionNotFoundError: there is none of this name.
            DescriptionOwnedError: it belongs to another user, and the actor is not an admin.
        """
        with self._db.write() as session:
            row = _row(session, kind, name, lock=True)
            self._refuse_others(kind, row)
            session.delete(row)
            self._audit(session, f"{kind}.delete", kind, name)

    def _refuse_others(self, kind: DescriptionKind, row: OwnDescription) -> None:
        """Checks the owner in the transaction: it may have changed since the API checked it."""
        if self._actor.role not in ("admin", "system") and row.created_by != self._actor.owner:
            raise DescriptionOwnedError(
                f"the {kind} {row.name!r} belongs to {row.created_by!r}, and {self._actor.owner!r} "
                "changes only what is its own; take another name"
            )


def _row(
    session: Session, kind: DescriptionKind, name: str, *, lock: bool = False
) -> OwnDescription:
    row = session.get(_TABLES[kind], name, with_for_update=lock or None)
    if row is None:
        raise DescriptionNotFoundError(f"there is no {kind} named {name!r}")
    return row
