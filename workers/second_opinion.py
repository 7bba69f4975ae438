"""Whether a failure is the layout's or the node's: it is run once more, elsewhere."""

from __future__ import annotations

from typing import Final

from search_spaces.outcome import Outcome
from workers.held_trial import HeldTrial
from workers.node_roster import NodeRoster

_DOUBTFUL: Final = frozenset({"crashed", "timeout", "node_lost"})
"""Reasons that may be the node's."""


class SecondOpinions:
    """Decides which failures are run again on other nodes, and learns from what came of it.

    Args:
        roster: the nodes.
    """

    def __init__(self, roster: NodeRoster) -> None:
        self._roster = roster

    def blamed(self, trial: HeldTrial, outcome: Outcome) -> int | None:
        """Position of the node that a probe failed on; None: it did not, or nobody knows."""
        if outcome.reason not in _DOUBTFUL:
            return None
        named = self._roster.position(outcome.node)
        if named is None and len(trial.placement) == 1:
            return trial.placement[0].node
        return named

    def is_wanted(self, trial: HeldTrial) -> bool:
        """Whether the first failure of a trial's probe is to be seen elsewhere too."""
        (run, *more) = trial.runs
        if more or run.blamed is None:
            return False
        layout = trial.request.layout
        per_node = -(-layout.num_devices // layout.num_nodes)
        others = [index for index in self._roster.usable() if index != run.blamed]
        large_enough = sum(size >= per_node for size in self._roster.sizes(others))
        return large_enough >= layout.num_nodes
