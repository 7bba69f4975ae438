"""`db check`: whether a database is intact, with the rows that are not.

Constraints cannot express every rule between rows. An `Invariant` is a query for the keys of rows
that break such a rule. It is the same on every database, and returns no rows from an intact one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import (
    ColumnElement,
    Connection,
    ForeignKeyConstraint,
    Select,
    and_,
    case,
    exists,
    func,
    literal,
    not_,
    or_,
    select,
    text,
)
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session, aliased

from results_db.admin.schema_check import schema_differences
from results_db.database.database import Database
from results_db.database.postgresql import lift_limits
from results_db.errors import DatabaseUnavailableError
from results_db.migrations import migrate
from results_db.models.all_tables import METADATA
from results_db.models.service_tables import WorkerRow
from results_db.models.tables import Attempt, Campaign, MeasurementRow, StageMemoryRow, Trial
from results_db.records import ENDED_CAMPAIGN_STATES
from results_db.rows import COST_COLUMNS
from results_db.trials.loss_check import DIVERGED
from search_spaces.campaigns.fidelity import PART

MOST_PAGES: Final = 20
"""Most damaged places that are reported for one table, or for a SQLite file."""

RESTORE: Final = "stop the service and restore the last good backup with `layout-tuner db restore`"

_DAMAGE_STATES: Final = ("XX001", "XX002", "58030", "58P01")
"""PostgreSQL: damaged data, a damaged index, an unreadable file, a missing file."""

_TREE: Final = re.compile(r"\b[Tt]ree (?:page )?(\d+)")
"""SQLite identifies a table or an index by the number of its first page."""

_NAMED_INDEX: Final = re.compile(r"\bindex (\w+)")

_FILE: Final = re.compile(r'(?:relation|file) "([^".]+)')

_BLOCK: Final = re.compile(r"\bblock (\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Damage:
    """A table or an index that cannot be read in full."""

    what: str
    """For example "table trials" or "index ix_trials_state"; "file" if it belongs to neither."""
    places: tuple[str, ...]
    """The messages of the database, in order of places."""
    advice: str
    """The remedy."""

    def __str__(self) -> str:
        shown = "; ".join(self.places[:3])
        more = f"; and {len(self.places) - 3} more" if len(self.places) > 3 else ""
        return f"the {self.what} is damaged ({shown}{more}): {self.advice}"


def damages(session: Session) -> list[Damage]:
    """Reads every table and every index, and returns the damaged ones."""
    if session.connection().dialect.name == "sqlite":
        return _sqlite_damages(session)
    return list(_postgresql_damages(session))


def _sqlite_damages(session: Session) -> list[Damage]:
    connection = session.connection()
    schema = connection.exec_driver_sql(
        "SELECT rootpage, type, name, tbl_name FROM sqlite_master WHERE rootpage > 0 ORDER BY name"
    ).all()
    objects = {page: f"{kind} {name}" for page, kind, name, _ in schema}
    found: dict[str, list[str]] = {}
    for table in [name for _, kind, name, _ in schema if kind == "table"]:
        try:
            lines = _integrity_lines(connection, f'integrity_check("{table}")')
            for _ in connection.exec_driver_sql(f'SELECT * FROM "{table}"'):  # noqa: S608
                pass
        except DBAPIError:
            # The first page of the table or of an index is damaged, or a text is not UTF-8.
            indexes = [name for _, kind, name, of in schema if kind == "index" and of == table]
            found |= _unreadable(connection, table, indexes)
            continue
        for line in lines:
            found.setdefault(_sqlite_object(line, objects), []).append(line)
    if not found:
        # Damage that belongs to no table: pages that are used twice or never.
        found = {"file": _integrity_lines(connection, f"integrity_check({MOST_PAGES})")}
    tables_are_whole = all(what.startswith("index") for what in found)
    return [
        Damage(
            what=what,
            places=tuple(places),
            advice=_reindex(what, "in `sqlite3 results.sqlite3`") if tables_are_whole else RESTORE,
        )
        for what, places in found.items()
        if places
    ]


def _integrity_lines(connection: Connection, pragma: str) -> list[str]:
    rows = connection.exec_driver_sql(f"PRAGMA {pragma}").scalars()
    lines = [line for row in rows for line in str(row).splitlines()]
    # Without the heading "*** in database main ***".
    return [line for line in lines if line != "ok" and not line.startswith("***")]


def _unreadable(connection: Connection, table: str, indexes: Sequence[str]) -> dict[str, list[str]]:
    """Reads a table without its indexes, and then by each index."""
    queries = {f"table {table}": f'SELECT * FROM "{table}" NOT INDEXED'}  # noqa: S608
    for index in indexes:
        columns = connection.exec_driver_sql(f'PRAGMA index_info("{index}")').all()
        keys = ", ".join(f'"{name}"' for _, _, name in columns)
        query = f'SELECT {keys} FROM "{table}" INDEXED BY "{index}" ORDER BY {keys}'  # noqa: S608
        queries[f"index {index}"] = query
    found: dict[str, list[str]] = {}
    for what, query in queries.items():
        try:
            for _ in connection.exec_driver_sql(query):
                pass
        except DBAPIError as error:
            if "no query solution" not in str(error.orig):  # a partial index
                found[what] = [str(error.orig)[:200]]
    return found or {f"table {table}": ["it, or one of its indexes, cannot be read"]}


def _sqlite_object(line: str, objects: dict[int, str]) -> str:
    tree = _TREE.search(line)
    if tree is not None:
        return objects.get(int(tree[1]), "table sqlite_schema" if tree[1] == "1" else "file")
    index = _NAMED_INDEX.search(line)
    return "file" if index is None else f"index {index[1]}"


def _reindex(what: str, where: str) -> str:
    name = what.removeprefix("index ")
    return f'its table is whole: stop the service and rebuild it {where} with REINDEX "{name}"; where that fails, restore a backup'


def _postgresql_damages(session: Session) -> Iterator[Damage]:
    damaged_tables = set()
    for table in _names(session, "r"):
        places = _damaged_places(session, table)
        if places:
            damaged_tables.add(table)
            yield Damage(what=f"table {table}", places=places, advice=RESTORE)
    for name, table, query in _index_scans(session):
        if table in damaged_tables:
            continue  # a scan of the index reads the table's pages too
        error = _read_error(session, query)
        if error is not None:
            advice = f'its table is whole: rebuild it with REINDEX INDEX "{name}"'
            yield Damage(what=f"index {name}", places=(error,), advice=advice)


def _names(session: Session, kind: str) -> list[str]:
    query = text(
        "SELECT relname FROM pg_class WHERE relkind = :kind "
        "AND relnamespace = current_schema()::regnamespace ORDER BY relname"
    )
    return list(session.scalars(query, {"kind": kind}))


def _damaged_places(session: Session, table: str) -> tuple[str, ...]:
    """Reads a table, and continues after each damaged block; long values are in another file."""
    query = text("SELECT pg_relation_filepath(CAST(:name AS regclass))")
    path = session.scalar(query, {"name": f'"{table}"'})
    places: list[str] = []
    block = 0
    while len(places) < MOST_PAGES:
        error = _read_error(
            session,
            f'SELECT count(whole.*) FROM "{table}" AS whole '  # noqa: S608 - a name of the catalogue
            f"WHERE ctid >= '({block},0)'::tid",
        )
        if error is None:
            break
        places.append(error)
        file, where = _FILE.search(error), _BLOCK.search(error)
        if file is None or where is None or file[1] != path:
            break
        block = int(where[1]) + 1
    return tuple(places)


def _index_scans(session: Session) -> Iterator[tuple[str, str, str]]:
    """For each index, its name, its table, and a query that reads all of it."""
    indexes = session.execute(
        text(
            "SELECT index.relname, of.relname, pg_get_expr(indpred, indrelid), "
            "ARRAY(SELECT pg_get_indexdef(indexrelid, place, true) "
            "      FROM generate_series(1, indnkeyatts) AS place) "
            "FROM pg_index JOIN pg_class AS index ON index.oid = indexrelid "
            "JOIN pg_class AS of ON of.oid = indrelid "
            "WHERE index.relnamespace = current_schema()::regnamespace ORDER BY 1"
        )
    ).all()
    for scan in ("enable_seqscan", "enable_sort", "enable_bitmapscan", "enable_incremental_sort"):
        session.execute(text(f"SET LOCAL {scan} = off"))
    for name, table, predicate, keys in indexes:
        where = f"WHERE {predicate} " if predicate else ""
        order = ", ".join(keys)
        query = f'SELECT count(*) FROM (SELECT 1 FROM "{table}" {where}ORDER BY {order}) AS whole'  # noqa: S608
        yield name, table, query


def _read_error(session: Session, query: str) -> str | None:
    """The server's message about damage that a query meets; None: it meets none."""
    try:
        with session.begin_nested():
            session.execute(text(query.replace(":", r"\:")))
    except DBAPIError as error:
        if getattr(error.orig, "sqlstate", None) not in _DAMAGE_STATES:
            raise
        return " ".join(str(error.orig).split("\n")[0].split())
    return None


COST_TOLERANCE: Final = 1e-6
"""Relative tolerance of sums of costs, for rounding in any order of addition."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Invariant:
    """A rule that every database must keep."""

    broken: str
    """Names the rows that break it, for example "completed trials without ...". """
    keys: Callable[[], Select[*tuple[Any, ...]]]
    """Finds the keys of the rows that break it."""


def _completed_without_measurement() -> Select[Any]:
    return select(Trial.id).where(Trial.state == "COMPLETED", ~_has_measurement())


def _measured_out_of_place() -> Select[Any]:
    may_be = or_(
        Trial.state == "COMPLETED", and_(Trial.state == "FAILED", Trial.reason == DIVERGED)
    )
    return select(Trial.id).where(_has_measurement(), not_(may_be))


def _has_measurement() -> ColumnElement[bool]:
    return exists().where(MeasurementRow.trial_id == Trial.id)


def _running_without_attempt() -> Select[Any]:
    its_own = exists().where(
        Attempt.trial_id == Trial.id,
        Attempt.attempt == Trial.attempt,
        Attempt.worker_id == Trial.worker_id,
        Attempt.ending.is_(None),
    )
    return select(Trial.id).where(Trial.state == "RUNNING", ~its_own)


def _attempts_left_open() -> Select[int, int]:
    keys = select(Attempt.trial_id, Attempt.attempt)
    return keys.join(Trial, Trial.id == Attempt.trial_id).where(
        Attempt.ending.is_(None),
        or_(Trial.state != "RUNNING", Trial.attempt != Attempt.attempt),
    )


def _miscounted_attempts() -> Select[Any]:
    latest = (
        select(func.coalesce(func.max(Attempt.attempt), 0))
        .where(Attempt.trial_id == Trial.id)
        .scalar_subquery()
    )
    return select(Trial.id).where(Trial.attempt != latest)


def _leased_by_ended_workers() -> Select[Any]:
    return (
        select(Trial.id)
        .join(WorkerRow, WorkerRow.id == Trial.worker_id)
        .where(Trial.state == "RUNNING", WorkerRow.ended_at.is_not(None))
    )


def _open_in_an_ended_campaign() -> Select[Any]:
    still_open = or_(
        Trial.state == "PENDING", and_(Trial.state == "RUNNING", not_(Trial.cancel_requested))
    )
    return (
        select(Trial.id)
        .join(Campaign, Campaign.id == Trial.campaign_id)
        .where(Campaign.state.in_(ENDED_CAMPAIGN_STATES), still_open)
    )


def _past_the_counters() -> Select[Any]:
    return (
        select(Trial.id)
        .join(Campaign, Campaign.id == Trial.campaign_id)
        .where(or_(Trial.number > Campaign.last_number, Trial.ended_seq > Campaign.last_ended_seq))
    )


def _repeats_of_another() -> Select[Any]:
    first = aliased(Trial)
    return (
        select(Trial.id)
        .join(first, first.id == Trial.repeat_of)
        .where(or_(first.campaign_id != Trial.campaign_id, first.layout_key != Trial.layout_key))
    )


def _cheap_in_part() -> Select[Any]:
    parts = (Trial.full_num_nodes, Trial.full_dp, Trial.full_num_microbatches)
    is_cheap = Trial.num_layers.is_not(None)
    differs = (each.is_not(None) != is_cheap for each in parts)
    return select(Trial.id).where(or_(Trial.layout_key.contains(PART) != is_cheap, *differs))


def _wrong_number_of_stages() -> Select[Any]:
    stages = (
        select(StageMemoryRow.trial_id, func.count().label("number"))
        .group_by(StageMemoryRow.trial_id)
        .subquery()
    )
    return (
        select(Trial.id)
        .join(stages, stages.c.trial_id == Trial.id)
        .where(stages.c.number != Trial.pp)
    )


def _differs(total: ColumnElement[Any], parts: ColumnElement[Any]) -> ColumnElement[bool]:
    """Whether a sum differs from the sum of its parts by more than rounding."""
    scale = case((func.abs(total) > 1, func.abs(total)), else_=1.0)
    return func.abs(total - parts) > COST_TOLERANCE * scale


def _sum_of(column: Any, *which: ColumnElement[bool]) -> ColumnElement[Any]:
    return func.coalesce(select(func.sum(column)).where(*which).scalar_subquery(), 0.0)


def _costs_of_attempts() -> Select[Any]:
    off = [
        _differs(
            getattr(Trial, column), _sum_of(getattr(Attempt, column), Attempt.trial_id == Trial.id)
        )
        for column in _COSTS
    ]
    return select(Trial.id).where(or_(*off))


def _costs_of_trials() -> Select[Any]:
    off = [
        _differs(
            getattr(Campaign, column),
            _sum_of(getattr(Trial, column), Trial.campaign_id == Campaign.id),
        )
        for column in _COSTS
    ]
    return select(Campaign.id).where(or_(*off))


_COSTS: Final = ("node_seconds", *COST_COLUMNS.values())

RULES: Final[dict[str, Invariant]] = {
    "measured": Invariant(
        broken="completed trials without a measurement", keys=_completed_without_measurement
    ),
    "measurement-of-no-result": Invariant(
        broken="trials with a measurement that neither completed nor diverged",
        keys=_measured_out_of_place,
    ),
    "running": Invariant(
        broken="running trials without an attempt that runs", keys=_running_without_attempt
    ),
    "attempts-open": Invariant(
        broken="attempts that never ended, of trials that are not in them",
        keys=_attempts_left_open,
    ),
    "attempts-counted": Invariant(
        broken="trials whose attempt is not the latest of their attempts",
        keys=_miscounted_attempts,
    ),
    "leases": Invariant(
        broken="running trials leased by workers whose session has ended",
        keys=_leased_by_ended_workers,
    ),
    "ended-campaigns": Invariant(
        broken="trials in ended campaigns that wait, or run without a request to cancel them",
        keys=_open_in_an_ended_campaign,
    ),
    "counters": Invariant(
        broken="trials with a number or place that their campaign has not given yet",
        keys=_past_the_counters,
    ),
    "repeats": Invariant(
        broken="repeats of another layout, or of another campaign's trial",
        keys=_repeats_of_another,
    ),
    "cheap-probes": Invariant(
        broken="trials that say only in part which layout they stand for", keys=_cheap_in_part
    ),
    "stages": Invariant(
        broken="trials with peaks of more or fewer stages than they have",
        keys=_wrong_number_of_stages,
    ),
    "trial-costs": Invariant(
        broken="trials whose cost is not that of their attempts", keys=_costs_of_attempts
    ),
    "campaign-costs": Invariant(
        broken="campaigns whose cost is not that of their trials", keys=_costs_of_trials
    ),
}
"""By a short name."""

CHECKS: Final = ("storage", "schema", "references", *RULES)
"""The checks, in order."""

MOST_KEYS: Final = 5
"""Keys that a finding names."""

UNKNOWN_REVISION: Final = "unknown"
"""Of a schema whose revision cannot be read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Something that must not be."""

    check: str
    """The check that found it: storage, schema, references, or a rule's name."""
    message: str
    """The problem, with the number of rows and their first keys."""
    num_rows: int = 0
    """Rows concerned; 0 where it is not about rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckReport:
    """What a check of a database found."""

    revision: str
    """Of its schema: this version's, or `UNKNOWN_REVISION`."""
    checks: tuple[str, ...]
    """The checks that ran; only the first ones if the storage or the schema is damaged."""
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
            findings = [Finding(check="storage", message=str(each)) for each in damages(session)]
        if findings:
            # The other checks would read the damaged pages too, and fail without naming them.
            return CheckReport(revision=revision, checks=CHECKS[:1], findings=tuple(findings))
        if unreadable is not None:
            raise unreadable
        with database.write() if database.is_shared else database.read() as session:
            differences = schema_differences(session.connection(), revision)
        findings = [Finding(check="schema", message=message) for message in differences]
        try:
            with database.read() as session:
                lift_limits(session.connection())
                findings += [*_references(session), *_rules(session)]
        except DatabaseUnavailableError:
            if not differences:
                raise
            # A table or a column is missing that a check reads.
            return CheckReport(revision=revision, checks=CHECKS[:2], findings=tuple(findings))
    return CheckReport(revision=revision, checks=CHECKS, findings=tuple(findings))


def _references(session: Session) -> Iterator[Finding]:
    """Rows that refer to missing rows; possible only if constraints were disabled."""
    for table in METADATA.sorted_tables:
        for constraint in table.foreign_key_constraints:
            broken = (
                f"rows of {table.name} that refer to no row of {constraint.referred_table.name}"
            )
            yield from _finding(session, "references", broken, _orphans(constraint))


def _orphans(constraint: ForeignKeyConstraint) -> Select[Any]:
    table = constraint.table
    referred = constraint.referred_table.alias("referred")
    pairs = [(each.parent, referred.c[each.column.name]) for each in constraint.elements]
    is_there = exists().select_from(referred).where(and_(*(own == other for own, other in pairs)))
    refers = and_(*(own.is_not(None) for own, _ in pairs))
    return select(*table.primary_key.columns).where(refers, ~is_there)


def _rules(session: Session) -> Iterator[Finding]:
    for name, rule in RULES.items():
        yield from _finding(session, name, rule.broken, rule.keys())


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
