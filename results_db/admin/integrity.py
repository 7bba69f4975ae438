"""`db check`: whether a database is intact, with the tables, indexes and rows that are not.

The parts run in this order, and a later one only where the earlier ones let it: the storage
(`storage_check.py`), the schema (`schema_check.py`), references, and the rules between rows
(`row_rules.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Select, exists, func, literal, select
from sqlalchemy.orm import Session

from layout_tuner.results_db.admin.row_rules import RULES
from layout_tuner.results_db.admin.schema_check import schema_differences
from layout_tuner.results_db.admin.storage_check import check_storage
from layout_tuner.results_db.database.database import Database
from layout_tuner.results_db.database.postgresql import lift_limits
from layout_tuner.results_db.errors import DatabaseUnavailableError
from layout_tuner.results_db.migrations import migrate
from layout_tuner.results_db.models.all_tables import METADATA
from layout_tuner.results_db.models.tables import Campaign
from layout_tuner.search_spaces.campaigns.stored_campaign import StoredCampaign

CHECKS: Final = ("storage", "schema", "references", *RULES, "documents")

MOST_KEYS: Final = 5
"""Keys that a finding names."""

UNKNOWN_REVISION: Final = "unknown"
"""Of a schema whose revision cannot be read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A fault that a check has found."""

    check: str
    """The check that found it: storage, schema, references, or a rule's name."""
    message: str
    """The problem, with the number of rows and their first keys."""
    num_rows: int = 0
    """Rows concerned; 0 where it is not about rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckReport:
    """The findings of a check of a database."""

    revision: str
    """Of its schema: this version's, or `UNKNOWN_REVISION`."""
    checks: tuple[str, ...]
    """The checks that ran; only the first ones if the storage or the schema is damaged."""
    storage: str
    findings: tuple[Finding, ...]
    """The problems; empty: the database is intact."""


def check_database(url: str) -> CheckReport:
    """Checks every page, reference and rule of a database.

    Raises:
        DatabaseUnavailableError: it is not a database, cannot be opened, or is too damaged to be
            read.
        SchemaNewerError: a version that this one does not know wrote it.
        SchemaOutdatedError: it has not been upgraded.
    """
    try:
        revision, unreadable = migrate.check(url), None
    except DatabaseUnavailableError as error:
        # The page with the revision may be the damaged one.
        revision, unreadable = UNKNOWN_REVISION, error
    with closing(Database(url)) as database:
        with database.read() as session:
            lift_limits(session.connection())
            method, damages = check_storage(session)
        findings = [Finding(check="storage", message=each) for each in damages]
        checks = CHECKS[:1]
        if not findings:
            # Otherwise the other checks would read the damaged pages too, and fail.
            if unreadable is not None:
                raise unreadable
            checks, more = _check_rows(database, revision)
            findings += more
    return CheckReport(revision=revision, checks=checks, storage=method, findings=tuple(findings))


def _check_rows(database: Database, revision: str) -> tuple[tuple[str, ...], list[Finding]]:
    """The checks after that of the storage, by name, and their findings."""
    with database.write() if database.is_shared else database.read() as session:
        differences = schema_differences(session.connection(), revision)
    findings = [Finding(check="schema", message=message) for message in differences]
    try:
        with database.read() as session:
            lift_limits(session.connection())
            findings += _references(session)
            for name, (broken, keys) in RULES.items():
                findings += _finding(session, name, broken, keys)
            findings += _documents(session)
    except DatabaseUnavailableError:
        if not differences:
            raise
        # A table or a column is missing that a check reads.
        return CHECKS[:2], findings
    return CHECKS, findings


def _references(session: Session) -> Iterator[Finding]:
    """Rows that refer to missing rows; possible only if constraints were disabled."""
    for table in METADATA.sorted_tables:
        for constraint in table.foreign_key_constraints:
            name = constraint.referred_table.name
            referred = constraint.referred_table.alias("referred")
            pairs = [(each.parent, referred.c[each.column.name]) for each in constraint.elements]
            is_there = exists().select_from(referred).where(*(own == there for own, there in pairs))
            refers = (own.is_not(None) for own, _ in pairs)
            orphans = select(*table.primary_key.columns).where(*refers, ~is_there)
            broken = f"rows of {table.name} that refer to no row of {name}"
            yield from _finding(session, "references", broken, orphans)


def _documents(session: Session) -> Iterator[Finding]:
    """Campaigns whose document has no fields."""
    rows = session.execute(select(Campaign.name, Campaign.spec).order_by(Campaign.id))
    found = [name for name, spec in rows if not StoredCampaign(document=spec).fields]
    if found:
        shown = ", ".join(found[:MOST_KEYS]) + (", ..." if len(found) > MOST_KEYS else "")
        message = f"campaigns whose document has no fields, {len(found)} of them: {shown}"
        yield Finding(check="documents", message=message, num_rows=len(found))


def _finding(session: Session, check: str, broken: str, keys: Select[Any]) -> Iterator[Finding]:
    if session.execute(keys.with_only_columns(literal(1)).limit(1)).first() is None:
        return
    number = session.scalar(select(func.count()).select_from(keys.subquery())) or 0
    first = session.execute(keys.order_by(*keys.selected_columns).limit(MOST_KEYS)).all()
    shown = ", ".join("/".join(str(part) for part in key) for key in first)
    more = ", ..." if number > len(first) else ""
    yield Finding(
        check=check, message=f"{broken}, {number} of them: {shown}{more}", num_rows=number
    )
