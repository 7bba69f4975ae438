"""Whether a measurement's losses are those of everybody else, told without reading everybody else.

Nearly always they are: then nothing is to be judged, however many trials the campaign has. All that a
batch size and precision have measured is of one kin as long as nothing was off, and comparing with its
first trial is enough. Anything else is `results_db.divergence`'s to judge.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from sqlalchemy import exists, func, literal_column, select
from sqlalchemy.orm import Session, aliased

from results_db.models import Campaign, IterationRow, MeasurementRow, Trial
from results_db.rows import iteration_value
from search_spaces.layout import Precision
from search_spaces.losses import first_difference
from search_spaces.outcome import Iteration, Measurement

Group = tuple[int, str, int]
"""Campaign, precision and global batch size: what trains the same."""


@dataclass(slots=True)
class Kinship:
    """The kin of the groups that a batch of outcomes belongs to."""

    _first: dict[Group, int] = field(default_factory=dict)
    """The first trial of a group's only kin."""
    _losses: dict[int, Sequence[Iteration]] = field(default_factory=dict)
    _doubtful: set[Group] = field(default_factory=set)
    """Groups with more than one kin."""
    _untold: set[int] = field(default_factory=set)
    """Campaigns with measurements that were never compared."""

    @classmethod
    def of(cls, session: Session, campaign_ids: Collection[int]) -> Kinship:
        """What is known of these campaigns, which are locked."""
        found = cls()
        for campaign_id, kin, precision, batch, is_untold in session.execute(_kins(campaign_ids)):
            if is_untold:
                found._untold.add(campaign_id)
            if kin is not None:
                group = (campaign_id, precision, batch)
                if found._first.setdefault(group, kin) != kin:
                    found._doubtful.add(group)
        found._losses = _losses(session, found._first.values())
        return found

    def kin_of(self, trial: Trial, measurement: Measurement) -> int | None:
        """The kin of a new measurement; None where it is to be judged with the others of its group."""
        group = (trial.campaign_id, trial.precision, trial.global_batch_size)
        if group in self._doubtful or trial.campaign_id in self._untold:
            return None
        first = self._first.setdefault(group, trial.id)
        others = self._losses.setdefault(first, measurement.iterations)
        precision = cast("Precision", trial.precision)
        if first_difference(measurement.iterations, others, precision) is None:
            return first
        self._doubtful.add(group)
        return None


def _kins(campaign_ids: Collection[int]) -> Any:
    """The kins of campaigns, each found from the one before by an index: there are few of them."""
    own = aliased(MeasurementRow)
    smallest = select(func.min(own.kin)).where(own.campaign_id == Campaign.id)
    kins = (
        select(Campaign.id.label("campaign_id"), smallest.scalar_subquery().label("kin"))
        .where(Campaign.id.in_(campaign_ids))
        .cte("kins", recursive=True)
    )
    later = aliased(MeasurementRow)
    following = select(func.min(later.kin)).where(
        later.campaign_id == kins.c.campaign_id, later.kin > kins.c.kin
    )
    kins = kins.union_all(
        select(kins.c.campaign_id, following.scalar_subquery()).where(kins.c.kin.is_not(None))
    )
    untold = exists(literal_column("1")).where(
        MeasurementRow.campaign_id == kins.c.campaign_id, MeasurementRow.kin.is_(None)
    )
    return (
        select(kins.c.campaign_id, kins.c.kin, Trial.precision, Trial.global_batch_size, untold)
        .outerjoin_from(kins, Trial, Trial.id == kins.c.kin)
        .order_by(kins.c.kin)
    )


def _losses(session: Session, trial_ids: Collection[int]) -> dict[int, Sequence[Iteration]]:
    if not trial_ids:
        return {}
    found: defaultdict[int, list[Iteration]] = defaultdict(list)
    query = (
        select(IterationRow)
        .where(IterationRow.trial_id.in_(trial_ids))
        .order_by(IterationRow.trial_id, IterationRow.index)
    )
    for row in session.scalars(query):
        found[row.trial_id].append(iteration_value(row))
    return dict(found)
