"""Ranked layouts of a campaign by the values of their knobs, for filters, tables and plots."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from results_db.leaderboard.filter_and_sort import knob_number, listed_layouts
from results_db.leaderboard.leaderboard_listing import WHOLE, LeaderboardListing
from results_db.leaderboard.leaderboard_memo import LeaderboardSection
from results_db.leaderboard.rank_layouts import Run
from results_db.trials.filter import KNOB_FIELDS

KnobValues = Mapping[str, Mapping[Any, int]]
"""By knob, each value that occurs, in order, with the number of layouts."""


class KnobCell(NamedTuple):
    """The ranked layouts with some values of knobs."""

    values: tuple[Any, ...]
    """One for each knob."""
    num_layouts: int
    best: float
    """The campaign's own objective of the best of them."""


class KnobCounts(LeaderboardSection):
    """The store's methods for knobs of ranked layouts."""

    def values(self, campaign_id: int, *knobs: str) -> KnobValues:
        """The values of some knobs among all ranked layouts, with the numbers of layouts.

        Numbers are ascending; words are in the order of the memory that they save.
        """
        with self._db.read() as session:
            runs = [each.first for each in self._board(session, campaign_id).layouts]
        return {name: _counted(name, runs) for name in knobs}

    def constant(
        self, campaign_id: int, objective: str | None = None, *, listing: LeaderboardListing = WHOLE
    ) -> Mapping[str, Any]:
        """The knobs that have one value in all listed layouts, with that value.

        Of no layouts, no knob is constant.
        """
        with self._db.read() as session:
            layouts = listed_layouts(self._board(session, campaign_id, objective), listing)
        runs = [each.first for each in layouts]
        values = {name: set(map(attrgetter(name), runs)) for name in KNOB_FIELDS}
        return {name: found.pop() for name, found in values.items() if len(found) == 1}

    def cells(self, campaign_id: int, *knobs: str) -> list[KnobCell]:
        """All ranked layouts of a campaign by the values of knobs, however many there are."""
        with self._db.read() as session:
            layouts = self._board(session, campaign_id).layouts
        cells: defaultdict[tuple[Any, ...], list[float]] = defaultdict(list)
        for each in layouts:
            cells[tuple(getattr(each.first, name) for name in knobs)].append(each.value)
        return [KnobCell(key, len(values), max(values)) for key, values in cells.items()]


def _counted(knob: str, runs: Sequence[Run]) -> Mapping[Any, int]:
    counts = Counter(map(attrgetter(knob), runs))
    return dict(sorted(counts.items(), key=lambda item: knob_number(knob, item[0])))
