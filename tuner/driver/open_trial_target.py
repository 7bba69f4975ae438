"""How many trials a campaign keeps open, so that no device waits for the search. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Final

from results_db.records import TrialSize, WorkerRecord

NUM_AHEAD: Final = 1
"""Trials that wait beyond those that the live workers can run: the next one is ready at once, and
few enough that none was chosen without what the running ones are about to teach."""
MAX_TOO_LARGE: Final = 10
"""Trials too large for every live worker that may wait beyond those: smaller ones go on."""
MAX_WAITING: Final = 64
"""Trials that may wait, however many devices there are: workers fetch them one by one, and the
search goes on meanwhile."""


class Supply:
    """The open trials of a campaign against what the live workers can run at once.

    Counted in nodes. A trial smaller than a node takes part of one where a worker runs several
    there, else all of it.

    Args:
        workers: those of the campaign's cluster that are there.
        open_trials: that wait or run.
    """

    def __init__(self, workers: Iterable[WorkerRecord], open_trials: Sequence[TrialSize]) -> None:
        self._workers = [worker for worker in workers if worker.state != "draining"]
        self._shared = [worker.devices_per_node for worker in self._workers if worker.shares_nodes]
        self._capacity = sum(worker.num_nodes for worker in self._workers)
        self._num_waiting = 0
        self._num_too_large = 0
        self._nodes: list[Fraction] = []
        for trial in open_trials:
            self.add(trial)

    @property
    def is_short(self) -> bool:
        """Whether another trial should be asked for.

        The largest of the open ones may find no place while the others run, and then they have to
        fill the devices: so it does not count.
        """
        if self._num_waiting >= MAX_WAITING:
            return False
        if len(self._nodes) < NUM_AHEAD:
            return True
        return sum(sorted(self._nodes)[:-NUM_AHEAD], start=Fraction(0)) < self._capacity

    def add(self, trial: TrialSize) -> None:
        """Another trial is open."""
        if trial.is_waiting and self._is_too_large(trial):
            self._num_too_large += 1
            if self._num_too_large > MAX_TOO_LARGE:
                self._nodes.append(Fraction(1))
            # None of the live workers will ever take these: they supply nobody.
            return
        self._num_waiting += trial.is_waiting
        self._nodes.append(self._nodes_of(trial))

    def _nodes_of(self, trial: TrialSize) -> Fraction:
        if trial.num_nodes > 1 or not self._shared:
            return Fraction(trial.num_nodes)
        return min(Fraction(trial.num_devices, min(self._shared)), Fraction(1))

    def _is_too_large(self, trial: TrialSize) -> bool:
        return bool(self._workers) and not any(
            trial.num_nodes <= worker.num_nodes
            and trial.num_devices <= trial.num_nodes * worker.devices_per_node
            for worker in self._workers
        )
