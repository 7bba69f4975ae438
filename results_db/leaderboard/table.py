"""The leaderboard table: one row for each ranked layout, computed from its measurements.

Code that changes which measurements of a campaign count calls `update_rows` in the same
transaction, with the campaign's row locked, so that readers see both changes or neither. An
ordinary outcome changes the row of its own layout. It changes other rows only where the Pareto
front changes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from types import SimpleNamespace
from typing import Any, Final, cast

import numpy as np
from sqlalchemy import (
    ColumnElement,
    and_,
    delete,
    exists,
    insert,
    literal_column,
    or_,
    select,
    update,
)
from sqlalchemy.orm import Session, aliased

from results_db.database.bulk_insert import insert_many
from results_db.database.database import Database
from results_db.database.postgresql import lift_limits
from results_db.models.standings import STANDINGS_VERSION, LeaderboardRow
from results_db.models.tables import Campaign, IterationRow, MeasurementRow, Trial
from results_db.rows import objectives_of
from results_db.trials.filter import KNOB_FIELDS
from results_db.trials.filter_sql import MEASURED_METRICS
from results_db.trials.lifecycle import locked_campaign
from search_spaces.protocol.outcome import Measurement
from search_spaces.spec.objectives import (
    MAX_OBJECTIVES,
    MEMORY_HEADROOM,
    OBJECTIVE_FIGURES,
    OBJECTIVES,
    measured_objective,
    pareto_front,
)
from search_spaces.statistics.pooling import PooledRuns, squares_of_runs

_COLUMNS: Final = tuple(LeaderboardRow.__table__.columns.keys())
_WEIGHED: Final = tuple(f"weighed_{place}" for place in range(1, MAX_OBJECTIVES + 1))
_FRONT_COLUMNS: Final = (
    "campaign_id",
    "trial_id",
    "layout_key",
    "on_front",
    "shortened",
    *_WEIGHED,
)
"""The columns of a row that decide whether it is on the Pareto front."""

_OF_TRIAL: Final = ("id", "layout_key", *KNOB_FIELDS)
_OF_MEASUREMENT: Final = tuple(
    dict.fromkeys(("shortened", "step_time_s", *OBJECTIVE_FIGURES, *MEASURED_METRICS))
)
"""The fields of a run that its layout's row is computed from, with those of its trial."""

Run = Any
"""A measured trial: an object with the fields `_OF_TRIAL` and `_OF_MEASUREMENT`."""

FrontRow = dict[str, Any]
"""A row by column name, with `_FRONT_COLUMNS` at least."""


def update_rows(session: Session, campaign: Campaign, layout_keys: Collection[str]) -> None:
    """Recomputes the rows of some of a campaign's layouts, and its Pareto front."""
    computed = _computed_rows(session, campaign, layout_keys)
    concerned = or_(LeaderboardRow.layout_key.in_(layout_keys), LeaderboardRow.on_front)
    stored = _stored_rows(session, and_(LeaderboardRow.campaign_id == campaign.id, concerned))
    old = [row for row in stored if row["layout_key"] in layout_keys]
    if old:
        ids = [row["trial_id"] for row in old]
        session.execute(delete(LeaderboardRow).where(LeaderboardRow.trial_id.in_(ids)))
    was_on_front = any(row["on_front"] for row in old)
    if len(computed) == 1 and not was_on_front:
        front = [row for row in stored if row["on_front"]]
        _set_on_front(session, dict.fromkeys(_enter_front(front, computed), False))
    if computed:
        session.execute(insert(LeaderboardRow), computed)
    if was_on_front or len(computed) > 1:
        rows = _stored_rows(session, LeaderboardRow.campaign_id == campaign.id)
        pairs = zip(rows, _front_of(rows), strict=True)
        changed = {row["trial_id"]: new for row, new in pairs if row["on_front"] != new}
        _set_on_front(session, changed)


def rebuild_rows(session: Session, campaign: Campaign) -> None:
    """Replaces all rows of a campaign, whose own row is locked."""
    session.execute(delete(LeaderboardRow).where(LeaderboardRow.campaign_id == campaign.id))
    insert_many(session, LeaderboardRow, _rows_from_measurements(session, campaign))
    campaign.standings_version = STANDINGS_VERSION


def rebuild_campaigns(database: Database, campaign_ids: Iterable[int]) -> int:
    """Rebuilds the rows of campaigns, one transaction each; returns how many of them exist."""
    rebuilt = 0
    for campaign_id in campaign_ids:
        with database.write() as session:
            # Between two statements, 100,000 layouts are computed for seconds.
            lift_limits(session.connection())
            if session.get(Campaign, campaign_id) is None:
                continue  # deleted in the meantime
            rebuild_rows(session, locked_campaign(session, campaign_id))
            rebuilt += 1
    return rebuilt


def rebuild_outdated(database: Database) -> int:
    """Rebuilds the rows that another version computed, or none; returns the number of campaigns.

    Each campaign is a transaction of its own: after an interruption, the next call continues.
    """
    outdated = Campaign.standings_version != STANDINGS_VERSION
    with database.read() as session:
        ids = session.scalars(select(Campaign.id).where(outdated).order_by(Campaign.id)).all()
    rebuild_campaigns(database, ids)
    return len(ids)


def campaigns_with_wrong_rows(database: Database) -> list[tuple[int, str]]:
    """Ids and names of the campaigns whose rows differ from their measurements."""
    with database.read() as session:
        ids = session.scalars(select(Campaign.id).order_by(Campaign.id)).all()
    wrong = []
    for campaign_id in ids:
        with database.read() as session:
            lift_limits(session.connection())
            campaign = session.get(Campaign, campaign_id)
            if campaign is not None and not _is_right(session, campaign):
                wrong.append((campaign.id, campaign.name))
    return wrong


@dataclass(slots=True)
class FirstRuns:
    """Rows of layouts that are measured for the first time, for many outcomes in one transaction.

    Nearly every outcome is of this kind. Its row follows from the outcome alone, so that only the
    fronts of the campaigns are read. The rows are equal to those that `update_rows` would write.
    """

    _computed: defaultdict[int, list[FrontRow]] = field(default_factory=lambda: defaultdict(list))
    """Rows to be written, by campaign."""

    def add(self, campaign: Campaign, trial: Trial, measured: Measurement) -> None:
        """Adds the only run of a layout, unless it is not ranked."""
        allowed = campaign.max_peak_memory_bytes
        is_left_out = measured.oversubscribed or trial.num_layers is not None  # a cheap probe
        if is_left_out or not (allowed is None or measured.peak_memory_bytes <= allowed):
            return
        run = SimpleNamespace(
            **{name: getattr(trial, name) for name in _OF_TRIAL},
            **{name: getattr(measured, name) for name in _OF_MEASUREMENT},
        )
        timed = [i.step_time_s for i in measured.iterations if i.kind == "timed"]
        self._computed[campaign.id].append(_row_of_runs(campaign, [run], {trial.id: timed}))

    def write(self, session: Session) -> None:
        """Writes the rows and updates the fronts."""
        if not self._computed:
            return
        fronts: defaultdict[int, list[FrontRow]] = defaultdict(list)
        in_campaigns = LeaderboardRow.campaign_id.in_(self._computed)
        for row in _stored_rows(session, and_(in_campaigns, LeaderboardRow.on_front)):
            fronts[row["campaign_id"]].append(row)
        dominated: list[int] = []
        for campaign_id, computed in self._computed.items():
            dominated += _enter_front(fronts[campaign_id], computed)
        _set_on_front(session, dict.fromkeys(dominated, False))
        rows = [row for computed in self._computed.values() for row in computed]
        insert_many(session, LeaderboardRow, rows)
        self._computed.clear()


def ranked(campaign_id: int) -> ColumnElement[bool]:
    """Selects the trials that a campaign ranks; trials are joined with their measurements."""
    bound = select(Campaign.max_peak_memory_bytes).where(Campaign.id == campaign_id)
    allowed = bound.scalar_subquery()
    return and_(
        completed(campaign_id),
        or_(allowed.is_(None), MeasurementRow.peak_memory_bytes <= allowed),
    )


def completed(campaign_id: int) -> ColumnElement[bool]:
    """Selects the trials that a campaign would rank without its constraints."""
    # The trial of a measurement with wrong losses is not COMPLETED; its measurement is kept.
    return and_(
        MeasurementRow.campaign_id == campaign_id,
        MeasurementRow.oversubscribed.is_(False),
        Trial.state == "COMPLETED",
        Trial.num_layers.is_(None),  # a cheap probe is not ranked
        has_ranked_tokens(campaign_id),
    )


def has_ranked_tokens(campaign_id: int) -> ColumnElement[bool]:
    """Selects measurements with counted tokens, or all where the campaign has none of those."""
    counted = aliased(MeasurementRow)
    is_counted_elsewhere = exists(literal_column("1")).where(
        counted.campaign_id == campaign_id, counted.tokens == "counted"
    )
    return or_(MeasurementRow.tokens == "counted", ~is_counted_elsewhere)


def unranked_by_counting(session: Session, campaign_id: int) -> set[str]:
    """Keys of ranked layouts with assumed tokens: a counted measurement takes them off."""
    query = (
        select(LeaderboardRow.layout_key)
        .join(MeasurementRow, MeasurementRow.trial_id == LeaderboardRow.trial_id)
        .where(LeaderboardRow.campaign_id == campaign_id, MeasurementRow.tokens == "assumed")
    )
    return set(session.scalars(query))


def _rows_from_measurements(session: Session, campaign: Campaign) -> list[FrontRow]:
    """All rows of a campaign, computed from its measurements."""
    computed = _computed_rows(session, campaign, None)
    for row, is_on_front in zip(computed, _front_of(computed), strict=True):
        row["on_front"] = is_on_front
    return computed


def _computed_rows(
    session: Session, campaign: Campaign, layout_keys: Collection[str] | None
) -> list[FrontRow]:
    """Computes rows of layouts (None: of all) in the order of first runs, off the front."""
    query = (
        select(
            *(getattr(Trial, name) for name in _OF_TRIAL),
            *(getattr(MeasurementRow, name) for name in _OF_MEASUREMENT),
        )
        .join(MeasurementRow, MeasurementRow.trial_id == Trial.id)
        .where(ranked(campaign.id))
        .order_by(Trial.id)
    )
    if layout_keys is not None:
        query = query.where(Trial.campaign_id == campaign.id, Trial.layout_key.in_(layout_keys))
    of_layout: defaultdict[str, list[Run]] = defaultdict(list)
    for run in session.execute(query).all():
        of_layout[run.layout_key].append(run)
    # Shortened runs count only where a layout has no other.
    counting = [[run for run in runs if not run.shortened] or runs for runs in of_layout.values()]
    ids = None if layout_keys is None else [run.id for runs in counting for run in runs]
    timed = _timed_iterations(session, campaign.id, ids)
    return [_row_of_runs(campaign, runs, timed) for runs in counting]


def _timed_iterations(
    session: Session, campaign_id: int, trial_ids: Collection[int] | None
) -> Mapping[int, Sequence[float]]:
    """The timed step times of trials (None: of all trials of the campaign), by trial."""
    query = select(IterationRow.trial_id, IterationRow.step_time_s).where(
        IterationRow.kind == "timed"
    )
    if trial_ids is None:
        query = query.join(MeasurementRow, MeasurementRow.trial_id == IterationRow.trial_id).where(
            MeasurementRow.campaign_id == campaign_id
        )
    else:
        query = query.where(IterationRow.trial_id.in_(trial_ids))
    found: defaultdict[int, list[float]] = defaultdict(list)
    for trial_id, seconds in session.execute(query):
        found[trial_id].append(seconds)
    return found


def _row_of_runs(
    campaign: Campaign, runs: Sequence[Run], timed: Mapping[int, Sequence[float]]
) -> FrontRow:
    """The row of a layout from its runs that count; `on_front` is not decided yet."""
    first = runs[0]
    times_s = [run.step_time_s for run in runs]
    step_time_s = median(times_s)
    # An imported measurement may have a step time and no iterations.
    pooled = PooledRuns.of([timed.get(run.id) or [run.step_time_s] for run in runs])
    # Every objective that ranks is a rate.
    values: dict[str, float] = {
        name: cast("float", measured_objective(name, first, num_nodes=first.num_nodes))
        * (first.step_time_s / step_time_s)
        for name in OBJECTIVES
    }
    return {
        "trial_id": first.id,
        "campaign_id": campaign.id,
        "layout_key": first.layout_key,
        "num_runs": len(runs),
        "shortened": first.shortened,
        "step_time_s": step_time_s,
        "value": values[campaign.objective],
        **values,
        "log_step_time_s": pooled.log_s,
        "iterations_variance": pooled.variance,
        "iterations_dof": pooled.dof,
        "runs_squares": squares_of_runs(times_s),
        **dict.fromkeys(_WEIGHED),
        **dict(zip(_WEIGHED, _pooled_objectives(campaign, runs), strict=False)),
        "on_front": False,
        **{name: getattr(first, name) for name in KNOB_FIELDS},
        **{column: getattr(first, name) for name, column in MEASURED_METRICS.items()},
    }


def _pooled_objectives(campaign: Campaign, runs: Sequence[Run]) -> list[float | None]:
    """The campaign's objectives of a layout: rates at its median step time, else the median."""
    names = objectives_of(campaign.spec)
    memory = (
        campaign.spec["cluster"].get("device_memory_bytes") if MEMORY_HEADROOM in names else None
    )
    values = [
        [
            measured_objective(name, run, num_nodes=run.num_nodes, device_memory_bytes=memory)
            for name in names
        ]
        for run in runs
    ]
    if len(runs) == 1:
        return values[0]
    times_longer = np.median([run.step_time_s for run in runs]) / runs[0].step_time_s
    known = np.array(values, dtype=np.float64)
    is_rate = [name in OBJECTIVES for name in names]
    pooled = np.where(is_rate, known[0] / times_longer, np.median(known, axis=0))
    return [None if np.isnan(value) else float(value) for value in pooled]


def _stored_rows(session: Session, condition: ColumnElement[bool]) -> list[FrontRow]:
    columns = [getattr(LeaderboardRow, name) for name in _FRONT_COLUMNS]
    query = select(*columns).where(condition)
    return [row._asdict() for row in session.execute(query)]


def _front_of(rows: Sequence[FrontRow]) -> list[bool]:
    """Which rows no other dominates; shortened ones count only where all are shortened."""
    is_any_full = any(not row["shortened"] for row in rows)
    candidates = [place for place, row in enumerate(rows) if not (is_any_full and row["shortened"])]
    is_on_front = [False] * len(rows)
    if candidates:
        weighed = [[rows[place][name] for name in _WEIGHED] for place in candidates]
        values = np.array(weighed, dtype=np.float64)
        for place, is_front in zip(candidates, pareto_front(values), strict=True):
            is_on_front[place] = bool(is_front)
    return is_on_front


def _enter_front(front: Sequence[FrontRow], computed: Sequence[FrontRow]) -> list[int]:
    """Sets `on_front` of new rows; returns the trial ids of stored rows that they dominate.

    Args:
        front: the stored rows that are on the front.
        computed: the new rows.
    """
    candidates = list(front)
    for new in computed:
        candidates.append(new)
        for row, is_on_front in zip(candidates, _front_of(candidates), strict=True):
            row["on_front"] = is_on_front
        candidates = [row for row in candidates if row["on_front"]]
    return [row["trial_id"] for row in front if not row["on_front"]]


def _set_on_front(session: Session, on_front: Mapping[int, bool]) -> None:
    if on_front:
        session.execute(
            update(LeaderboardRow),
            [{"trial_id": id_, "on_front": is_on} for id_, is_on in on_front.items()],
        )


def _is_right(session: Session, campaign: Campaign) -> bool:
    query = select(*LeaderboardRow.__table__.columns)
    stored = {
        row.trial_id: row._asdict()
        for row in session.execute(query.where(LeaderboardRow.campaign_id == campaign.id))
    }
    computed = {row["trial_id"]: row for row in _rows_from_measurements(session, campaign)}
    return stored.keys() == computed.keys() and all(
        _agree(stored[id_], computed[id_]) for id_ in computed
    )


def _agree(stored: FrontRow, computed: FrontRow) -> bool:
    # To the last digits only: the logarithm of another machine may differ there.
    return all(
        math.isclose(stored[name], computed[name], rel_tol=1e-12)
        if isinstance(computed[name], float) and isinstance(stored[name], float)
        else stored[name] == computed[name]
        for name in _COLUMNS
    )
