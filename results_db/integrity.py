"""`db check`: whether a database is whole, in words, with the rows that are not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import ForeignKeyConstraint, Select, and_, exists, func, literal, select, text
from sqlalchemy.orm import Session

from results_db import migrate
from results_db.all_tables import METADATA
from results_db.invariants import RULES
from results_db.maintenance import lift_limits
from results_db.models import Campaign
from results_db.part import utc_now
from results_db.session import Database
from results_db.standing_repair import StandingRepair

CHECKS: Final = ("storage", "references", *RULES, "standings")
"""What is looked at, in order."""

MOST_KEYS: Final = 5
"""Keys that a finding names."""

MOST_PAGES: Final = 20
"""Complaints about pages of the file that are passed on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Something that must not be."""

    check: str
    """The check that found it: storage, references, or a rule's name."""
    message: str
    """What is wrong, with the number of rows and the first of their keys."""
    num_rows: int = 0
    """Rows concerned; 0 where it is not about rows."""
    is_mended: bool = False
    """Whether it was put right."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckReport:
    """What a check of a database found."""

    revision: str
    """Of its schema: this version's."""
    checks: tuple[str, ...]
    """What was looked at."""
    findings: tuple[Finding, ...]
    """What is wrong; empty: the database is whole."""


def check_database(url: str, *, repair: bool = False) -> CheckReport:
    """Looks at every page, every reference, every rule and all standings of a database.

    Args:
        url: the database.
        repair: whether standings that are wrong are made anew, from the measurements; all else is left
            as it is.

    Raises:
        DatabaseUnavailableError: it is no database, cannot be opened, or is damaged beyond reading.
        SchemaNewerError: a newer version wrote it.
        SchemaOutdatedError: it has not been upgraded.
    """
    revision = migrate.check(url)
    database = Database(url)
    try:
        with database.read() as session:
            lift_limits(session.connection())
            findings = [*_storage(session), *_references(session), *_rules(session)]
        findings += _standings(database, repair=repair)
    finally:
        database.close()
    return CheckReport(revision=revision, checks=CHECKS, findings=tuple(findings))


def _standings(database: Database, *, repair: bool) -> Iterator[Finding]:
    """Campaigns whose table of standings is not what their measurements say."""
    keeper = StandingRepair(database, utc_now)
    for name in keeper.wrong_standings():
        message = f"the standings of campaign {name} are not what its measurements say"
        if repair:
            with database.read() as session:
                ids = session.scalars(select(Campaign.id).where(Campaign.name == name)).all()
            keeper.rebuild_standings(ids)
            message += "; they were made anew"
        yield Finding(check="standings", message=message, is_mended=repair)


def _storage(session: Session) -> Iterator[Finding]:
    """What the database says of its own pages and constraints."""
    connection = session.connection()
    if connection.dialect.name == "sqlite":
        rows = connection.exec_driver_sql(f"PRAGMA integrity_check({MOST_PAGES})").scalars()
        yield from (Finding(check="storage", message=row) for row in rows if row != "ok")
        return
    for table in METADATA.sorted_tables:
        # Reads every row and with it every page, whose checksums PostgreSQL looks at.
        session.execute(text(f'SELECT count(whole.*) FROM "{table.name}" AS whole'))  # noqa: S608
    not_valid = "SELECT conname FROM pg_constraint WHERE NOT convalidated ORDER BY conname"
    for name in session.execute(text(not_valid)).scalars():
        yield Finding(check="storage", message=f"the constraint {name} was never validated")


def _references(session: Session) -> Iterator[Finding]:
    """Rows that refer to rows that are not there; constraints prevent them while they are on."""
    for table in METADATA.sorted_tables:
        for constraint in table.foreign_key_constraints:
            orphans = _orphans(constraint)
            found = _finding(
                session,
                "references",
                f"rows of {table.name} that refer to no row of {constraint.referred_table.name}",
                orphans,
            )
            if found is not None:
                yield found


def _orphans(constraint: ForeignKeyConstraint) -> Select[Any]:
    table = constraint.table
    referred = constraint.referred_table.alias("referred")
    pairs = [(each.parent, referred.c[each.column.name]) for each in constraint.elements]
    is_there = exists().select_from(referred).where(and_(*(own == other for own, other in pairs)))
    refers = and_(*(own.is_not(None) for own, _ in pairs))
    return select(*table.primary_key.columns).where(refers, ~is_there)


def _rules(session: Session) -> Iterator[Finding]:
    for name, rule in RULES.items():
        found = _finding(session, name, rule.broken, rule.keys())
        if found is not None:
            yield found


def _finding(session: Session, check: str, broken: str, keys: Select[Any]) -> Finding | None:
    if session.execute(keys.with_only_columns(literal(1)).limit(1)).first() is None:
        return None
    number = session.scalar(select(func.count()).select_from(keys.subquery())) or 0
    first = session.execute(keys.order_by(*keys.selected_columns).limit(MOST_KEYS)).all()
    shown = ", ".join("/".join(str(part) for part in key) for key in first)
    more = ", ..." if number > len(first) else ""
    return Finding(
        check=check, message=f"{broken}, {number} of them: {shown}{more}", num_rows=number
    )
