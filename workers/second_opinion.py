"""Whether a failure is the layout's or the node's: it is run once more, elsewhere."""

from __future__ import annotations

from search_spaces.outcome import Outcome
from workers.held_trial import HeldTrial
from workers.node_roster import NodeRoster
from workers.quarantine import NodeHistory


class SecondOpinions:
    """Decides which failures are run again on other nodes, and learns from what came of it.

    Args:
        roster: the nodes; those that fail what others run are quarantined there.
    """

    def __init__(self, roster: NodeRoster) -> None:
        self._roster = roster
        self._history = NodeHistory()

    def judge(self, trial: HeldTrial, outcome: Outcome) -> frozenset[int]:
        """Takes how a probe ended, which still holds its devices.

        Returns:
            Positions of the nodes that it is to be run again without; none: this end counts.
        """
        names = [self._roster.name(share.node) for share in trial.placement]
        if outcome.state == "completed":
            for name, why in self._history.completed(trial.key, names).items():
                if (index := self._roster.position(name)) is not None:
                    self._roster.quarantine(index, why)
            return frozenset()
        if not self._history.failed(trial.key, names, outcome):
            self.forget(trial)
            return frozenset()
        held = frozenset(share.node for share in trial.placement)
        named = self._roster.position(outcome.node)
        suspects = frozenset({named}) if named in held and named is not None else held
        if not self._has_others(trial, suspects):
            self.forget(trial)
            return frozenset()
        return suspects

    def forget(self, trial: HeldTrial) -> None:
        """There will be no second opinion."""
        self._history.forget(trial.key)

    def release(self, name: str) -> None:
        """A node is out of quarantine: what it did is forgotten."""
        self._history.release(name)

    def _has_others(self, trial: HeldTrial, suspects: frozenset[int]) -> bool:
        layout = trial.request.layout
        per_node = -(-layout.num_devices // layout.num_nodes)
        others = [index for index in self._roster.usable() if index not in suspects]
        large_enough = sum(size >= per_node for size in self._roster.sizes(others))
        return large_enough >= layout.num_nodes
