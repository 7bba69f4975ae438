"""A node is used by probes or checked, never both at once."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from queue import SimpleQueue

from tests.workers.fake_launcher import FakeLauncher
from workers.launchers.base import Cancelled
from workers.packing.packer import Packer
from workers.packing.request import PackRequest
from workers.worker.events import NodeRecovered, NodesChecked, WorkerEvent
from workers.worker.node_health import HealthReport
from workers.worker.roster import NodeRoster


def test_a_released_node_is_checked_once_what_runs_there_has_ended() -> None:
    checked: list[Sequence[int]] = []

    def check(
        nodes: Sequence[int], _cancelled: Cancelled, _known: Mapping[int, HealthReport]
    ) -> dict[int, HealthReport]:
        checked.append(nodes)
        fit = HealthReport(device="cpu", num_devices=2, num_devices_seen=2)
        return dict.fromkeys(nodes, fit)

    def take_checked() -> None:
        event = events.get(timeout=30)
        assert isinstance(event, NodesChecked)
        roster.take_checked(event)

    events: SimpleQueue[WorkerEvent] = SimpleQueue()
    packer = Packer(share_nodes=True)
    roster = NodeRoster(FakeLauncher(sizes=(2,)), packer, events, check=check)
    roster.look(0.0)
    take_checked()
    packer.submit(PackRequest(key=1, num_nodes=1, num_devices=1, at_most_s=10.0))
    packer.place(0.0, None)
    roster.quarantine(0, "a user says so")
    assert roster.release("n0")
    roster.look(1.0)
    assert (roster.usable(), checked) == ([], [(0,)])
    packer.release(1)
    roster.look(2.0)
    take_checked()
    assert (roster.usable(), checked) == ([0], [(0,), (0,)])


def test_a_check_of_a_node_that_was_lost_meanwhile_counts_for_nothing() -> None:
    goes_on = threading.Event()
    failures = ["node_lost: its agent was killed", ""]

    def check(
        nodes: Sequence[int], _cancelled: Cancelled, _known: Mapping[int, HealthReport]
    ) -> dict[int, HealthReport]:
        why = failures.pop(0)
        assert goes_on.wait(30)
        report = HealthReport(device="cpu", num_devices=2, num_devices_seen=2, failure=why)
        return dict.fromkeys(nodes, report)

    def states() -> list[str]:
        return [record.state for record in roster.records()]

    events: SimpleQueue[WorkerEvent] = SimpleQueue()
    launcher = FakeLauncher(sizes=(2,))
    roster = NodeRoster(launcher, Packer(share_nodes=True), events, check=check)
    roster.look(0.0)
    launcher.losses[0] = "its agent was killed"
    roster.look(1.0)
    back = events.get(timeout=30)
    assert isinstance(back, NodeRecovered)
    roster.take_recovered(back, 1.0)
    assert states() == ["starting"], "it is checked again once the first check is over"
    goes_on.set()
    for state in ("starting", "idle"):
        ended = events.get(timeout=30)
        assert isinstance(ended, NodesChecked)
        roster.take_checked(ended)
        assert states() == [state]
        roster.look(2.0)
