"""Which nodes fail probes that others run: pure, told by the worker what happened.

One failure says nothing: it may be the layout's. A probe that failed is run again elsewhere (the
second opinion), and where that succeeds, the nodes of the first attempt have a strike.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from search_spaces.outcome import FailureReason, Outcome

STRIKES_OUT: Final = 2
"""Strikes that quarantine a node."""

DOUBTFUL: Final[frozenset[FailureReason]] = frozenset({"crashed", "timeout", "node_lost"})
"""Reasons of failures that may be the node's fault as well as the layout's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Strike:
    """A probe that failed on a node, and succeeded elsewhere."""

    probe: Hashable
    """The trial's id."""
    why: str
    """How it failed, for people."""
    is_alone: bool
    """Whether the node is the only one that can be to blame."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Doubt:
    """A failed probe whose second opinion is awaited."""

    suspects: frozenset[str]
    why: str


@dataclass(kw_only=True)
class NodeHistory:
    """What a worker remembers of its nodes, by name.

    A node that shares the blame with others loses its strike once it completes a probe; one that
    was alone to blame keeps it, since what fails now and then completes now and then.
    """

    _doubts: dict[Hashable, _Doubt] = field(default_factory=dict)
    _strikes: dict[str, list[Strike]] = field(default_factory=dict)
    _quarantined: dict[str, str] = field(default_factory=dict)

    @property
    def quarantined(self) -> Mapping[str, str]:
        """Nodes that have failed too often, and why."""
        return dict(self._quarantined)

    def strikes(self, node: str) -> Sequence[Strike]:
        """The strikes that a node has."""
        return tuple(self._strikes.get(node, ()))

    def failed(self, probe: Hashable, nodes: Sequence[str], outcome: Outcome) -> bool:
        """A probe failed; says whether a second opinion is worth having, elsewhere.

        Args:
            probe: the trial's id.
            nodes: those that it ran on.
            outcome: its failure; where that names one of the nodes, the others are not suspected.
        """
        if self._doubts.pop(probe, None) is not None:
            return False  # it failed on other nodes too: the layout is to blame
        if outcome.reason not in DOUBTFUL:
            return False
        suspects = {outcome.node} if outcome.node in nodes else set(nodes)
        why = f"{outcome.reason}: {outcome.message}"
        self._doubts[probe] = _Doubt(suspects=frozenset(suspects), why=why)
        return True

    def completed(self, probe: Hashable, nodes: Sequence[str]) -> dict[str, str]:
        """A probe completed on these nodes; returns those that this puts into quarantine, and why."""
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
        return {node: why for node in suspects if (why := self._judge(node)) is not None}

    def forget(self, probe: Hashable) -> None:
        """A probe got no second opinion that counts: cancelled, given back, no other nodes."""
        self._doubts.pop(probe, None)

    def release(self, node: str) -> None:
        """Takes a node out of quarantine; what it did is forgotten."""
        self._quarantined.pop(node, None)
        self._strikes.pop(node, None)

    def _judge(self, node: str) -> str | None:
        strikes = self._strikes[node]
        if node in self._quarantined or len(strikes) < STRIKES_OUT:
            return None
        last = strikes[-1]
        trials = ", ".join(str(strike.probe) for strike in strikes)
        why = f"failed trials {trials} that other nodes completed; last {last.why}"
        self._quarantined[node] = why
        return why
