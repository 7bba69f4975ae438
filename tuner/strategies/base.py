"""What every strategy shares: the protocol, the observations, and who may be asked for next.

`LayoutSearch` owns what all strategies would otherwise get wrong one by one: which layouts are
taken, which are pending, when the space is exhausted, and the order in which results came. What is
left to a strategy is a `Proposer`: a pure function from that history to the next index. Hence
every strategy is rebuilt by telling it again, and then asks for what it would have asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol, Self, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from search_spaces.columns import LayoutColumns
from search_spaces.layout import Layout
from search_spaces.space import EVERY_ROW
from tuner.errors import LayoutUnknownError, ObservationInvalidError

ObservationState = Literal["completed", "infeasible", "failed"]
"""infeasible: out of memory, the layout cannot work. failed: anything else."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """What was learnt about one layout.

    Raises:
        ObservationInvalidError: at construction, when state and objective contradict each other.
    """

    state: ObservationState
    """Whether there is an objective, and if not, why."""
    objective: float | None = None
    """To be maximised, over 0 (a throughput); there if and only if completed."""
    step_time_s: float | None = None
    """Seconds an optimizer step, where that was measured; of completed ones alone."""
    peak_memory_bytes: int | None = None
    """Peak of the fullest rank, where that was measured; of completed ones alone."""

    def __post_init__(self) -> None:
        if (self.state == "completed") != (self.objective is not None):
            raise ObservationInvalidError(
                f"state={self.state!r} does not go with objective={self.objective!r}; a completed "
                "observation has an objective, any other has none"
            )
        measured = {
            "step_time_s": self.step_time_s,
            "peak_memory_bytes": self.peak_memory_bytes,
        }
        for name, value in measured.items():
            if value is not None and self.state != "completed":
                raise ObservationInvalidError(
                    f"state={self.state!r} does not go with {name}={value!r}; only a completed "
                    "observation was measured"
                )
        refuse_unless_positive(objective=self.objective, **measured)

    @classmethod
    def completed(
        cls,
        objective: float,
        *,
        step_time_s: float | None = None,
        peak_memory_bytes: int | None = None,
    ) -> Self:
        """A measurement."""
        return cls(
            state="completed",
            objective=objective,
            step_time_s=step_time_s,
            peak_memory_bytes=peak_memory_bytes,
        )


def refuse_unless_positive(**values: float | None) -> None:
    """Refuses what is given and is not a finite number over 0, by its name.

    Raises:
        ObservationInvalidError: the first such value.
    """
    for name, value in values.items():
        if value is not None and not 0 < value < math.inf:
            raise ObservationInvalidError(f"{name}={value!r} is not a finite number over 0")


INFEASIBLE = Observation(state="infeasible")
"""The layout does not fit."""

FAILED = Observation(state="failed")
"""The layout did not run, for a reason other than memory."""


class LayoutSet(Protocol):
    """The layouts that may be asked for, in their canonical order.

    `search_spaces.space.LegalSet` is one; a cell of a measurement table can be another.
    """

    def column(self, knob: str, /) -> NDArray[np.int64]:
        """One layout field as a whole number a layout (see `search_spaces.columns.code_of`)."""
        ...

    def columns(self, rows: slice = EVERY_ROW, /) -> LayoutColumns:
        """Every layout field at once, of all the layouts or of some."""
        ...

    def __len__(self) -> int: ...

    def layout(self, index: int, /) -> Layout:
        """The layout at that position."""
        ...

    def index_of(self, layout: Layout, /) -> int | None:
        """The position of the layout; None when the set does not hold it."""
        ...


class Strategy(Protocol):
    """Proposes layouts, learns from what became of them."""

    def ask(self) -> Layout | None:
        """A layout that was never asked for before, now pending; None: every one was asked for."""
        ...

    def tell(self, layout: Layout, observation: Observation) -> None:
        """Learns what became of a layout; it need not have been asked for here."""
        ...

    def resume(self, layout: Layout) -> None:
        """Learns that the layout is pending: it was asked for before a restart."""
        ...

    def withdraw(self, layout: Layout) -> None:
        """Learns that nothing will be known of the layout, which still is never asked for again."""
        ...

    def expected_improvement(self) -> float | None:
        """By which share the best so far is expected to be improved by what was not asked for yet.

        None: the strategy does not know, or nothing has completed. 0: nothing is left.
        """
        ...


class History:
    """What has been asked and told, by position in the set."""

    def __init__(self, layouts: LayoutSet) -> None:
        self.layouts = layouts
        self.is_free: NDArray[np.bool_] = np.ones(len(layouts), dtype=np.bool_)
        """True where a layout was neither asked for nor told."""
        self.num_free = len(layouts)
        self.observations: dict[int, Observation] = {}
        """By position, in the order of the tells."""
        self.pending: dict[int, None] = {}
        """Positions asked for and not told, in the order of the asks."""

    @property
    def num_taken(self) -> int:
        """Layouts that will not be proposed again."""
        return len(self.layouts) - self.num_free

    def successes(self) -> Iterator[tuple[int, float]]:
        """Position and objective of what completed, in the order of the tells."""
        for index, observation in self.observations.items():
            if observation.objective is not None:
                yield index, observation.objective

    def take(self, index: int) -> None:
        """Makes sure that the layout is never proposed (again)."""
        if self.is_free[index]:
            self.is_free[index] = False
            self.num_free -= 1


class Proposer(Protocol):
    """The part of a strategy that is its own."""

    def propose(self, history: History) -> int:
        """The position to ask for next: a free one; at least one is free.

        It must be a function of the history alone (and of the seed it was built with), for a
        search that is rebuilt to go on as if it had never been interrupted.
        """
        ...


@runtime_checkable
class ImprovementExpecting(Protocol):
    """A proposer that knows what the free layouts promise."""

    def expected_improvement(self, history: History) -> float | None:
        """See `Strategy.expected_improvement`; at least one layout is free."""
        ...


class LayoutSearch:
    """A `Strategy` made of a proposer: it never proposes twice, nor outside the set."""

    def __init__(self, layouts: LayoutSet, proposer: Proposer) -> None:
        self._layouts = layouts
        self._proposer = proposer
        self._history = History(layouts)

    @property
    def num_pending(self) -> int:
        """Layouts asked for and not told."""
        return len(self._history.pending)

    @property
    def exhausted(self) -> bool:
        """Whether the next ask answers None."""
        return self._history.num_free == 0

    def ask(self) -> Layout | None:
        """See `Strategy`."""
        if self.exhausted:
            return None
        index = int(self._proposer.propose(self._history))
        assert self._history.is_free[index], f"the strategy proposed layout {index} a second time"
        self._mark_pending(index)
        return self._layouts.layout(index)

    def tell(self, layout: Layout, observation: Observation) -> None:
        """See `Strategy`; of several observations of one layout the last one counts.

        Raises:
            LayoutUnknownError: the layout is not in the set.
        """
        index = self._index(layout)
        self._history.take(index)
        self._history.pending.pop(index, None)
        self._history.observations.pop(index, None)
        self._history.observations[index] = observation

    def resume(self, layout: Layout) -> None:
        """See `Strategy`.

        Raises:
            LayoutUnknownError: the layout is not in the set.
        """
        self._mark_pending(self._index(layout))

    def withdraw(self, layout: Layout) -> None:
        """See `Strategy`.

        Raises:
            LayoutUnknownError: the layout is not in the set.
        """
        index = self._index(layout)
        self._history.take(index)
        self._history.pending.pop(index, None)

    def expected_improvement(self) -> float | None:
        """See `Strategy`."""
        if self.exhausted:
            return 0.0
        if not isinstance(self._proposer, ImprovementExpecting):
            return None
        return self._proposer.expected_improvement(self._history)

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
