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
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from search_spaces.belief.observation import Observation
from search_spaces.estimates.prediction import Prediction
from search_spaces.spec.fidelity import Fidelity
from search_spaces.spec.layout import Layout
from search_spaces.spec.layout_columns import LayoutColumns
from search_spaces.spec.space import EVERY_ROW
from tuner.errors import LayoutUnknownError


class LayoutSet(Protocol):
    """The layouts that a search may propose, in their canonical order.

    Implementations are `search_spaces.spec.space.LegalSet` and
    `tuner.replay.cell_layouts.CellLayouts`.
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


class History:
    """The proposals and outcomes of a search, by position in the layout set."""

    def __init__(self, layouts: LayoutSet) -> None:
        self.layouts = layouts
        self.is_free: NDArray[np.bool_] = np.ones(len(layouts), dtype=np.bool_)
        """True where a layout was neither proposed nor told."""
        self.num_free = len(layouts)
        self.observations: dict[int, Observation] = {}
        """Outcomes by position, in the order of the last tells; runs of one layout are pooled."""
        self._runs: dict[int, dict[int, Observation]] = {}
        """The runs of each layout by their numbers."""
        self.cheap: dict[int, CheapRun] = {}
        """What cheap probes of layouts measured, by position; such a layout stays free."""
        self.left_node_s: float | None = None
        """Node-seconds that the budget has left; None: it does not count them."""
        self.pending: dict[int, None] = {}
        """Positions that were proposed and not told, in the order of the asks."""

    @property
    def num_taken(self) -> int:
        """Layouts that will not be proposed again."""
        return len(self.layouts) - self.num_free

    def successes(self) -> Iterator[tuple[int, float]]:
        """Position and objective of completed layouts, in the order of the tells."""
        for index, observation in self.observations.items():
            if observation.objective is not None:
                yield index, observation.objective

    def note(self, index: int, observation: Observation, run: int | None) -> None:
        """Notes the outcome of a run; see `LayoutSearch.tell`."""
        self.take(index)
        runs = self._runs.setdefault(index, {})
        number = len(runs) if run is None else run
        if number not in runs:  # a verdict that changes does not end the run that is pending
            self.pending.pop(index, None)
        runs[number] = observation
        completed = self.completed_runs(index)
        self.observations.pop(index, None)
        self.observations[index] = pooled(completed) if completed else observation

    def note_cheap(self, index: int, observation: Observation, fidelity: Fidelity) -> None:
        """Notes the outcome of a cheap probe; see `LayoutSearch.tell`."""
        self.pending.pop(index, None)
        self.cheap.pop(index, None)
        if index in self._runs:
            return  # its own runs say more
        if observation.state != "completed":
            self.take(index)
            self.observations[index] = observation
            return
        self.observations.pop(index, None)  # a verdict may change
        if not self.is_free[index]:
            self.is_free[index] = True  # to be measured in full
            self.num_free += 1
        self.cheap[index] = CheapRun(fidelity=fidelity, observation=observation)

    def seen(self) -> dict[int, Observation]:
        """All outcomes by position; a layout's own ones replace that of its cheap probe."""
        return {row: run.observation for row, run in self.cheap.items()} | self.observations

    def completed_runs(self, index: int) -> list[Observation]:
        """The completed runs of a layout."""
        runs = self._runs.get(index, {})
        return [run for run in runs.values() if run.state == "completed"]

    def take(self, index: int) -> None:
        """Marks a layout so that it is not proposed again."""
        if self.is_free[index]:
            self.is_free[index] = False
            self.num_free -= 1


def pooled(runs: Sequence[Observation]) -> Observation:
    """Completed runs of one layout as one: the median figures, and the largest peak."""
    steps = [run.step_time_s for run in runs if run.step_time_s is not None]
    peaks = [run.peak_memory_bytes for run in runs if run.peak_memory_bytes is not None]
    return Observation.completed(
        statistics.median(run.objective or 0.0 for run in runs),
        step_time_s=statistics.median(steps) if steps else None,
        peak_memory_bytes=max(peaks, default=None),
    )


class Proposer(Protocol):
    """What each strategy implements."""

    def propose(self, history: History) -> int:
        """The position of the next layout: a free one, or one whose measurement is doubted.

        At least one is free, and a pending one is never proposed.

        The result may depend on the history and on the seed only, so that a rebuilt search goes on
        as if it had not been interrupted.
        """
        ...


@runtime_checkable
class ImprovementPredicting(Protocol):
    """A proposer that predicts how much the free layouts may improve the best one."""

    def possible_improvement(self, history: History) -> float | None:
        """See `LayoutSearch.possible_improvement`; at least one layout is free."""
        ...


@runtime_checkable
class FidelityChoosing(Protocol):
    """A proposer that may have its layouts probed in part."""

    def fidelity(self, index: int) -> Fidelity | None:
        """The part of the layout, which was proposed last, to be probed; None: all of it."""
        ...


@runtime_checkable
class LayoutPredicting(Protocol):
    """A proposer that predicts step times and memory."""

    def predict(self, history: History, index: int) -> Prediction:
        """What is predicted of the layout at a position, given the history."""
        ...


class LayoutSearch:
    """A search: a proposer with its history."""

    def __init__(self, layouts: LayoutSet, proposer: Proposer) -> None:
        self._layouts = layouts
        self._proposer = proposer
        self._history = History(layouts)

    @property
    def exhausted(self) -> bool:
        """Whether no layout is left to propose."""
        return self._history.num_free == 0

    def ask(self, *, left_node_s: float | None = None) -> Layout | None:
        """A layout that is now pending; None: none is left that was not proposed before.

        A layout that was measured is proposed again where the strategy doubts the measurement, and
        one that a cheap probe measured is proposed again to be measured in full: `fidelity` tells.

        Args:
            left_node_s: node-seconds that the budget has left; None: it does not count them.
        """
        if self.exhausted:
            return None
        history = self._history
        history.left_node_s = left_node_s
        index = int(self._proposer.propose(history))
        is_repeat = index in history.observations and index not in history.pending
        assert history.is_free[index] or is_repeat, f"layout {index} was proposed a second time"
        self._mark_pending(index)
        return self._layouts.layout(index)

    def fidelity(self, layout: Layout) -> Fidelity | None:
        """The part of the layout, which was asked for last, to be probed; None: all of it."""
        if not isinstance(self._proposer, FidelityChoosing):
            return None
        return self._proposer.fidelity(self._index(layout))

    def tell(
        self,
        layout: Layout,
        observation: Observation,
        *,
        run: int | None = None,
        fidelity: Fidelity | None = None,
    ) -> None:
        """Learns the outcome of a layout, which need not have been proposed by this search.

        Several completed runs of one layout are pooled (`pooled`); beside them failed ones say
        nothing.

        Args:
            layout: what ran.
            observation: the outcome.
            run: number of the run; a later outcome of the same run replaces the earlier one. None:
                another run.
            fidelity: the part of the layout that ran; None: all of it. A part that fails is taken
                for a failure of the layout.

        Raises:
            LayoutUnknownError: the layout is not in the set.
        """
        if fidelity is None:
            self._history.note(self._index(layout), observation, run)
        else:
            self._history.note_cheap(self._index(layout), observation, fidelity)

    def resume(self, layout: Layout) -> None:
        """Marks a layout as pending that was proposed before a restart.

        Raises:
            LayoutUnknownError: the layout is not in the set.
        """
        self._mark_pending(self._index(layout))

    def withdraw(self, layout: Layout) -> None:
        """Learns that a layout will have no outcome; it is not proposed again.

        Raises:
            LayoutUnknownError: the layout is not in the set.
        """
        index = self._index(layout)
        self._history.take(index)
        self._history.pending.pop(index, None)

    def possible_improvement(self) -> float | None:
        """The share that the remaining layouts may gain over the best one.

        With a probability of 10 % they gain more.

        None: the strategy cannot tell, or nothing has completed. 0: no layout is left.
        """
        if self.exhausted:
            return 0.0
        if not isinstance(self._proposer, ImprovementPredicting):
            return None
        return self._proposer.possible_improvement(self._history)

    def predict(self, layout: Layout) -> Prediction | None:
        """What is predicted of a layout now; None: the strategy does not predict.

        Raises:
            LayoutUnknownError: the layout is not in the set.
        """
        index = self._index(layout)
        if not isinstance(self._proposer, LayoutPredicting):
            return None
        return self._proposer.predict(self._history, index)

    def _mark_pending(self, index: int) -> None:
        self._history.take(index)
        self._history.pending[index] = None

    def _index(self, layout: Layout) -> int:
        index = self._layouts.index_of(layout)
        if index is None:
            raise LayoutUnknownError(
                f"layout {layout.key} is not among the campaign's {len(self._layouts)} legal layouts"
            )
        return index
