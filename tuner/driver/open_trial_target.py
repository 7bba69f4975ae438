"""How many trials a campaign keeps open, so that no device waits for the search."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Final

from layout_tuner.results_db.records import TrialSize, WorkerRecord

MAX_TOO_LARGE: Final = 10
"""Waiting trials that are too large for the usable nodes of every live worker and do not count;
smaller ones run meanwhile."""
MAX_WAITING: Final = 64
"""Most trials that wait, however many devices there are: workers lease them one by one."""


class OpenTrialTarget:
    """The open trials of a campaign, compared with what the live workers can run at once.

    Both are counted in nodes, without those that are lost or in quarantine. A trial smaller than a
    node takes part of a node where a worker shares nodes between trials, and a whole node
    elsewhere.
    """

    def __init__(self, workers: Iterable[WorkerRecord], open_trials: Sequence[TrialSize]) -> None:
        self._workers = [each for each in workers if each.state != "draining" and each.num_usable]
        self._shared = [worker.devices_per_node for worker in self._workers if worker.shares_nodes]
        self._capacity = sum(worker.num_usable for worker in self._workers)
        self._num_waiting = 0
        self._num_too_large = 0
        self._num_open = 0
        self._nodes = self._largest = Fraction(0)
        """Nodes that the open trials need, and that the largest of them needs."""
        for trial in open_trials:
            self.add(trial)

    @property
    def is_short(self) -> bool:
        """Whether the campaign needs another trial.

        The largest open trial does not count: while it waits for room, the others must fill the
        devices. So one trial waits beyond those that the workers can run. One is enough to keep
        them busy; more would be chosen without the outcomes of the running ones.
        """
        if self._num_waiting >= MAX_WAITING:
            return False
        return not self._num_open or self._nodes - self._largest < self._capacity

    def add(self, trial: TrialSize) -> None:
        if trial.is_waiting and self._is_too_large(trial):
            self._num_too_large += 1
            if self._num_too_large > MAX_TOO_LARGE:
                self._open(Fraction(1))
            # No live worker can run it, so it keeps no worker busy.
            return
        self._num_waiting += trial.is_waiting
        self._open(self._nodes_of(trial))

    def _open(self, nodes: Fraction) -> None:
        self._num_open += 1
        self._nodes += nodes
        self._largest = max(self._largest, nodes)

    def _nodes_of(self, trial: TrialSize) -> Fraction:
        if trial.num_nodes > 1 or not self._shared:
            return Fraction(trial.num_nodes)
        return min(Fraction(trial.num_devices, min(self._shared)), Fraction(1))

    def _is_too_large(self, trial: TrialSize) -> bool:
        return bool(self._workers) and not any(
            worker.holds(trial.num_nodes, trial.num_devices) for worker in self._workers
        )
