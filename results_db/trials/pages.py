"""Pages of trials, sorted by any key, correct while trials are added and end.

A page continues after the last trial of the page before (its value and id), not after a number of
rows, so that added trials shift nothing. A list has two parts: the trials with a value of the key,
in its order, then those without one, in the order of their ids. A trial stays in its part from page
to page, since the list is as of its first page (`PageEnd.ended_seq`): each trial that existed then
is listed exactly once. One exception: a trial whose losses are judged again meanwhile may be listed
twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Self, cast

from sqlalchemy import ColumnElement, Integer, Select, and_, func, or_, select
from sqlalchemy import cast as sql_cast
from sqlalchemy.orm import Session

from layout_tuner.protocol.metrics import METRICS
from layout_tuner.results_db.database.store_base import StoreSection
from layout_tuner.results_db.models.tables import Campaign, MeasurementRow, Trial
from layout_tuner.results_db.records import TrialRecord
from layout_tuner.results_db.rows import trials_by_id
from layout_tuner.results_db.trials.filter import (
    BY_NUMBER,
    EVERY_TRIAL,
    KNOWN_AT_THE_END,
    PageEnd,
    TrialFilter,
    TrialOrder,
    job_knob_name,
)
from layout_tuner.results_db.trials.filter_sql import (
    conditions,
    job_sort_number,
    knob_number,
    metric_column,
)

MAX_COUNTED: Final = 10_000
"""Most trials of a list that are counted."""

_Keyed = tuple[int, float | None]
"""A trial's id, and its value of the key."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialPageRecord:
    """A page of a list of trials."""

    trials: tuple[TrialRecord, ...]
    end: PageEnd | None
    """Where the next page goes on; None on the last."""
    start: PageEnd | None = None
    """Where the previous page ends; None on the first."""


class TrialPages(StoreSection):
    """The store's methods for pages of trials."""

    def page(
        self,
        campaign_id: int,
        *,
        wanted: TrialFilter = EVERY_TRIAL,
        order: TrialOrder = BY_NUMBER,
        after: PageEnd | None = None,
        before: PageEnd | None = None,
        limit: int,
    ) -> TrialPageRecord:
        """A page of the campaign's trials.

        It is after the `end` of one page, or before the `start` of another; the first page without
        both.
        """
        edge = after or before
        with self._db.read() as session:
            if edge is None:
                query = select(Campaign.last_ended_seq).where(Campaign.id == campaign_id)
                ended_seq = session.scalar(query) or 0
            else:
                ended_seq = edge.ended_seq
            of_list = _TrialList.read(session, campaign_id, wanted, order, ended_seq)
            # One more than requested, to see whether the list goes on.
            if before is None:
                found = _find(session, of_list, after, limit + 1)
                page, has_next, has_previous = found[:limit], len(found) > limit, after is not None
            else:
                found = _find_before(session, of_list, before, limit + 1)
                page, has_next, has_previous = found[-limit:], True, len(found) > limit
            trials = trials_by_id(session, [trial_id for trial_id, _ in page])

        def edge_at(place: int) -> PageEnd:
            trial_id, value = page[place]
            return PageEnd(ended_seq=ended_seq, value=value, trial_id=trial_id)

        return TrialPageRecord(
            # Without those deleted meanwhile.
            trials=tuple(trials[id_] for id_, _ in page if id_ in trials),
            end=edge_at(-1) if page and has_next else None,
            start=edge_at(0) if page and has_previous else None,
        )

    def count(self, campaign_id: int, *, wanted: TrialFilter = EVERY_TRIAL) -> tuple[int, bool]:
        """The number of the campaign's trials that pass a filter, and whether it is exact.

        Counting stops at `MAX_COUNTED`: if the number is not exact, there are more.
        """
        with self._db.read() as session:
            query = select(Trial.id).where(
                Trial.campaign_id == campaign_id, *conditions(session, campaign_id, wanted)
            )
            if wanted.needs_measurement:
                query = query.join(MeasurementRow, MeasurementRow.trial_id == Trial.id)
            some = query.limit(MAX_COUNTED + 1).subquery()
            found = session.scalar(select(func.count()).select_from(some)) or 0
        return min(found, MAX_COUNTED), found <= MAX_COUNTED


@dataclass(frozen=True, slots=True)
class _TrialList:
    """The two parts of a list, as queries for ids and values."""

    campaign_id: int
    wanted: TrialFilter
    order: TrialOrder
    ended_seq: int
    conditions: list[ColumnElement[bool]]
    """Of the filter."""
    _key: ColumnElement[Any]
    """The sort key in SQL: always a number, since databases order words differently."""

    @classmethod
    def read(
        cls,
        session: Session,
        campaign_id: int,
        wanted: TrialFilter,
        order: TrialOrder,
        ended_seq: int,
    ) -> Self:
        """The list, after a look at what jobs a campaign has where they are asked about."""
        key = order.key
        if key in METRICS:
            column = metric_column(key)
        elif job_knob_name(key):
            column = job_sort_number(session, campaign_id, key)
        elif key == "ended_at":
            column = cast("ColumnElement[Any]", Trial.ended_seq)
        else:
            column = knob_number(key, getattr(Trial, key))
        of_filter = conditions(session, campaign_id, wanted)
        return cls(campaign_id, wanted, order, ended_seq, of_filter, column)

    @property
    def has_valueless(self) -> bool:
        """Whether trials may lack a value of the key."""
        return self.order.key in KNOWN_AT_THE_END

    def valued(self, edge: PageEnd | None, *, backward: bool = False) -> Select[*tuple[Any, ...]]:
        """The trials with a value, after the end of a page; backward: before its start."""
        query = select(Trial.id, self._key).where(
            Trial.campaign_id == self.campaign_id, *self.conditions
        )
        if self._needs_measurement:
            query = query.join(MeasurementRow, MeasurementRow.trial_id == Trial.id).where(
                MeasurementRow.campaign_id == self.campaign_id
            )
        if self.has_valueless:
            query = query.where(self._key.is_not(None), Trial.ended_seq <= self.ended_seq)
        if edge is not None:
            query = query.where(self._is_beyond(edge, backward=backward))
        key = self._key.desc() if self.order.descending != backward else self._key.asc()
        return query.order_by(key, Trial.id.desc() if backward else Trial.id)

    def valueless(self, edge_id: int, *, backward: bool = False) -> Select[*tuple[Any, ...]]:
        """The trials without a value, now or when the first page was read; see `valued`."""
        query = select(Trial.id, sql_cast(None, Integer)).where(
            Trial.campaign_id == self.campaign_id,
            Trial.id < edge_id if backward else Trial.id > edge_id,
            *self.conditions,
        )
        has_none = [Trial.ended_seq.is_(None), Trial.ended_seq > self.ended_seq]
        if self._needs_measurement:
            query = query.outerjoin(MeasurementRow, MeasurementRow.trial_id == Trial.id)
            has_none.append(self._key.is_(None))
        return query.where(or_(*has_none)).order_by(Trial.id.desc() if backward else Trial.id)

    @property
    def _needs_measurement(self) -> bool:
        return self.order.key in METRICS or self.wanted.needs_measurement

    def _is_beyond(self, edge: PageEnd, *, backward: bool) -> ColumnElement[bool]:
        is_smaller = self.order.descending != backward
        beyond = self._key < edge.value if is_smaller else self._key > edge.value
        # The first condition follows from the second; with it, an index finds the start.
        reached = self._key <= edge.value if is_smaller else self._key >= edge.value
        is_beyond_among_equals = Trial.id < edge.trial_id if backward else Trial.id > edge.trial_id
        return and_(reached, or_(beyond, is_beyond_among_equals))


def _find(session: Session, of_list: _TrialList, after: PageEnd | None, limit: int) -> list[_Keyed]:
    found: list[_Keyed] = []
    if after is None or after.value is not None:
        found = _rows(session, of_list.valued(after).limit(limit))
    missing = limit - len(found)
    if missing and of_list.has_valueless:
        after_id = after.trial_id if after is not None and after.value is None else 0
        found += _rows(session, of_list.valueless(after_id).limit(missing))
    return found


def _find_before(
    session: Session, of_list: _TrialList, before: PageEnd, limit: int
) -> list[_Keyed]:
    """The last trials before the start of a page, in the order of the list."""
    found: list[_Keyed] = []
    is_valued = before.value is not None
    if not is_valued:
        query = of_list.valueless(before.trial_id, backward=True)
        found = _rows(session, query.limit(limit))
    if len(found) < limit:
        query = of_list.valued(before if is_valued else None, backward=True)
        found += _rows(session, query.limit(limit - len(found)))
    return found[::-1]


def _rows(session: Session, query: Select[*tuple[Any, ...]]) -> list[_Keyed]:
    return [(trial_id, value) for trial_id, value in session.execute(query)]
