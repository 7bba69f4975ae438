"""Whether a measurement's losses are those of everybody else, told without reading everybody else.

Nearly always they are: then nothing is to be judged, however many trials the campaign has. All that a
batch size and precision have measured is of one kin as long as nothing was off, and comparing with its
first trial is enough. Anything else is `results_db.divergence`'s to judge.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from threading import Lock
from typing import Any, Final, cast

from sqlalchemy import bindparam, exists, func, literal_column, select
from sqlalchemy.orm import Session, aliased

from results_db.models import Campaign, IterationRow, MeasurementRow, Trial
from search_spaces.layout import Precision
from search_spaces.losses import first_difference
from search_spaces.outcome import Iteration, IterationKind, Measurement

Group = tuple[int, str, int]
"""Campaign, precision and global batch size: what trains the same."""


MAX_KNOWN: Final = 50_000
"""Iterations that a process remembers: of a few thousand groups, or of a few with very long probes."""


class KnownLosses:
    """The losses of trials that others are compared with: what a trial has measured never changes.

    A database that is set back under a running process (its server's own restore, a failover) may give an id
    again; whoever does that starts the service anew. For any number of threads.
    """

    def __init__(self) -> None:
        self._known: dict[int, Sequence[Iteration]] = {}
        self._lock = Lock()

    def of(self, session: Session, trial_ids: Collection[int]) -> dict[int, Sequence[Iteration]]:
        """The iterations of trials, in order; a trial without any is left out."""
        with self._lock:
            found = {id_: self._known[id_] for id_ in trial_ids if id_ in self._known}
        missing = [id_ for id_ in trial_ids if id_ not in found]
        if missing:
            read = _losses(session, missing)
            found |= read
            self._remember(read)
        return found

    def _remember(self, read: Mapping[int, Sequence[Iteration]]) -> None:
        num_read = sum(map(len, read.values()))
        if num_read > MAX_KNOWN:
            return
        with self._lock:
            if num_read + sum(map(len, self._known.values())) > MAX_KNOWN:
                self._known.clear()
            self._known |= read

    @property
    def num_known(self) -> int:
        """Iterations that are remembered."""
        with self._lock:
            return sum(map(len, self._known.values()))


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
    def of(cls, session: Session, campaign_ids: Collection[int], known: KnownLosses) -> Kinship:
        """What is known of these campaigns, which are locked."""
        found = cls()
        rows = session.execute(_kins(), {_CAMPAIGN_IDS: list(campaign_ids)})
        for campaign_id, kin, precision, batch, is_untold in rows:
            if is_untold:
                found._untold.add(campaign_id)
            if kin is not None:
                group = (campaign_id, precision, batch)
                if found._first.setdefault(group, kin) != kin:
                    found._doubtful.add(group)
        found._losses = known.of(session, found._first.values())
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


_CAMPAIGN_IDS: Final = "campaign_ids"


@cache
def _kins() -> Any:
    """The kins of campaigns, each found from the one before by an index: there are few of them."""
    own = aliased(MeasurementRow)
    smallest = select(func.min(own.kin)).where(own.campaign_id == Campaign.id)
    kins = (
        select(Campaign.id.label("campaign_id"), smallest.scalar_subquery().label("kin"))
        .where(Campaign.id.in_(bindparam(_CAMPAIGN_IDS, expanding=True)))
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


def _losses(session: Session, trial_ids: Collection[int]) -> Mapping[int, Sequence[Iteration]]:
    found: defaultdict[int, list[Iteration]] = defaultdict(list)
    columns = (
        IterationRow.trial_id,
        IterationRow.index,
        IterationRow.kind,
        IterationRow.step_time_s,
        IterationRow.loss,
        IterationRow.grad_norm,
    )
    query = (
        select(*columns)
        .where(IterationRow.trial_id.in_(trial_ids))
        .order_by(IterationRow.trial_id, IterationRow.index)
    )
    for trial_id, index, kind, step_time_s, loss, grad_norm in session.execute(query):
        found[trial_id].append(
            Iteration(
                index=index,
                kind=cast("IterationKind", kind),
                step_time_s=step_time_s,
                loss=loss,
                grad_norm=grad_norm,
            )
        )
    return found
