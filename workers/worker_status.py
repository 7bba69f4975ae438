"""What the service is told about the allocation, put together when a heartbeat is sent."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from workers.health import HealthReport
from workers.held_trial import HeldTrial
from workers.node_roster import NodeRecord
from workers.protocol import NodeStatus, WorkerState, WorkerStatus

_NOT_FINITE: Final = re.compile("NaN|Infinity")

_MOST_OF_HEALTH: Final = 500
_MOST_WORDS: Final = 2000
"""Characters of a text that the service takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IdleTime:
    """Node-seconds without a probe, up to a moment and from there on."""

    node_s: float = 0.0
    at: float = 0.0
    nodes: float = 0.0
    """Nodes without a probe since then; fractions count."""

    def until(self, now: float) -> float:
        """Node-seconds up to now."""
        return self.node_s + self.nodes * max(0.0, now - self.at)

    def then(self, now: float, nodes: float) -> IdleTime:
        """From now on it is so many nodes."""
        return IdleTime(node_s=self.until(now), at=now, nodes=nodes)


@dataclass(frozen=True, kw_only=True, slots=True)
class News:
    """What there is to tell; the thread that owns the worker's state makes a new one a change."""

    worker_id: str | None
    """The session; None: there is none at the moment."""
    state: WorkerState = "starting"
    trials: Sequence[HeldTrial] = ()
    """The trials whose leases are to be kept."""
    nodes: Sequence[NodeRecord] = ()
    idle: IdleTime = IdleTime()
    ends_at: float | None = None
    """When the nodes are taken away, on the monotonic clock."""

    def status(self, known: Mapping[str, HealthReport] | None = None) -> WorkerStatus:
        """What the allocation does at this moment.

        Args:
            known: reports by node that the service has already: it keeps those that are not said again.
        """
        now = time.monotonic()
        return WorkerStatus(
            state=self.state,
            ends_in_s=None if self.ends_at is None else max(0.0, self.ends_at - now),
            idle_node_s=self.idle.until(now),
            nodes=_statuses(self.nodes, self.trials, known or {}),
        )


def _statuses(
    nodes: Sequence[NodeRecord], trials: Sequence[HeldTrial], known: Mapping[str, HealthReport]
) -> tuple[NodeStatus, ...]:
    doing: dict[int, list[str]] = {}
    free = [node.num_devices for node in nodes]
    for trial in trials:
        for share in trial.placement:
            if share.node >= len(nodes):
                continue  # it joined since this was put together, and the trial has started there
            doing.setdefault(share.node, []).append(trial.title)
            size = nodes[share.node].num_devices
            free[share.node] -= size if trial.holds_whole_nodes else len(share.devices)
    return tuple(
        NodeStatus(
            name=node.name,
            state="busy" if index in doing and node.state == "idle" else node.state,
            doing=", ".join(doing.get(index, ()))[:_MOST_WORDS],
            reason=node.reason[:_MOST_WORDS],
            free_devices=max(0, free[index]),
            health=_health(node, known),
        )
        for index, node in enumerate(nodes)
    )


def _health(node: NodeRecord, known: Mapping[str, HealthReport]) -> dict[str, Any] | None:
    if node.report is None or node.report is known.get(node.name):
        return None
    return _sayable(node.report.to_mapping())


def _sayable(report: Mapping[str, Any]) -> dict[str, Any]:
    """What of a report a JSON document can hold, and a heartbeat shall."""
    short = {n: v[:_MOST_OF_HEALTH] if isinstance(v, str) else v for n, v in report.items()}
    return {n: v for n, v in short.items() if not _NOT_FINITE.search(json.dumps(v))}
