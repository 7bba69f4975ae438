"""Many trials at once over several nodes, with a real HTTP service and a launcher that obeys."""

from __future__ import annotations

import functools
import threading
import time
from queue import SimpleQueue
from typing import Any

import pytest

from layout_tuner.protocol.outcome import Outcome, ProbeRequest
from layout_tuner.protocol.worker_messages import LeaseRequest, RoomBody
from layout_tuner.workers.errors import WorkerError
from layout_tuner.workers.launchers.launcher_nodes import Cancelled, OnEvent
from layout_tuner.workers.packing.packer import Packer
from layout_tuner.workers.packing.request import PackRequest, Placement, Room
from layout_tuner.workers.worker.events import EndMoved, Events
from layout_tuner.workers.worker.leasing import END_WITHIN_S, MOST_WAITING, next_request
from layout_tuner.workers.worker.worker import AllocationEnd, ends_after
from tests.kit.fake_launcher import FakeLauncher
from tests.kit.waiting import wait_until
from tests.kit.worker_loop import DONE, FAILED, WorkedService, ends_when, launcher_of, make_request


def test_probes_of_different_sizes_run_side_by_side(service: WorkedService) -> None:
    sizes = {1: (4, 2), 2: (2, 1), 3: (1, 1), 4: (1, 1)}
    for trial_id, (num_devices, num_nodes) in sizes.items():
        service.add(trial_id, num_devices=num_devices, num_nodes=num_nodes)
    launcher = FakeLauncher(sizes=(2, 2, 4))
    launcher.placed = ends_when(lambda: launcher.most_at_once == 8)
    service.share(launcher, until=lambda: len(service.outcomes) == 4)
    assert launcher.most_at_once == 8, "all of them at the same time, on devices of their own"


def test_one_trial_is_leased_ahead_while_all_devices_are_busy(service: WorkedService) -> None:
    service.add(1, 2, 3, 4, 5)
    go = threading.Event()
    launcher = launcher_of(2, ends=go.is_set)

    def watch() -> bool:
        beats = service.beats()
        phases = {i: beat["phase"] for i, beat in beats.items()}
        if not go.is_set() and phases == {1: "iterating", 2: "waiting"}:
            waits.append((beats[2]["held_s"], beats[2]["waiting_because"]))
            left.append(len(service.trials))
            go.set()
        return len(service.outcomes) == 5

    waits: list[tuple[float, str]] = []
    left: list[int] = []
    service.work(launcher, until=watch)
    assert left == [3], "one ahead, the others stay with the service"
    assert waits[0][0] == 0.0
    assert "waits for" in waits[0][1]
    assert [request.layout.dp for request in launcher.requests] == [2] * 5


def test_a_large_trial_that_waits_is_passed_by_small_ones(service: WorkedService) -> None:
    service.add(1)  # on one node, for as long as the test wants
    service.add(2, num_devices=4, num_nodes=2)  # needs both
    go = threading.Event()
    launcher = launcher_of(2, 2, ends=go.is_set)

    def watch() -> bool:
        rooms = [ask["room"] for ask in service.asks if ask["room"]]
        if rooms and not service.trials and not seen:
            seen.extend(rooms)
            # As long as the first one may take: the large one is not delayed.
            service.add(3, deadline_s=5.0)
        if len(launcher.requests) == 2:
            go.set()
        return len(service.outcomes) == 3

    seen: list[dict[str, int]] = []
    service.share(launcher, until=watch)
    assert seen[0] == {"nodes": 1, "devices": 2}
    assert [request.layout.num_nodes for request in launcher.requests] == [1, 1, 2]


def test_a_trial_that_can_not_end_in_time_is_not_even_leased(service: WorkedService) -> None:
    service.add(1, deadline_s=3000.0)
    launcher = launcher_of(2)
    service.work(launcher, until=lambda: service.outcomes, ends_in_s=lambda: 100.0)
    assert launcher.requests == []
    (outcome,) = service.posted().values()
    assert outcome["state"] == "cancelled"
    assert "before the allocation ends" in outcome["message"]
    assert any((ask["longest_s"] or 1000) < 100 for ask in service.asks)


def test_the_worker_drains_in_time(service: WorkedService, monkeypatch: pytest.MonkeyPatch) -> None:
    look_often = functools.partial(AllocationEnd, look_every_s=0.05)
    monkeypatch.setattr("layout_tuner.workers.worker.worker.AllocationEnd", look_often)
    service.add(1, deadline_s=0.5)
    ends_at: list[float] = []

    def ends_in_s() -> float:
        # The end moves nearer, as where an administrator shortens a job.
        if launcher.requests and not ends_at:
            ends_at.append(time.monotonic() + 6.0)
        return ends_at[0] - time.monotonic() if ends_at else 3600.0

    launcher = launcher_of(2, ends=lambda: False)
    service.work(launcher, until=lambda: service.unregistered, ends_in_s=ends_in_s)
    assert launcher.requests, "it had started"
    assert service.outcomes == [], "its lease went back with the session"
    assert service.unregistered == ["session-1"]
    assert time.monotonic() < ends_at[0] + 0.5


def test_a_launcher_that_breaks_down_costs_a_trial_alone(service: WorkedService) -> None:
    def break_down(request: ProbeRequest, _p: Placement, _e: OnEvent, _c: Cancelled) -> Outcome:
        if request.seed == 1:
            raise ZeroDivisionError("a bug")
        return FAILED

    service.add(1, seed=1)
    service.add(2, seed=2)
    service.work(FakeLauncher(placed=break_down), until=lambda: len(service.outcomes) == 2)
    assert service.posted()[1]["reason"] == "node_lost", "it says nothing about the layout"
    assert "ZeroDivisionError: a bug" in service.posted()[1]["message"]
    assert service.posted()[2]["message"] == FAILED.message


def test_a_trial_that_the_worker_cannot_run_is_unsupported(service: WorkedService) -> None:
    service.add(1, num_devices=8, num_nodes=2)
    service.add_trial(2, {**make_request(), "colour": "green"})
    launcher = launcher_of(4, 2)
    service.share(launcher, until=lambda: len(service.outcomes) == 2)
    assert launcher.requests == []
    large, unknown = (service.posted()[trial_id] for trial_id in (1, 2))
    assert large["reason"] == unknown["reason"] == "unsupported"
    assert "are 4 a node, and this allocation has 1 nodes of so many devices" in large["message"]
    assert "colour" in unknown["message"]


def test_a_trial_is_stopped_before_it_has_devices(service: WorkedService) -> None:
    service.add(1, 2)
    launcher = launcher_of(2, ends=lambda: False)

    def watch() -> bool:
        if 2 in service.beats():
            service.stop = [2]
        return bool(service.outcomes)

    service.work(launcher, until=watch)
    assert service.posted()[2]["state"] == "cancelled"
    assert len(launcher.requests) == 1


def test_a_forgotten_worker_keeps_only_the_trial_that_runs(service: WorkedService) -> None:
    service.add(1, 2)
    go = threading.Event()
    launcher = launcher_of(2, ends=go.is_set)

    def watch() -> bool:
        if set(service.beats()) == {1, 2} and len(service.registrations) == 1:
            service.forget_worker()
        if len(service.registrations) == 2 and set(service.beats()) == {1}:
            go.set()
        return bool(service.outcomes)

    service.work(launcher, until=watch)
    assert len(launcher.requests) == 1
    assert set(service.posted()) == {1}
    assert service.unregistered == ["session-2"]


SIGTERM = "rank 0 was killed by signal 15 (SIGTERM)"
KILLED = Outcome(state="failed", reason="crashed", message=SIGTERM)
LOST = Outcome(state="failed", reason="node_lost", message="the agent ended", node="n0")


@pytest.mark.parametrize("failure", [KILLED, LOST], ids=["killed", "lost"])
def test_ranks_that_end_with_their_job_say_nothing(
    service: WorkedService, failure: Outcome
) -> None:
    """`scancel` signals every process of a job: the ranks may be the first to end."""
    ended = threading.Event()

    def end_with_the_job(*_: object) -> Outcome:
        threading.Timer(0.2, ended.set).start()
        return failure

    service.add(1)
    launcher = FakeLauncher(placed=end_with_the_job, sizes=(2, 2))
    service.share(launcher, until=ended.is_set)
    assert len(launcher.requests) == 1
    assert service.outcomes == []
    assert service.unregistered == ["session-1"]


def test_ends_of_agents_are_not_counted_until_they_are_many(
    service: WorkedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At "a" the agent of the node ends, or Ray; at "z" the zygote does, which a layout may do."""
    monkeypatch.setattr("layout_tuner.workers.worker.trial_book.MAX_FORGIVEN", 2)
    ends = "aaazaaa"

    def lose(*_: object) -> Outcome:
        if ends[len(launcher.requests) - 1] == "a":
            launcher.num_agent_ends += 1
        return LOST

    def watch() -> bool:
        ended = len(service.outcomes)
        if ended == len(added) < len(ends):
            added.append(ended + 1)
            service.add_trial(1, make_request(), attempt=added[-1])
        return ended == len(ends)

    added: list[int] = []
    launcher = FakeLauncher(placed=lose)
    service.work(launcher, until=watch)
    posted = [body["outcome"] for body in service.outcomes]
    returned, lost = ("cancelled", "cancelled"), ("failed", "node_lost")
    expected = [returned, returned, lost, lost, returned, returned, lost]
    assert [(outcome["state"], outcome["reason"]) for outcome in posted] == expected
    assert {outcome["node"] for outcome in posted} == {"n0"}
    assert posted[0]["message"] == posted[3]["message"] == LOST.message
    assert "ended in 3 runs of this trial: see in the node's kernel log" in posted[2]["message"]


def test_a_rank_that_is_terminated_alone_has_crashed(service: WorkedService) -> None:
    service.add(1)
    service.work(lambda *_: KILLED, until=lambda: service.outcomes)
    assert service.posted()[1]["message"] == KILLED.message


def test_idle_node_seconds_add_up(service: WorkedService) -> None:
    service.add(1, num_devices=1)

    def told() -> list[dict[str, Any]]:
        return [body["status"] for body in service.heartbeats if body["trials"]]

    def free() -> list[int]:
        return [node["free_devices"] for node in told()[-1]["nodes"]]

    started = time.monotonic()
    launcher = launcher_of(2, 2, ends=lambda: False)
    service.share(launcher, until=lambda: len(told()) > 5 and free() == [1, 2])
    idle_s = [status["idle_node_s"] for status in told()]
    assert idle_s == sorted(idle_s)
    assert 0 < idle_s[-1] < 2 * (time.monotonic() - started)


def test_how_long_a_probe_is_expected_to_take_follows_from_those_before(
    service: WorkedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    class WatchedPacker(Packer):
        def submit(self, request: PackRequest) -> None:
            expected.append(request.expected_s)
            super().submit(request)

    expected: list[float | None] = []
    monkeypatch.setattr("layout_tuner.workers.worker.worker.Packer", WatchedPacker)
    service.add(1, 2, 3, deadline_s=300.0)
    service.work(lambda *_: DONE, until=lambda: len(service.outcomes) == 3)
    assert expected[0] is None
    assert 0 < expected[-1] < 300


def test_a_campaign_that_is_deleted_and_named_again_is_new(service: WorkedService) -> None:
    service.add(1, 2)
    service.trials[1]["number"] = 1
    launcher = FakeLauncher(sizes=(2, 2))
    launcher.placed = ends_when(lambda: launcher.most_at_once == 4)
    service.share(launcher, until=lambda: len(service.outcomes) == 2)
    assert [outcome["reason"] for outcome in service.posted().values()] == [DONE.reason] * 2


def test_an_end_of_the_allocation_that_moves_is_told_again_and_a_failed_look_up_is_no_end() -> None:
    events: Events = SimpleQueue()
    answers = iter([100.0, None, 50.0])

    def look() -> float:
        answer = next(answers, 50.0)
        if answer is None:
            raise WorkerError("the scheduler's controller is away")
        return answer

    started = time.monotonic()
    end = AllocationEnd(look, events, look_every_s=0.01)
    told = [events.get(timeout=30) for _ in range(2)]
    end.close()
    ends = [event.ends_at for event in told if isinstance(event, EndMoved)]
    assert len(ends) == 2
    assert ends[0] > started + 99 > ends[1]


def test_a_closed_end_of_the_allocation_is_not_looked_up_again() -> None:
    events: Events = SimpleQueue()
    before = threading.enumerate()
    end = AllocationEnd(lambda: 100.0, events, look_every_s=0.01)
    (looking,) = set(threading.enumerate()).difference(before)
    end.close()
    wait_until("its thread ends", lambda: not looking.is_alive())


def test_the_time_left_that_a_user_gives_counts_down_from_then() -> None:
    left_s = ends_after(1000.0)
    first, later = left_s(), left_s()
    assert 900 < later <= first <= 1000
    assert ends_after(0.0)() == 0.0


NO_ROOM = Room(nodes=0, devices=0, longest_s=None)
ALL = Room(nodes=2, devices=4, longest_s=None)


def ask(**changes: object) -> LeaseRequest | None:
    asked = {"usable": [4, 4], "all_usable": True, "num_waiting": 0, "room": ALL, "left_s": None}
    return next_request(**{**asked, **changes})


@pytest.mark.parametrize(
    ("changes", "room"),
    [
        pytest.param({}, None, id="the-oldest-that-fits-comes-first"),
        pytest.param({"room": NO_ROOM}, None, id="nothing-is-free"),
        pytest.param({"usable": [4], "all_usable": False}, RoomBody(nodes=1, devices=4), id="lost"),
    ],
)
def test_any_trial_is_requested_while_none_waits(
    changes: dict[str, Any], room: RoomBody | None
) -> None:
    asked = ask(**changes)
    assert (asked.room, asked.longest_s) == (room, None)


def test_while_a_trial_waits_only_trials_that_start_at_once_are_requested() -> None:
    asked = ask(num_waiting=1, room=Room(nodes=1, devices=3, longest_s=60.0))
    assert asked.room == RoomBody(nodes=1, devices=3)
    assert asked.longest_s == 60.0 - asked.wait_s - END_WITHIN_S


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"num_waiting": 1, "room": NO_ROOM}, id="nothing-free"),
        pytest.param({"num_waiting": MOST_WAITING}, id="enough-waiting"),
        pytest.param({"usable": [], "all_usable": False}, id="all-nodes-lost"),
        pytest.param({"left_s": 1.0}, id="no-time-left"),
    ],
)
def test_no_trial_is_requested_that_could_not_start_soon(changes: dict[str, Any]) -> None:
    assert ask(**changes) is None


def test_a_trial_leased_at_the_last_ends_in_time() -> None:
    asked = ask(left_s=100.0)
    assert asked.longest_s == 85.0
    assert ask(left_s=15.0) is None
