"""Why a trial is not leased by an allocation, or by any allocation."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final

from layout_tuner.protocol.states import UNUSABLE_NODE_STATES
from layout_tuner.results_db.allocations.allocations import AllocationRecord, WaitingTrial
from layout_tuner.terminal.plurals import counted

_UNUSABLE: Final = (*UNUSABLE_NODE_STATES, "recovering", "checking")
"""States in which a node takes no probe."""


def why_not_leased(trial: WaitingTrial, allocation: AllocationRecord, now: datetime) -> str:
    if trial.is_paused:
        return "its campaign is paused"
    if not allocation.is_there:
        return f"worker {allocation.worker.name} was not heard of lately"
    never = why_never(trial, allocation, now)
    return never or "it fits, and waits until devices are free and the older ones have theirs"


def why_never(trial: WaitingTrial, allocation: AllocationRecord, now: datetime) -> str | None:
    """Why an allocation in its current state will not lease a trial; None: it may."""
    never = _too_large(trial, allocation) or _too_late(trial, allocation, now)
    if never is None and allocation.worker.state == "starting":
        return "the allocation's nodes are not ready yet"
    return never


def why_nowhere(
    trial: WaitingTrial, allocations: Sequence[AllocationRecord], now: datetime
) -> str | None:
    """Why no allocation will lease a trial; None: one may, or there are no allocations."""
    reasons = [why_never(trial, allocation, now) for allocation in allocations]
    if not reasons or None in reasons:
        return None
    # The reason of an allocation that is large enough says most.
    fitting = [a for a in allocations if _too_large(trial, a) is None]
    largest = max(
        fitting or allocations, key=lambda a: _usable_nodes(a) * a.worker.devices_per_node
    )
    return f"no allocation may run it; {largest.worker.name}: {why_never(trial, largest, now)}"


def _too_large(trial: WaitingTrial, allocation: AllocationRecord) -> str | None:
    worker, nodes = allocation.worker, _usable_nodes(allocation)
    if trial.num_devices > trial.num_nodes * worker.devices_per_node:
        return (
            f"it needs {counted(trial.num_devices, 'device')} on {counted(trial.num_nodes, 'node')}, and a node "
            f"here has {worker.devices_per_node}"
        )
    if trial.num_nodes <= nodes:
        return None
    needs = f"it needs {counted(trial.num_nodes, 'node')}"
    if trial.num_nodes > worker.num_nodes:
        return f"{needs}, and there are {worker.num_nodes} here"
    checked = ", being checked" if any(n.state == "checking" for n in allocation.nodes) else ""
    missing = f"{worker.num_nodes - nodes} of the {worker.num_nodes} here are lost{checked} or in quarantine"
    return f"{needs}, and {missing}{_way_out(allocation)}"


def _way_out(allocation: AllocationRecord) -> str:
    """What a user can do about a node in quarantine; else why a node was lost."""
    for node in allocation.nodes:
        if node.state == "quarantined":
            return f" ({node.name}: {node.reason}); `layout-tuner allocation release` ends that"
    lost = (
        f" ({node.name}: {node.reason})"
        for node in allocation.nodes
        if node.state in _UNUSABLE and node.reason
    )
    return next(lost, "")


def _too_late(trial: WaitingTrial, allocation: AllocationRecord, now: datetime) -> str | None:
    worker = allocation.worker
    if worker.state == "draining":
        return "the allocation drains: it takes no more trials"
    if worker.ends_at is None:
        return None
    left_s = (worker.ends_at - now).total_seconds()
    if trial.deadline_s <= left_s:
        return None
    return f"its probe may take {trial.deadline_s:.0f} s, and {max(left_s, 0.0):.0f} s are left"


def _usable_nodes(allocation: AllocationRecord) -> int:
    unusable = sum(node.state in _UNUSABLE for node in allocation.nodes)
    return allocation.worker.num_nodes - unusable
