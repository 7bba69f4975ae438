"""Models and clusters under names of the users' own, written out as campaigns have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal

from sqlalchemy import func, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from results_db.errors import (
    DatabaseConflictError,
    DescriptionLimitError,
    DescriptionNotFoundError,
    DescriptionOwnedError,
)
from results_db.part import StorePart
from results_db.retry import retried
from results_db.service_tables import OwnDescription, UserCluster, UserModel

DescriptionKind = Literal["model", "cluster"]

MAX_DESCRIPTIONS: Final = 500
"""Most models, and most clusters: people name them, and a list shows them all."""

_TABLES: Final[Mapping[DescriptionKind, type[OwnDescription]]] = {
    "model": UserModel,
    "cluster": UserCluster,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class DescriptionRecord:
    """A model or a cluster of the users' own."""

    name: str
    description: Mapping[str, Any]
    """`ModelShape.to_mapping()` or `Cluster.to_mapping()`."""
    notes: str
    """What was guessed of it; empty: nothing."""
    created_by: str
    """Name of the token that put it first."""
    created_at: datetime
    updated_at: datetime


class Descriptions(StorePart):
    """The part of the store that keeps models and clusters."""

    def descriptions(self, kind: DescriptionKind) -> list[DescriptionRecord]:
        """All of a kind, by name."""
        table = _TABLES[kind]
        with self._db.read() as session:
            return [_record(row) for row in session.scalars(select(table).order_by(table.name))]

    def description(self, kind: DescriptionKind, name: str) -> DescriptionRecord:
        """One of them.

        Raises:
            DescriptionNotFoundError: there is none of this name.
        """
        with self._db.read() as session:
            return _record(_row(session, kind, name))

    @retried
    def put_description(
        self, kind: DescriptionKind, name: str, description: Mapping[str, Any], *, notes: str = ""
    ) -> tuple[DescriptionRecord, bool]:
        """Keeps one under its name, in place of what was there; says whether it is new.

        Raises:
            DescriptionLimitError: there are as many as there may be.
            DescriptionOwnedError: it is somebody else's, and this one is no admin.
        """
        now = self._clock()
        table = _TABLES[kind]
        with self._db.write() as session:
            row = session.get(table, name, with_for_update=True)
            is_new = row is None
            if row is None:
                _refuse_more(session, kind)
                row = table(name=name, created_by=self._actor.name, created_at=now)
                session.add(row)
            self._refuse_others(kind, row)
            row.description, row.notes, row.updated_at = dict(description), notes, now
            _write(session, kind, name)
            self._audit(session, f"{kind}.put", kind, name, new=is_new)
            return _record(row), is_new

    @retried
    def delete_description(self, kind: DescriptionKind, name: str) -> None:
        """Deletes one; campaigns that were described with it have it written out.

        Raises:
            DescriptionNotFoundError: there is none of this name.
            DescriptionOwnedError: it is somebody else's, and this one is no admin.
        """
        with self._db.write() as session:
            row = _row(session, kind, name, lock=True)
            self._refuse_others(kind, row)
            session.delete(row)
            self._audit(session, f"{kind}.delete", kind, name)

    def _refuse_others(self, kind: DescriptionKind, row: OwnDescription) -> None:
        """The gate has asked whose it is, too; by now the name may be somebody else's."""
        if self._actor.role == "submitter" and row.created_by != self._actor.name:
            raise DescriptionOwnedError(
                f"the {kind} {row.name!r} belongs to {row.created_by!r}, and the token "
                f"{self._actor.name!r} changes only what was made in its own name; take another name"
            )


def _row(
    session: Session, kind: DescriptionKind, name: str, *, lock: bool = False
) -> OwnDescription:
    row = session.get(_TABLES[kind], name, with_for_update=lock or None)
    if row is None:
        raise DescriptionNotFoundError(f"there is no {kind} named {name!r}")
    return row


def _write(session: Session, kind: DescriptionKind, name: str) -> None:
    try:
        session.flush()
    except IntegrityError as error:
        # Put for the first time by two at once: the other one's is there now, to be replaced.
        raise DatabaseConflictError(f"{kind} {name!r} was put at the same time") from error


def _refuse_more(session: Session, kind: DescriptionKind) -> None:
    if (session.scalar(select(func.count()).select_from(_TABLES[kind])) or 0) >= MAX_DESCRIPTIONS:
        raise DescriptionLimitError(
            f"there are {MAX_DESCRIPTIONS} {kind}s already, the most that are kept; delete one first"
        )


def _record(row: OwnDescription) -> DescriptionRecord:
    return DescriptionRecord(
        name=row.name,
        description=row.description,
        notes=row.notes,
        created_by=row.created_by,
        created_at=row.created_at,
        updated_at=row.updated_at,
    )
