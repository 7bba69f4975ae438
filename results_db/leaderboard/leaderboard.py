"""The leaderboards of campaigns, as the store reads them.

A leaderboard is computed from the campaign's measured runs (`measured_runs.py`) by a pure function
(`rank_layouts.py`). Lists of it are filtered and sorted in `filter_and_sort.py`. The trials of the
layouts on a page, and the iterations that their intervals need, are read for that page.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from statistics import median
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from layout_tuner.results_db.database.locks import FOR_CHANGE
from layout_tuner.results_db.database.retry import retried
from layout_tuner.results_db.errors import CampaignNotFoundError
from layout_tuner.results_db.leaderboard.filter_and_sort import listed_layouts, reader, sort_key
from layout_tuner.results_db.leaderboard.intervals import Intervals
from layout_tuner.results_db.leaderboard.leaderboard_memo import LeaderboardSection
from layout_tuner.results_db.leaderboard.leaderboard_records import (
    KnobCell,
    KnobValues,
    PageOfLayouts,
    RankedLayout,
    RankedSummary,
    Winner,
)
from layout_tuner.results_db.leaderboard.rank_layouts import Leaderboard, MeasuredLayout, Run
from layout_tuner.results_db.models.tables import Campaign, Import, Trial
from layout_tuner.results_db.records import CampaignRecord, TrialRecord
from layout_tuner.results_db.rows import record_of, trials_by_id
from layout_tuner.results_db.trials.filter import (
    KNOB_FIELDS,
    WHOLE,
    LeaderboardListing,
)
from layout_tuner.results_db.trials.filter_sql import job_knobs_of
from layout_tuner.results_db.trials.job_values import NO_KNOBS, Knobs
from layout_tuner.search_spaces.layouts.job_settings import JOB_PREFIX
from layout_tuner.search_spaces.layouts.layout import KNOBS, Layout


class Leaderboards(LeaderboardSection):
    """The store's methods for leaderboards; without an objective, the campaign's own ranks."""

    def ranked_layouts(
        self,
        campaign_id: int,
        objective: str | None = None,
        *,
        listing: LeaderboardListing = WHOLE,
        limit: int | None = None,
        offset: int = 0,
    ) -> list[RankedLayout]:
        """The layouts that the campaign measured, the best first; of equal ones, the earlier one.

        Repeats of a layout are pooled. Measurements are not ranked if they are oversubscribed
        (their ranks shared devices) or break the campaign's constraints. A layout that was stopped
        early is first only if none was measured in full. A campaign that does not exist has no
        layouts.
        """
        try:
            page = self.page_of_layouts(
                campaign_id, objective, listing=listing, limit=limit, offset=offset
            )
        except CampaignNotFoundError:
            return []
        return list(page.layouts)

    def page_of_layouts(
        self,
        campaign_id: int,
        objective: str | None = None,
        *,
        listing: LeaderboardListing = WHOLE,
        limit: int | None,
        offset: int = 0,
    ) -> PageOfLayouts:
        """The same layouts as `ranked_layouts`, with what a page shows above them."""
        with self._db.read() as session:
            board = self._board(session, campaign_id, objective)
            listed = _listed(session, campaign_id, board, listing)
            page = listed[offset : None if limit is None else offset + limit]
            return PageOfLayouts(
                layouts=_ranked_layouts(session, campaign_id, board, page),
                front=board.front.keys(),
                total=len(listed),
                constrained=board.num_constrained,
                source=session.scalar(
                    select(Import.source).where(Import.campaign_id == campaign_id)
                ),
            )

    def ranked_layout(self, campaign: CampaignRecord, layout: Layout) -> RankedLayout | None:
        """A layout by the campaign's own objective; None: it is not ranked."""
        read = attrgetter(*KNOBS, "job")
        with self._db.read() as session:
            board = self._board(session, campaign.id, campaign.objective)
            same = [each for each in board.layouts if read(each.first) == read(layout)]
            found = _ranked_layouts(session, campaign.id, board, same[:1])
        return found[0] if found else None

    def rank_of(self, campaign_id: int, trial_id: int, objective: str | None = None) -> int | None:
        """The rank of a trial's layout on the whole leaderboard, from 1.

        The trial may be any of the layout, also a repeat.

        Returns:
            None: the layout is not ranked, or the campaign has no such trial.
        """
        key = select(Trial.layout_key).where(Trial.id == trial_id, Trial.campaign_id == campaign_id)
        with self._db.read() as session:
            found = self._board(session, campaign_id, objective).find(session.scalar(key) or "")
            return None if found is None else found.rank

    def tied_layouts(
        self, campaign_id: int, objective: str | None = None, *, among: int
    ) -> list[RankedLayout]:
        """The first layout, and those of the first `among` that cannot be told apart from it."""
        with self._db.read() as session:
            board = self._board(session, campaign_id, objective)
            best = board.layouts[:among]
            intervals = Intervals.read(session, campaign_id, board, best)
            tied = [each for each in best if intervals.is_tied(each)]
            return _ranked_layouts(session, campaign_id, board, tied)

    def winner(self, campaign_id: int, objective: str | None = None) -> RankedLayout | None:
        """The best layout that was measured in full; None while there is none."""
        first = self.ranked_layouts(campaign_id, objective, limit=1)
        return first[0] if first and not first[0].shortened else None

    def winners(self, campaign_ids: Collection[int]) -> dict[int, Winner]:
        """The winners of campaigns by their own objectives, by the ids of those that have one."""
        with self._db.read() as session:
            boards = self._boards(session, campaign_ids)
        winners = {id_: board.winner for id_, board in boards.items() if board.winner is not None}
        return {
            id_: record_of(
                Winner, best, trial_number=best.first.number, layout_key=best.first.layout_key
            )
            for id_, best in winners.items()
        }

    def to_beat(self, campaign_id: int) -> float | list[list[float | None]] | None:
        """Computes `Campaign.to_beat`; None also where there is no such campaign."""
        with self._db.read() as session:
            return self._to_beat(session, campaign_id)

    def write_to_beat(self, campaign_ids: Collection[int]) -> None:
        """Computes and stores `Campaign.to_beat` of some campaigns."""
        for campaign_id in sorted(campaign_ids):
            # Ranks the layouts before the lock is taken: others may wait for it.
            self.to_beat(campaign_id)
            self._write_to_beat(campaign_id)

    @retried
    def _write_to_beat(self, campaign_id: int) -> None:
        with self._db.write() as session:
            # Under the campaign's lock no trial ends. Of several services that write, the last one
            # has read the last end: the leaderboard is that of the campaign's `last_ended_seq`.
            campaign = session.get(Campaign, campaign_id, with_for_update=FOR_CHANGE)
            if campaign is not None:  # it has not been deleted
                campaign.to_beat = self._to_beat(session, campaign_id)

    def _to_beat(
        self, session: Session, campaign_id: int
    ) -> float | list[list[float | None]] | None:
        board = self._boards(session, [campaign_id]).get(campaign_id)
        if board is None or board.winner is None:
            return None
        front = [list(objectives) for objectives in board.front.values()]
        if len(front[0]) > 1:
            return front
        low, _ = Intervals.read(session, campaign_id, board, []).ends(board.winner)
        return low

    def ranked_summary(self, campaign_id: int) -> RankedSummary:
        """The number of ranked layouts, and their median by the campaign's own objective."""
        with self._db.read() as session:
            layouts = self._board(session, campaign_id).layouts
        complete = [each.value for each in layouts if not each.shortened]
        return RankedSummary(
            num_ranked=len(layouts),
            num_shortened=len(layouts) - len(complete),
            median_complete=median(complete) if complete else None,
        )

    def knob_values(self, campaign_id: int, *names: str, knobs: Knobs = NO_KNOBS) -> KnobValues:
        """The values of some knobs among all ranked layouts, with the numbers of layouts.

        Numbers are ascending; words are in the order of the memory that they save, and those of the
        job knobs `knobs` in the order of their values.
        """
        with self._db.read() as session:
            runs = [each.first for each in self._board(session, campaign_id).layouts]
        return {name: _counted(name, knobs, runs) for name in names}

    def constant_knobs(
        self,
        campaign_id: int,
        objective: str | None = None,
        *,
        listing: LeaderboardListing = WHOLE,
        knobs: Knobs = NO_KNOBS,
    ) -> Mapping[str, Any]:
        """The knobs that have one value in all listed layouts, with that value.

        The job knobs `knobs` are looked at too. Of no layouts, no knob is constant.
        """
        with self._db.read() as session:
            board = self._board(session, campaign_id, objective)
            layouts = _listed(session, campaign_id, board, listing)
        runs = [each.first for each in layouts]
        names = (*KNOB_FIELDS, *(JOB_PREFIX + name for name in knobs))
        values = {name: set(map(reader(name, knobs), runs)) for name in names}
        return {name: found.pop() for name, found in values.items() if len(found) == 1}

    def knob_cells(self, campaign_id: int, *names: str, knobs: Knobs = NO_KNOBS) -> list[KnobCell]:
        """All ranked layouts of a campaign by the values of knobs, however many there are."""
        with self._db.read() as session:
            layouts = self._board(session, campaign_id).layouts
        cells: defaultdict[tuple[Any, ...], list[float]] = defaultdict(list)
        readers = [reader(name, knobs) for name in names]
        for each in layouts:
            cells[tuple(read(each.first) for read in readers)].append(each.value)
        return [KnobCell(key, len(values), max(values)) for key, values in cells.items()]


def _listed(
    session: Session, campaign_id: int, board: Leaderboard, listing: LeaderboardListing
) -> Sequence[MeasuredLayout]:
    # A campaign's document is read only where it is needed: it may be long.
    knobs = job_knobs_of(session, campaign_id) if listing.is_about_jobs else NO_KNOBS
    return listed_layouts(board, listing, knobs)


def _counted(name: str, knobs: Knobs, runs: Sequence[Run]) -> Mapping[Any, int]:
    read, number = reader(name, knobs), sort_key(name, knobs)
    counts: Counter[Any] = Counter()
    numbers: dict[Any, Any] = {}
    for run in runs:
        value = read(run)
        counts[value] += 1
        numbers.setdefault(value, number(run))
    return dict(sorted(counts.items(), key=lambda item: numbers[item[0]]))


def _ranked_layouts(
    session: Session, campaign_id: int, board: Leaderboard, layouts: Sequence[MeasuredLayout]
) -> list[RankedLayout]:
    """Records of some layouts of a leaderboard."""
    if not layouts:
        return []
    trials = trials_by_id(session, [each.trial_id for each in layouts])
    intervals = Intervals.read(session, campaign_id, board, layouts)
    found = []
    for each in layouts:
        low, high = intervals.ends(each)
        found.append(
            record_of(
                RankedLayout,
                each,
                trial=_by_peak(trials[each.trial_id], each, board),
                value_low=low,
                value_high=high,
                step_time_low_s=each.step_time_s * each.value / high,
                step_time_high_s=each.step_time_s * each.value / low,
                trial_ids=tuple(run.id for run in each.runs),
                tied_with_first=intervals.is_tied(each),
            )
        )
    return found


def _by_peak(trial: TrialRecord, layout: MeasuredLayout, board: Leaderboard) -> TrialRecord:
    """A trial with mfu and hfu by the peak that all rows of the leaderboard have."""
    measured, peak = trial.measurement, board.peaks.get(trial.layout.precision)
    if peak is None or measured is None or measured.mfu is None:
        return trial
    by_peak = replace(
        measured,
        mfu=layout.first.mfu,
        hfu=layout.first.hfu,
        peak_tflops_per_device=peak[0],
        peak_source=peak[1],
    )
    return replace(trial, measurement=by_peak)
