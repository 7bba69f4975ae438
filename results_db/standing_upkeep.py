"""Keeps the table of standings: what a campaign's measurements say, layout by layout.

Whoever changes which of a campaign's measurements count calls `keep_standings` in the same transaction,
with the campaign's row locked: whoever reads sees both or neither. An ordinary outcome touches the row of
its own layout, and the front only where the layout is on it or pushes others off.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from statistics import median
from typing import Any, Final, cast

import numpy as np
from sqlalchemy import ColumnElement, Row, and_, delete, insert, or_, select, update
from sqlalchemy.orm import Session

from results_db.models import Campaign, IterationRow, MeasurementRow, Trial
from results_db.rows import objectives_of
from results_db.standing_tables import STANDINGS_VERSION, StandingRow
from search_spaces.objectives import (
    MAX_OBJECTIVES,
    MEMORY_HEADROOM,
    OBJECTIVES,
    measured_objective,
    pareto_front,
)
from search_spaces.pooling import PooledRuns, squares_of_runs

_WEIGHED: Final = tuple(f"weighed_{place}" for place in range(1, MAX_OBJECTIVES + 1))

Iterations = Mapping[int, Sequence[float]]
"""Timed step times by trial."""


def keep_standings(session: Session, campaign: Campaign, layout_keys: Collection[str]) -> None:
    """Brings the rows of some of a campaign's layouts up to date, and its front with them."""
    made = _made(session, campaign, layout_keys)
    there = session.execute(_of_layouts_or_front(campaign.id, layout_keys)).all()
    old = [row for row in there if row.layout_key in layout_keys]
    if old:
        ids = [row.trial_id for row in old]
        session.execute(delete(StandingRow).where(StandingRow.trial_id.in_(ids)))
    was_on_front = any(row.on_front for row in old)
    if len(made) == 1 and not was_on_front:
        made[0]["on_front"] = _joins_front(session, made[0], [row for row in there if row.on_front])
    if made:
        session.execute(insert(StandingRow), made)
    if was_on_front or len(made) > 1:
        _find_front(session, campaign.id)


def rebuild_standings(session: Session, campaign: Campaign) -> None:
    """Makes all rows of a campaign anew; its row is locked."""
    session.execute(delete(StandingRow).where(StandingRow.campaign_id == campaign.id))
    made = standings_of(session, campaign)
    if made:
        session.execute(insert(StandingRow), made)
    campaign.standings_version = STANDINGS_VERSION


def standings_of(session: Session, campaign: Campaign) -> list[dict[str, Any]]:
    """The rows that a campaign's measurements make, whatever is kept."""
    made = _made(session, campaign, None)
    for row, stands in zip(made, front_of([weighed(row) for row in made]), strict=True):
        row["on_front"] = stands
    return made


def ranked(campaign_id: int) -> ColumnElement[bool]:
    """The trials of a campaign, joined with their measurements, that its leaderboard has."""
    bound = select(Campaign.max_peak_memory_bytes).where(Campaign.id == campaign_id)
    allowed = bound.scalar_subquery()
    return and_(
        completed(campaign_id),
        or_(allowed.is_(None), MeasurementRow.peak_memory_bytes <= allowed),
    )


def completed(campaign_id: int) -> ColumnElement[bool]:
    """Those that it would have without the campaign's constraints."""
    # A measurement whose losses are off is kept, and its trial is not COMPLETED.
    return and_(
        MeasurementRow.campaign_id == campaign_id,
        MeasurementRow.oversubscribed.is_(False),
        Trial.state == "COMPLETED",
    )


def _made(
    session: Session, campaign: Campaign, layout_keys: Collection[str] | None
) -> list[dict[str, Any]]:
    """The rows of layouts, None: of all, in the order in which they were first measured; off the front."""
    query = (
        select(
            Trial.id,
            Trial.layout_key,
            Trial.num_nodes,
            MeasurementRow.shortened,
            MeasurementRow.step_time_s,
            MeasurementRow.tokens_per_s,
            MeasurementRow.tokens_per_s_per_device,
            MeasurementRow.model_tflops_per_device,
            MeasurementRow.hardware_tflops_per_device,
            MeasurementRow.peak_memory_bytes,
        )
        .join(MeasurementRow, MeasurementRow.trial_id == Trial.id)
        .where(ranked(campaign.id))
        .order_by(Trial.id)
    )
    if layout_keys is not None:
        query = query.where(Trial.campaign_id == campaign.id, Trial.layout_key.in_(layout_keys))
    of_layout: defaultdict[str, list[Row[Any]]] = defaultdict(list)
    for run in session.execute(query).all():
        of_layout[run.layout_key].append(cast("Row[Any]", run))
    counting = [_counting(runs) for runs in of_layout.values()]
    ids = None if layout_keys is None else [run.id for runs in counting for run in runs]
    timed = _timed_iterations(session, campaign.id, ids)
    return [standing_row(campaign, runs, timed) for runs in counting]


def _counting(runs: Sequence[Row[Any]]) -> list[Row[Any]]:
    """Shortened runs count where a layout has no other."""
    return [run for run in runs if not run.shortened] or list(runs)


def _timed_iterations(
    session: Session, campaign_id: int, trial_ids: Collection[int] | None
) -> Iterations:
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


def standing_row(campaign: Campaign, runs: Sequence[Row[Any]], timed: Iterations) -> dict[str, Any]:
    first = runs[0]
    times_s = [run.step_time_s for run in runs]
    step_time_s = median(times_s)
    # What was measured elsewhere may have a figure and no iterations.
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
    }


def _pooled_objectives(campaign: Campaign, runs: Sequence[Row[Any]]) -> list[float | None]:
    """A campaign's objectives of a layout: rates at its median step time, the median of the rest."""
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


def _of_layouts_or_front(campaign_id: int, layout_keys: Collection[str]) -> Any:
    wanted = or_(StandingRow.layout_key.in_(layout_keys), StandingRow.on_front)
    return select(
        StandingRow.trial_id,
        StandingRow.layout_key,
        StandingRow.on_front,
        StandingRow.shortened,
        *(getattr(StandingRow, name) for name in _WEIGHED),
    ).where(StandingRow.campaign_id == campaign_id, wanted)


Weighed = tuple[bool, tuple[float | None, ...]]
"""Of a layout: whether it was stopped early, and its campaign's objectives."""


def weighed(row: Mapping[str, Any]) -> Weighed:
    return row["shortened"], tuple(row[name] for name in _WEIGHED)


def kept_weighed(row: Row[Any]) -> Weighed:
    return row.shortened, tuple(getattr(row, name) for name in _WEIGHED)


def front_of(layouts: Sequence[Weighed]) -> list[bool]:
    """Which layouts no other beats; what was stopped early does not count while any was not."""
    is_any_full = any(not shortened for shortened, _ in layouts)
    candidates = [
        place for place, (shortened, _) in enumerate(layouts) if not (is_any_full and shortened)
    ]
    stands = [False] * len(layouts)
    if candidates:
        values = np.array([layouts[place][1] for place in candidates], dtype=np.float64)
        for place, is_front in zip(candidates, pareto_front(values), strict=True):
            stands[place] = bool(is_front)
    return stands


def _joins_front(session: Session, new: Mapping[str, Any], front: Sequence[Row[Any]]) -> bool:
    """Whether a layout is on the front; takes off it those that the layout beats."""
    *stand, joins = front_of([*(kept_weighed(row) for row in front), weighed(new)])
    fallen = [row.trial_id for row, stays in zip(front, stand, strict=True) if not stays]
    mark_front(session, dict.fromkeys(fallen, False))
    return joins


def _find_front(session: Session, campaign_id: int) -> None:
    rows = session.execute(_of_layouts(campaign_id)).all()
    stands = front_of([kept_weighed(row) for row in rows])
    pairs = zip(rows, stands, strict=True)
    mark_front(
        session, {row.trial_id: is_front for row, is_front in pairs if row.on_front != is_front}
    )


def _of_layouts(campaign_id: int) -> Any:
    return select(
        StandingRow.trial_id,
        StandingRow.on_front,
        StandingRow.shortened,
        *(getattr(StandingRow, name) for name in _WEIGHED),
    ).where(StandingRow.campaign_id == campaign_id)


def mark_front(session: Session, on_front: Mapping[int, bool]) -> None:
    if on_front:
        session.execute(
            update(StandingRow),
            [{"trial_id": id_, "on_front": stands} for id_, stands in on_front.items()],
        )
