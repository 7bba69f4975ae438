"""The ask/tell protocol of strategies, and the bookkeeping that all strategies share.

`LayoutSearch` keeps the history of a search: which layouts are taken, which are pending, and the
results in order of arrival. A strategy itself is a `Proposer`: a function from the history (and a
seed) to the next layout. The same seed and the same results in the same order give the same
proposals, so after a restart a strategy is rebuilt by telling it all results again.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from layout_tuner.predictions.belief.observation import Observation
from layout_tuner.predictions.estimates.prediction import Prediction
from layout_tuner.search_spaces.campaigns.fidelity import Fidelity
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.spaces.search_space import EVERY_ROW
from layout_tuner.tuner.errors import LayoutUnknownError


class LayoutSet(Protocol):
    """The layouts that a search may propose, in their canonical order.

    Implementations are `search_spaces.spaces.search_space.LegalSet`,
    `search_spaces.spaces.job_set.JobSet`, whose positions are layouts with settings of their jobs,
    and `tuner.replay.cell_layouts.CellLayouts`.
    """

    def column(self, knob: str, /) -> NDArray[np.int64]:
        """One knob of every layout, coded as whole numbers (`layout_columns.code_of`)."""
        ...

    def columns(self, rows: slice = EVERY_ROW, /) -> LayoutColumns:
        """All knobs of all layouts, or of some rows."""
        ...

    def __len__(self) -> int: ...

    def layout(self, index: int, /) -> Layout:
        """The layout at a position."""
        ...

    def index_of(self, layout: Layout, /) -> int | None:
        """The position of the layout; None when the set does not hold it."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class CheapRun:
    """A completed cheap probe of a layout."""

    fidelity: Fidelity
    """The part of the layout that ran."""
    observation: Observation
    """What was measured of that part; its objective is not comparable with those of layouts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AskLimits:
    """The limits of the next proposal."""

    left_node_s: float | None = None
    """Node-seconds that the budget has left; None: it does not count them."""
    is_last: bool = False
    """Whether the budget counts trials, and has one left."""
    may_doubt: bool = True
    """Whether a layout may be proposed again because its measurement is doubted."""


NO_LIMITS: Final = AskLimits()


class History:
    """The proposals and outcomes of a search, by position in the layout set.

    It keeps the positions that are taken alone: a set of jobs may have 10^8 of them.
    """

    def __init__(self, layouts: LayoutSet) -> None:
        self.layouts = layouts
        self.taken: set[int] = set()
        """Layouts that were proposed or have an outcome."""
        self.observations: dict[int, Observation] = {}
        """Outcomes by position, in the order of the last tells; runs of one layout are pooled."""
        self._runs: dict[int, dict[int, Observation]] = {}
        """The runs of each layout by their numbers."""
        self.cheap: dict[int, CheapRun] = {}
        """What cheap probes of layouts measured, by position; such a layout stays free."""
        self.limits = NO_LIMITS
        """Those of the last ask."""
        self._cheap_runs: dict[int, dict[int, CheapRun]] = {}
        """The cheap probes of each layout by their numbers, also those that failed."""
        self._withdrawn: set[int] = set()
        """Layouts of which a full run had no outcome; of a cheap probe, a later one may count."""
        self.pending: dict[int, Fidelity | None] = {}
        """Positions that were proposed and have no outcome, in the order of the asks, with the part
        that runs; None: all of it."""

    @property
    def num_taken(self) -> int:
        """Layouts that will not be proposed again."""
        return len(self.taken)

    @property
    def num_free(self) -> int:
        return len(self.layouts) - len(self.taken)

    def is_free(self, index: int) -> bool:
        """Whether a layout was not proposed and has no outcome."""
        return index not in self.taken

    def free(self, among: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
        """The free positions among some, in their order; by default among all, ascending."""
        if among is None:
            return np.delete(np.arange(len(self.layouts)), sorted(self.taken))
        return among[~np.isin(among, list(self.taken))]

    def ranked(self, allowed_bytes: float) -> Iterator[tuple[int, Observation]]:
        """The completed layouts that keep the memory headroom, in the order of the tells."""
        for index, seen in self.observations.items():
            if seen.objective is not None and (seen.peak_memory_bytes or 0) <= allowed_bytes:
                yield index, seen

    def note(self, index: int, observation: Observation, run: int | None) -> None:
        """Notes the outcome of a run; see `LayoutSearch.tell`."""
        self.take(index)
        runs = self._runs.setdefault(index, {})
        number = len(runs) if run is None else run
        if number not in runs:  # a verdict that changes does not end the run that is pending
            self.end_pending(index, is_cheap=False)
        runs[number] = observation
        completed = self.completed_runs(index)
        self.observations.pop(index, None)
        self.observations[index] = pooled(completed) if completed else observation

    def note_cheap(
        self, index: int, observation: Observation, fidelity: Fidelity, run: int | None
    ) -> None:
        """Notes the outcome of a cheap probe; see `LayoutSearch.tell`."""
        runs = self._cheap_runs.setdefault(index, {})
        number = len(runs) if run is None else run
        if number not in runs:
            self.end_pending(index, is_cheap=True)
        runs[number] = CheapRun(fidelity=fidelity, observation=observation)
        # By number: a verdict that changes comes last when the search is rebuilt.
        in_order = [each for _, each in sorted(runs.items(), key=lambda item: item[0])]
        completed = [each for each in in_order if each.observation.state == "completed"]
        self.cheap.pop(index, None)
        if completed:
            self.cheap[index] = completed[-1]
        if index in self._runs:
            return  # the layout was told in full
        self.observations.pop(index, None)
        if completed:
            self._free(index)
        else:
            self.take(index)
            self.observations[index] = observation

    def withdraw(self, index: int, *, is_cheap: bool) -> None:
        """Notes that a run has no outcome; see `LayoutSearch.withdraw`."""
        self.end_pending(index, is_cheap=is_cheap)
        if is_cheap and index in self.cheap:
            self._free(index)
            return
        self.take(index)
        if not is_cheap:
            self._withdrawn.add(index)

    def end_pending(self, index: int, *, is_cheap: bool) -> None:
        """Notes that a run of a layout does not run any more; one of the other kind still may."""
        if index in self.pending and (self.pending[index] is not None) == is_cheap:
            del self.pending[index]

    def completed_runs(self, index: int) -> list[Observation]:
        runs = self._runs.get(index, {})
        return [run for run in runs.values() if run.state == "completed"]

    def take(self, index: int) -> None:
        """Marks a layout so that it is not proposed again."""
        self.taken.add(index)

    def _free(self, index: int) -> None:
        """Lets a layout that a cheap probe measured be proposed, to be measured in full."""
        is_done = index in self._runs or index in self._withdrawn or index in self.pending
        if not is_done:
            self.taken.discard(index)


def pooled(runs: Sequence[Observation]) -> Observation:
    """Completed runs of one layout as one: the median figures, and the largest peak."""
    steps = [run.step_time_s for run in runs if run.step_time_s is not None]
    peaks = [run.peak_memory_bytes for run in runs if run.peak_memory_bytes is not None]
    return Observation.completed(
        statistics.median(run.objective or 0.0 for run in runs),
        step_time_s=statistics.median(steps) if steps else None,
        peak_memory_bytes=max(peaks, default=None),
    )


class Proposer:
    """The interface of a strategy: `propose`, and methods that it may leave out."""

    def propose(self, _history: History, /) -> int | None:
        """The position of the next layout: a free one, or one whose measurement is doubted.

        At least one is free, and a pending one is never proposed. None: nothing more is proposed,
        at least before what is pending has ended, since the budget does not allow it.

        The result may depend on the history and on the seed only, so that a rebuilt search goes on
        as if it had not been interrupted.
        """
        raise NotImplementedError

    def possible_improvement(self, _history: History, /) -> float | None:
        """See `LayoutSearch.possible_improvement`; at least one layout is free."""
        return None

    def fidelity(self, _index: int, /) -> Fidelity | None:
        """The part of the layout, which was proposed last, to be probed; None: all of it."""
        return None

    def predict(self, _history: History, _index: int, /) -> Prediction | None:
        """What is predicted of the layout at a position; None: the strategy does not predict."""
        return None


class LayoutSearch:
    """A search: a proposer with its history.

    Methods raise LayoutUnknownError for a layout that is not in the set.
    """

    def __init__(self, layouts: LayoutSet, proposer: Proposer) -> None:
        self._layouts = layouts
        self._proposer = proposer
        self._history = History(layouts)
        self.is_held_back = False
        """Whether the last ask proposed nothing because the budget allows nothing, at least now."""

    @property
    def exhausted(self) -> bool:
        return self._history.num_free == 0

    def ask(self, limits: AskLimits = NO_LIMITS) -> Layout | None:
        """A layout that is now pending.

        None: none is left that was not proposed before; or what is pending has to end first, since
        it is expected to use up the budget or decides which layout the last trial measures in full;
        or what the budget has left pays for nothing that could still win.

        A layout that was measured is proposed again where the strategy doubts the measurement, and
        one that a cheap probe measured is proposed again to be measured in full: `fidelity` tells.
        """
        self.is_held_back = False
        if self.exhausted:
            return None
        history = self._history
        history.limits = limits
        proposed = self._proposer.propose(history)
        self.is_held_back = proposed is None
        if proposed is None:
            return None
        index = int(proposed)
        is_repeat = index in history.observations and index not in history.pending
        assert history.is_free(index) or is_repeat, f"layout {index} was proposed a second time"
        self._mark_pending(index, self._proposer.fidelity(index))
        return self._layouts.layout(index)

    def fidelity(self, layout: Layout) -> Fidelity | None:
        """The part of the layout, which was asked for last, to be probed; None: all of it."""
        return self._proposer.fidelity(self._index(layout))

    def tell(
        self,
        layout: Layout,
        observation: Observation,
        *,
        run: int | None = None,
        fidelity: Fidelity | None = None,
    ) -> None:
        """Records the outcome of a layout, which need not have been proposed by this search.

        Several completed runs of one layout are pooled (`pooled`); beside them failed ones say
        nothing.

        A later outcome of the same `run` replaces the earlier one; None is another run. `fidelity`
        is the part of the layout that ran, None: all of it. A part that fails is taken for a
        failure of the layout.
        """
        if fidelity is None:
            self._history.note(self._index(layout), observation, run)
        else:
            self._history.note_cheap(self._index(layout), observation, fidelity, run)

    def resume(self, layout: Layout, *, fidelity: Fidelity | None = None) -> None:
        """Marks a layout as pending that was proposed before a restart."""
        self._mark_pending(self._index(layout), fidelity)

    def withdraw(self, layout: Layout, *, fidelity: Fidelity | None = None) -> None:
        """Records that a run will have no outcome; its layout is not proposed again.

        A layout that another cheap probe measured may still be proposed to be measured in full.
        """
        self._history.withdraw(self._index(layout), is_cheap=fidelity is not None)

    def possible_improvement(self) -> float | None:
        """The share that the remaining layouts may gain over the best one.

        With a probability of 10 % they gain more.

        None: the strategy cannot tell, or nothing has completed. 0: no layout is left.
        """
        if self.exhausted:
            return 0.0
        return self._proposer.possible_improvement(self._history)

    def predict(self, layout: Layout) -> Prediction | None:
        """What is predicted of a layout now; None: the strategy does not predict."""
        return self._proposer.predict(self._history, self._index(layout))

    def _mark_pending(self, index: int, fidelity: Fidelity | None) -> None:
        self._history.take(index)
        if self._history.pending.get(index, fidelity) is not None or fidelity is None:
            self._history.pending[index] = fidelity

    def _index(self, layout: Layout) -> int:
        index = self._layouts.index_of(layout)
        if index is None:
            raise LayoutUnknownError(
                f"layout {layout.key} is not among the campaign's {len(self._layouts)} legal layouts"
            )
        return index
