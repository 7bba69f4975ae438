"""Reads the runs that a leaderboard is computed from, and their iterations."""

from __future__ import annotations

from collections import defaultdict, namedtuple
from collections.abc import Sequence
from typing import Any, Final, cast

from sqlalchemy import Integer, and_, bindparam, or_, select
from sqlalchemy.orm import Session, aliased

from layout_tuner.protocol.metrics import METRICS
from layout_tuner.results_db.leaderboard.rank_layouts import DevicePeaks, Run, TimedIterations
from layout_tuner.results_db.models.tables import Campaign, IterationRow, MeasurementRow, Trial
from layout_tuner.results_db.rows import in_parts
from layout_tuner.results_db.trials.filter import KNOB_FIELDS
from layout_tuner.results_db.trials.filter_sql import IS_DISTURBED, has_ranked_tokens
from layout_tuner.search_spaces.objectives import OBJECTIVE_FIGURES

_OF_TRIAL: Final = ("id", "number", "ended_seq", "layout_key", "node", "job", *KNOB_FIELDS)
_OF_MEASUREMENT: Final = tuple(
    dict.fromkeys(
        (
            "shortened",
            "step_time_s",
            "hfu",
            "others_share",
            "throttled",
            *OBJECTIVE_FIGURES,
            *(name for name, metric in METRICS.items() if metric.is_measured),
        )
    )
)
RUN_FIELDS: Final = (*_OF_TRIAL, *_OF_MEASUREMENT)
"""Fields of a run: columns of its trial and of its measurement. They are what layouts are ranked,
filtered and sorted by."""

_EARLIER_CAMPAIGNS: Final = 20
"""Campaigns whose repeats tell how far runs differ: a machine changes over the years."""

_Run: Any = cast("Any", namedtuple)("Run", RUN_FIELDS)


_CAMPAIGN: Final = bindparam("campaign", type_=Integer)
_RUNS: Final = (
    select(
        *(getattr(Trial, name) for name in _OF_TRIAL),
        *(getattr(MeasurementRow, name) for name in _OF_MEASUREMENT),
    )
    .join(MeasurementRow, MeasurementRow.trial_id == Trial.id)
    .where(
        Trial.campaign_id == _CAMPAIGN,
        MeasurementRow.oversubscribed.is_(False),
        # The trial of a measurement with wrong losses is not COMPLETED; its measurement is kept.
        Trial.state == "COMPLETED",
        Trial.num_layers.is_(None),  # a cheap probe is not ranked
        has_ranked_tokens(_CAMPAIGN),
    )
    .order_by(Trial.id)
)


def measured_runs(session: Session, campaign_id: int) -> list[Run]:
    """The runs that a campaign would rank without its constraints, the oldest first."""
    # The connection returns rows of columns sooner than the session, which expects objects in them,
    # and all rows at once sooner than one by one.
    rows = session.connection().execute(_RUNS, {"campaign": campaign_id}).all()
    return list(map(_Run._make, rows))


def differing_peaks(session: Session, campaign_id: int) -> DevicePeaks:
    """The largest peak of each precision whose runs have different ones.

    Workers measure the peaks of devices without a known one. Other load lowers what they measure,
    and nothing raises it.
    """
    peak = [getattr(MeasurementRow, name) for name in ("peak_tflops_per_device", "peak_source")]
    query = (
        select(Trial.precision, *peak)
        .join(MeasurementRow, MeasurementRow.trial_id == Trial.id)
        .where(Trial.campaign_id == campaign_id, Trial.state == "COMPLETED", peak[0].is_not(None))
        .distinct()
    )
    found: defaultdict[str, list[tuple[float, str]]] = defaultdict(list)
    for precision, tflops, source in session.execute(query):
        found[precision].append((tflops, source))
    return {precision: max(peaks) for precision, peaks in found.items() if len(peaks) > 1}


def timed_iterations(session: Session, trial_ids: Sequence[int]) -> TimedIterations:
    found: defaultdict[int, list[float]] = defaultdict(list)
    for some in in_parts(trial_ids):
        query = (
            select(IterationRow.trial_id, IterationRow.step_time_s)
            .where(IterationRow.trial_id.in_(some), IterationRow.kind == "timed")
            .order_by(IterationRow.trial_id, IterationRow.index)
        )
        for trial_id, seconds in session.execute(query):
            found[trial_id].append(seconds)
    return found


def earlier_repeats(session: Session, campaign_id: int) -> list[list[float]]:
    """Step times in seconds of layouts that earlier campaigns ran more than once, by layout.

    Those are the newest campaigns on the same cluster with the same trainer that had ended when
    this one was created.
    """
    this = aliased(Campaign)
    earlier = (
        select(Campaign.id)
        .join(
            this,
            and_(
                Campaign.cluster_name == this.cluster_name,
                Campaign.trainer == this.trainer,
                Campaign.ended_at <= this.created_at,
                Campaign.id != this.id,
            ),
        )
        .where(this.id == campaign_id)
        .order_by(Campaign.ended_at.desc())
        .limit(_EARLIER_CAMPAIGNS)
    )
    ids = session.scalars(earlier).all()
    repeats = select(Trial.repeat_of).where(Trial.campaign_id.in_(ids), Trial.repeat_index > 0)
    query = (
        select(Trial.campaign_id, Trial.layout_key, MeasurementRow.step_time_s)
        .join(MeasurementRow, MeasurementRow.trial_id == Trial.id)
        .where(
            Trial.campaign_id.in_(ids),
            or_(Trial.repeat_index > 0, Trial.id.in_(repeats)),
            Trial.state == "COMPLETED",
            Trial.num_layers.is_(None),
            MeasurementRow.oversubscribed.is_(False),
            MeasurementRow.shortened.is_(False),
            ~IS_DISTURBED,
        )
        .order_by(Trial.id.desc())
    )
    found: defaultdict[tuple[int, str], list[float]] = defaultdict(list)
    for campaign, layout_key, seconds in session.execute(query) if ids else ():
        found[campaign, layout_key].append(seconds)
    return list(found.values())
