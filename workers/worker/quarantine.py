"""Quarantine of nodes on which probes fail that complete on other nodes.

One failure may be the fault of the layout or of a node. So the probe is run again on other nodes
(the second opinion). If it completes there, each node of the first run gets a strike.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Final

from layout_tuner.protocol.outcome import FailureReason, Outcome
from layout_tuner.workers.worker.held_trial import HeldTrial
from layout_tuner.workers.worker.roster import NodeRoster

STRIKES_OUT: Final = 2
"""Strikes that quarantine a node."""

DOUBTFUL: Final[frozenset[FailureReason]] = frozenset(
    {"crashed", "host_resource", "timeout", "node_lost"}
)
"""Reasons of failures that may be the node's fault as well as the layout's."""

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Strike:
    """A probe that failed on a node and completed on others."""

    probe: Hashable
    """The trial's id."""
    why: str
    """How it failed, as text."""
    is_alone: bool
    """Whether the node was the only suspect."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Doubt:
    """A failed probe that is run again on other nodes."""

    suspects: frozenset[str]
    why: str


@dataclass(kw_only=True)
class NodeHistory:
    """The strikes of a worker's nodes, by name.

    A node that was one of several suspects loses its strike once it completes a probe. A node that
    was the only suspect keeps it: a node that fails sometimes also completes probes sometimes.
    """

    _doubts: dict[Hashable, _Doubt] = field(default_factory=dict)
    _strikes: dict[str, list[Strike]] = field(default_factory=dict)

    def strikes(self, node: str) -> Sequence[Strike]:
        return tuple(self._strikes.get(node, ()))

    def failed(self, probe: Hashable, nodes: Sequence[str], outcome: Outcome) -> frozenset[str]:
        """Notes a failure; returns the suspects among its nodes: the one that it names, or all.

        The probe is to be run again on other nodes; not so where there are no suspects.
        """
        if self._doubts.pop(probe, None) is not None:
            return frozenset()  # it failed on other nodes too: the layout is to blame
        if outcome.reason not in DOUBTFUL:
            return frozenset()
        suspects = frozenset({outcome.node} if outcome.node in nodes else set(nodes))
        self._doubts[probe] = _Doubt(suspects=suspects, why=f"{outcome.reason}: {outcome.message}")
        return suspects

    def completed(self, probe: Hashable, nodes: Sequence[str]) -> dict[str, str]:
        """Notes a completed probe; returns the nodes to quarantine because of it, and why."""
        for node in nodes:
            self._strikes[node] = [strike for strike in self.strikes(node) if strike.is_alone]
        doubt = self._doubts.pop(probe, None)
        if doubt is None:
            return {}
        suspects = sorted(doubt.suspects - set(nodes))
        alone = len(suspects) == 1
        for node in suspects:
            strike = Strike(probe=probe, why=doubt.why, is_alone=alone)
            self._strikes.setdefault(node, []).append(strike)
        return {node: why for node in suspects if (why := self._strike_out(node)) is not None}

    def forget(self, probe: Hashable) -> None:
        """Drops a suspicion: the second run was cancelled, or there are no other nodes."""
        self._doubts.pop(probe, None)

    def release(self, node: str) -> None:
        """Removes the strikes of a node that is taken out of quarantine."""
        self._strikes.pop(node, None)

    def _strike_out(self, node: str) -> str | None:
        strikes = self._strikes[node]
        if len(strikes) != STRIKES_OUT:  # with more, it is in quarantine
            return None
        last = strikes[-1]
        trials = ", ".join(str(strike.probe) for strike in strikes)
        _LOG.warning("node %s failed %s; the last: %s", node, trials, last.why)
        # Without names and messages: everybody reads it, and not everybody sees the campaigns.
        reason = last.why.partition(":")[0]
        return f"failed trials ({len(strikes)}) that other nodes completed; last {reason}"


@dataclass(kw_only=True)
class SecondOpinions(NodeHistory):
    """Decides which failed probes are run again on other nodes, and quarantines nodes."""

    roster: NodeRoster

    def suspects_after(self, trial: HeldTrial, outcome: Outcome) -> frozenset[int]:
        """Notes the end of a probe that still holds its devices.

        Returns:
            Positions of the nodes to avoid when it is run again; empty: it is not run again.
        """
        names = [self.roster.name(share.node) for share in trial.placement]
        if outcome.state == "completed":
            for name, why in self.completed(trial.key, names).items():
                if (index := self.roster.position(name)) is not None:
                    self.roster.quarantine(index, why)
            return frozenset()
        suspected = self.failed(trial.key, names, outcome)
        suspects = frozenset(
            share.node for share in trial.placement if self.roster.name(share.node) in suspected
        )
        if not self._has_others(trial, suspects):
            self.forget(trial.key)
            return frozenset()
        return suspects

    def _has_others(self, trial: HeldTrial, suspects: frozenset[int]) -> bool:
        layout = trial.request.layout
        per_node = -(-layout.num_devices // layout.num_nodes)
        others = [index for index in self.roster.usable() if index not in suspects]
        large_enough = sum(size >= per_node for size in self.roster.sizes(others))
        return large_enough >= layout.num_nodes
