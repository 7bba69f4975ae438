"""A launcher that does as a test says, and keeps an account of what it was asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from layout_tuner.protocol.outcome import Outcome, ProbeRequest
from layout_tuner.workers.errors import NodeLostError
from layout_tuner.workers.launchers.launcher_nodes import Cancelled, Node, OnEvent
from layout_tuner.workers.packing.request import Placement

Program = Callable[[OnEvent, Cancelled], Outcome]
PlacedProgram = Callable[[ProbeRequest, Placement, OnEvent, Cancelled], Outcome]


def make_node(name: str, num_devices: int, **labels: str) -> Node:
    return Node(
        labels=labels,
        name=name,
        address="127.0.0.1",
        num_devices=num_devices,
        num_cores=num_devices,
        core_ids=tuple(range(num_devices)),
    )


class FakeLauncher:
    """Answers every probe with what a program says.

    Args:
        program: of a probe.
        placed: instead, one that knows the request and its devices.
        sizes: devices of each node; the nodes are "n0", "n1", ...
    """

    def __init__(
        self,
        program: Program | None = None,
        *,
        placed: PlacedProgram | None = None,
        sizes: Sequence[int] = (2,),
    ) -> None:
        self._program = program
        self.placed = placed
        self._lock = threading.Lock()
        self.nodes: list[Node] = [make_node(f"n{index}", size) for index, size in enumerate(sizes)]
        self.requests: list[ProbeRequest] = []
        self.placements: list[Placement] = []
        self.most_at_once = 0
        """The most devices that were held at the same time."""
        self.running: list[Placement] = []
        self.losses: dict[int, str] = {}
        self.num_agent_ends = 0
        """Agents of nodes that have ended so far."""
        self.recoveries: list[int] = []
        self.recover_errors: list[str] = []
        """What the next recoveries fail with."""
        self.closed = False

    def run(
        self,
        request: ProbeRequest,
        *,
        shares: Placement | None = None,
        on_event: OnEvent,
        cancelled: Cancelled,
    ) -> Outcome:
        self._begin(request, shares)
        try:
            if self.placed is not None:
                return self.placed(request, shares, on_event, cancelled)
            return self._program(on_event, cancelled)
        finally:
            with self._lock:
                self.running.remove(shares)

    def _begin(self, request: ProbeRequest, shares: Placement) -> None:
        with self._lock:
            held = [
                (share.node, device)
                for p in (*self.running, shares)
                for share in p
                for device in share.devices
            ]
            assert len(held) == len(set(held)), f"devices are held twice: {held}"
            self.most_at_once = max(self.most_at_once, len(held))
            self.running.append(shares)
            self.requests.append(request)
            self.placements.append(shares)

    def lost(self) -> Mapping[int, str]:
        return dict(self.losses)

    def agent_ends(self, _node: int) -> int:
        return self.num_agent_ends

    def recover(self, node: int) -> None:
        with self._lock:
            self.recoveries.append(node)
        if self.recover_errors:
            raise NodeLostError(self.recover_errors.pop(0))
        self.losses.pop(node, None)

    def close(self) -> None:
        self.closed = True
