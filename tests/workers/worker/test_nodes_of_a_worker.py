"""The nodes of a worker: lost, brought back, late, checked, doubted, quarantined and released."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import pytest

from layout_tuner.protocol.outcome import FailureReason, Outcome, ProbeRequest
from layout_tuner.workers.launchers.launcher_nodes import Cancelled, OnEvent
from layout_tuner.workers.packing.packer import Packer
from layout_tuner.workers.packing.request import PackRequest, Placement
from layout_tuner.workers.packing.topology import Topology
from layout_tuner.workers.worker.events import WorkerEvent
from layout_tuner.workers.worker.node_health import HealthReport
from layout_tuner.workers.worker.quarantine import NodeHistory
from layout_tuner.workers.worker.roster import NodeRoster
from tests.kit.fake_launcher import FakeLauncher, make_node
from tests.kit.store import completed
from tests.kit.waiting import wait_until
from tests.kit.worker_loop import IDENTITY, SHARED, WorkedService, ends_when, launcher_of

KILLED = "its raylet was killed"


def make_report(failure: str = "") -> HealthReport:
    return HealthReport(
        device="cpu",
        num_devices=2,
        num_devices_seen=2,
        gemm_tflops=(1.0, math.nan),
        failure=failure,
    )


def crashed(message: str, node: str = "n0", duration_s: float = 1.0) -> Outcome:
    where = {"node": node, "duration_s": duration_s}
    return Outcome(state="failed", reason="crashed", message=message, **where)


@pytest.mark.slow
def test_a_lost_node_is_brought_back_while_the_others_work(service: WorkedService) -> None:
    launcher = launcher_of(2, 2)
    launcher.losses[1] = KILLED
    launcher.recover_errors = ["not yet", "not yet"]
    service.add(1)

    def watch() -> bool:
        states = service.states()
        seen.add(states.get("n1", ""))
        return bool(service.outcomes) and states == {"n0": "idle", "n1": "idle"}

    seen: set[str] = set()
    service.share(launcher, until=watch)
    assert launcher.recoveries == [1, 1, 1]
    assert seen & {"lost", "recovering"}


def test_a_trial_whose_nodes_do_not_come_back_is_given_back(
    service: WorkedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("layout_tuner.workers.worker.trial_book._GIVE_BACK_AFTER_S", 0.3)
    service.add(1)
    service.add(2, num_devices=4, num_nodes=2)
    launcher = launcher_of(2, 2, ends=lambda: False)
    launcher.recover_errors = ["not yet"] * 100

    def watch() -> bool:
        if set(service.beats()) == {1, 2}:
            launcher.losses[1] = KILLED
        return bool(service.outcomes)

    service.share(launcher, until=watch)
    outcome = service.posted()[2]
    assert outcome["state"] == "cancelled"
    assert "needs more nodes than are usable: 1 of 2; n1 is" in outcome["message"]


def test_a_failure_counts_when_no_other_node_is_left_to_see_it(service: WorkedService) -> None:
    def crash_on_n0(r: ProbeRequest, shares: Placement, e: OnEvent, c: Cancelled) -> Outcome:
        if shares[0].node == 0:
            wait_until("the other node is busy", lambda: len(launcher.running) == 2, 20)
            return crashed("boom")
        return ends_when(lambda: False)(r, shares, e, c)

    service.add(1, 2)
    launcher = FakeLauncher(placed=crash_on_n0, sizes=(2, 2))
    launcher.recover_errors = ["not yet"] * 100

    def watch() -> bool:
        if any(beat["phase"] == "waiting" for beat in service.beats().values()):
            launcher.losses[1] = KILLED
        return bool(service.outcomes)

    service.share(launcher, until=watch)
    (outcome,) = service.posted().values()
    said = (outcome["reason"], outcome["message"], outcome["duration_s"])
    assert said == ("crashed", "boom", 1.0)


def test_a_failure_counts_once_another_node_has_seen_it_or_none_is_left(
    service: WorkedService,
) -> None:
    failures = [crashed("the node's fault"), crashed("the layout's", "n1", 2.0)]

    def fail(_r: ProbeRequest, shares: Placement, _e: OnEvent, _c: Cancelled) -> Outcome:
        return crashed("no luck") if len(shares) == 2 else failures[shares[0].node]

    service.add(1)
    service.add(2, num_devices=4, num_nodes=2)
    launcher = FakeLauncher(placed=fail, sizes=(2, 2))
    service.share(launcher, until=lambda: len(service.outcomes) == 2)
    nodes = [[share.node for share in placement] for placement in launcher.placements]
    assert sorted(nodes) == [[0], [0, 1], [1]]
    posted = {body["trial_id"]: body for body in service.outcomes}
    outcome = posted[1]["outcome"]
    assert (outcome["message"], outcome["duration_s"]) == ("the layout's", 3.0)
    assert posted[1]["nodes_held"] == 1.0
    assert posted[2]["outcome"]["message"] == "no luck"


def test_a_node_failing_twice_what_others_complete_is_set_aside(
    service: WorkedService, caplog: pytest.LogCaptureFixture
) -> None:
    def fail_on_n0(request: ProbeRequest, shares: Placement, _e: OnEvent, _c: Cancelled) -> Outcome:
        is_on_n0 = shares[0].node == 0
        return crashed("segmentation fault") if is_on_n0 else completed(request.layout)

    service.add(1, 2, 3, 4, 5)
    launcher = FakeLauncher(placed=fail_on_n0, sizes=(2, 2))

    def watch() -> bool:
        if len(service.outcomes) == 5 and service.states().get("n0") == "quarantined":
            seen.append(service.heartbeats[-1]["status"]["nodes"][0]["reason"])
        return bool(seen)

    seen: list[str] = []
    service.share(launcher, until=watch)
    assert {outcome["state"] for outcome in service.posted().values()} == {"completed"}
    assert "failed trials" in seen[0]
    assert "segmentation fault" not in seen[0], "everybody reads it"
    assert "segmentation fault" in caplog.text
    assert sum(placement[0].node == 0 for placement in launcher.placements) == 2


def test_a_node_is_checked_before_its_first_probe_and_on_release(service: WorkedService) -> None:
    checked: list[tuple[int, ...]] = []

    def check(_launcher: object, nodes: Sequence[int], *_: object) -> dict[int, HealthReport]:
        checked.append(tuple(nodes))
        wait_until("checking is seen", lambda: "checking" in service.states().values(), 10)
        bad = "it smells" if len(checked) == 1 else ""
        return {node: make_report(bad if node == 1 else "") for node in nodes}

    def watch() -> bool:
        states = service.states()
        if states == {"n0": "idle", "n1": "quarantined"} and not seen:
            seen.append(service.heartbeats[-1]["status"]["nodes"][1])
            service.release = ["n1"]
        return bool(seen) and states == {"n0": "idle", "n1": "idle"}

    seen: list[dict[str, Any]] = []
    service.share(launcher_of(2, 2), until=watch, check=check)
    assert checked == [(0, 1), (1,)]
    assert seen[0]["reason"] == "the health check failed: it smells"
    health = service.told_health()["n1"]
    assert health["num_devices_seen"] == 2
    assert "gemm_tflops" not in health, "it is no number that JSON knows"


def test_a_check_that_breaks_down_is_no_clean_bill(service: WorkedService) -> None:
    def check(*_: object) -> dict[int, HealthReport]:
        raise ZeroDivisionError("a bug")

    def reasons() -> list[str]:
        return [n["reason"] for body in service.heartbeats[-1:] for n in body["status"]["nodes"]]

    why = ["it could not be checked: a bug"]
    launcher = service.work(launcher_of(2), until=lambda: reasons() == why, check=check)
    assert launcher.requests == []


def test_users_quarantine_and_release_nodes_at_any_time(service: WorkedService) -> None:
    service.quarantined = [{"node": "n0", "reason": "failed twice"}]
    service.quarantine = [{"node": "n1", "reason": "smells of smoke"}]

    def watch() -> bool:
        if set(service.states().values()) == {"quarantined"} and not seen:
            nodes = service.heartbeats[-1]["status"]["nodes"]
            seen.extend(node["reason"] for node in nodes)
            service.quarantine, service.release = [], ["n1"]
            service.add(1)
        return bool(service.outcomes)

    seen: list[str] = []
    launcher = launcher_of(2, 2)
    service.share(launcher, until=watch)
    assert seen == ["failed twice", "smells of smoke"]
    assert [placement[0].node for placement in launcher.placements] == [1]


def test_a_node_that_joins_late_is_taken_up_and_what_needs_it_stays_with_the_service_until_then(
    service: WorkedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a trial would be refused for good: the worker can't tell that the node will come."""
    monkeypatch.setattr("layout_tuner.workers.worker.leasing._LONG_POLL_S", 0.2)
    launcher = launcher_of(2)

    def watch() -> bool:
        if service.asks and service.states() and len(launcher.nodes) == 1:
            launcher.nodes.append(make_node("n1", 2))
        is_asked_for = any(ask["room"] is None for ask in service.asks)
        return is_asked_for and service.states().get("n1") == "idle"

    service.share(launcher, until=watch, identity=replace(IDENTITY, num_nodes=2))
    assert service.asks[0]["room"] == {"nodes": 1, "devices": 2}


def test_a_released_node_is_checked_once_what_runs_there_has_ended() -> None:
    checked: list[Sequence[int]] = []

    def check(nodes: Sequence[int], *_: object) -> dict[int, HealthReport]:
        checked.append(nodes)
        return dict.fromkeys(nodes, make_report())

    def take_checked() -> None:
        roster.take_checked(events.get(timeout=30))

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


def roster_of(*domains: str, most_nodes: int = 2) -> NodeRoster:
    """Nodes with the label of a domain, of which one has so many nodes; "": without the label."""
    launcher = FakeLauncher(sizes=())
    for index, domain in enumerate(domains):
        launcher.nodes.append(make_node(f"n{index}", 2, **({"domain": domain} if domain else {})))
    topology = Topology(names=("domain",), most_nodes={"domain": most_nodes})
    events: SimpleQueue[WorkerEvent] = SimpleQueue()
    roster = NodeRoster(launcher, Packer(share_nodes=True), events, topology=topology)
    roster.look(0.0)
    return roster


def nodes_of_a_pair(roster: NodeRoster) -> list[int]:
    roster.packer.submit(PackRequest(key=1, num_nodes=2, num_devices=4, at_most_s=10.0))
    ((_, placement),) = roster.packer.place(0.0, None)
    return [share.node for share in placement]


def test_nodes_are_in_the_domains_of_their_labels(caplog: pytest.LogCaptureFixture) -> None:
    assert nodes_of_a_pair(roster_of("a", "b", "a")) == [0, 2]
    assert not caplog.records


def test_domains_larger_than_the_clusters_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    roster = roster_of("a", "b", "a", "a")
    roster.launcher.nodes.append(make_node("n4", 2, domain="b"))  # type: ignore[attr-defined]
    roster.look(1.0)
    assert nodes_of_a_pair(roster) == [0, 1]
    (record,) = caplog.records
    words = (
        "domain a has 3 nodes, and the cluster's description says 2 at most: correct one of the two"
    )
    assert record.getMessage() == f"probes are placed as without a topology: {words}"


def test_nodes_without_a_domain_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    roster = roster_of("a", "", "a", "")
    roster.look(1.0)
    (record,) = caplog.records
    assert record.getMessage() == "no domain is known of these nodes, so each counts as one: n1, n3"
    assert nodes_of_a_pair(roster) == [0, 2]


def test_without_any_label_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    assert nodes_of_a_pair(roster_of("", "", "")) == [0, 1]
    assert not caplog.records


def test_a_trial_says_what_it_spans(
    service: WorkedService, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    doing: set[str] = set()

    def is_said() -> bool:
        bodies = [body["status"] for body in service.heartbeats if body["status"]]
        doing.update(node["doing"] for status in bodies for node in status["nodes"])
        return any("spans" in words for words in doing)

    launcher = launcher_of(ends=is_said)
    launcher.nodes += [make_node("n0", 2, domain="a"), make_node("n1", 2, domain="b")]
    service.add(1, num_devices=4, num_nodes=2)
    options = replace(SHARED, topology=Topology(names=("domain",)))
    service.work(launcher, until=lambda: service.outcomes, options=options)
    assert "starts on n0, n1; spans 2 of domain (1 + 1 nodes)" in caplog.text
    assert "trial 1 of c (spans 2 of domain (1 + 1 nodes))" in doing


def test_a_check_of_a_node_that_was_lost_meanwhile_counts_for_nothing() -> None:
    goes_on = threading.Event()
    failures = ["node_lost: its agent was killed", ""]

    def check(nodes: Sequence[int], *_: object) -> dict[int, HealthReport]:
        why = failures.pop(0)
        assert goes_on.wait(30)
        return dict.fromkeys(nodes, make_report(why))

    def states() -> list[str]:
        return [record.state for record in roster.records()]

    events: SimpleQueue[WorkerEvent] = SimpleQueue()
    launcher = FakeLauncher(sizes=(2,))
    roster = NodeRoster(launcher, Packer(share_nodes=True), events, check=check)
    roster.look(0.0)
    launcher.losses[0] = "its agent was killed"
    roster.look(1.0)
    roster.take_recovered(events.get(timeout=30), 1.0)
    assert states() == ["starting"], "it is checked again once the first check is over"
    goes_on.set()
    for state in ("starting", "idle"):
        roster.take_checked(events.get(timeout=30))
        assert states() == [state]
        roster.look(2.0)


def failure(reason: FailureReason = "crashed", *, node: str = "") -> Outcome:
    return Outcome(state="failed", reason=reason, message="rank 3 was killed", node=node)


def strike(history: NodeHistory, probe: int, node: str, *, elsewhere: str = "z") -> dict[str, str]:
    assert history.failed(probe, [node], failure(node=node))
    return history.completed(probe, [elsewhere])


def test_a_node_that_fails_two_probes_which_others_complete_is_quarantined() -> None:
    history = NodeHistory()
    assert strike(history, 7, "a") == {}
    why = "failed trials (2) that other nodes completed; last crashed"
    assert strike(history, 9, "a", elsewhere="b") == {"a": why}
    assert strike(history, 11, "a") == {}, "it is in quarantine"


@pytest.mark.parametrize("reason", ["crashed", "host_resource"])
def test_a_layout_that_fails_everywhere_blames_no_node(reason: FailureReason) -> None:
    history = NodeHistory()
    for probe in range(5):
        assert history.failed(probe, ["a"], failure(reason, node="a"))
        assert not history.failed(probe, ["b"], failure(reason, node="b"))
        assert history.completed(probe, ["b"]) == {}
    assert not history.strikes("a")
    assert not history.strikes("b")


@pytest.mark.parametrize(
    ("state", "reason", "is_doubted"),
    [
        ("failed", "crashed", True),
        ("failed", "timeout", True),
        ("failed", "node_lost", True),
        ("failed", "host_resource", True),
        ("infeasible", "out_of_memory", False),
        ("failed", "diverged", False),
        ("cancelled", "cancelled", False),
        ("failed", "unsupported", False),
    ],
)
def test_failures_that_may_be_the_nodes_get_a_second_opinion_and_no_others(
    state: str, reason: str, is_doubted: bool
) -> None:
    outcome = Outcome.from_mapping({"state": state, "reason": reason, "message": "so"})
    assert bool(NodeHistory().failed(1, ["a"], outcome)) is is_doubted


@pytest.mark.parametrize(
    ("named", "struck"),
    [("b", {"b"}), ("elsewhere", {"a", "b"})],
    ids=["a-node-of-the-probe", "a-node-of-another-probe"],
)
def test_the_node_that_the_failure_names_is_blamed_alone(named: str, struck: set[str]) -> None:
    history = NodeHistory()
    history.failed(1, ["a", "b"], failure(node=named))
    history.completed(1, ["c", "d"])
    nodes = ("a", "b", "elsewhere")
    assert {node for node in nodes if [one.probe for one in history.strikes(node)] == [1]} == struck


def test_a_node_that_two_failures_without_a_name_share_is_found() -> None:
    history = NodeHistory()
    history.failed(1, ["a", "b"], failure("timeout"))
    assert history.completed(1, ["a", "d"]) == {}
    assert not history.strikes("a"), "it gave the second opinion"
    assert history.strikes("b")[0].is_alone
    history.failed(2, ["b", "c"], failure("timeout"))
    assert history.completed(2, ["d", "e"]).keys() == {"b"}


def test_a_node_that_completes_a_probe_is_rid_of_shared_blame_and_not_of_its_own() -> None:
    history = NodeHistory()
    history.failed(1, ["a", "b"], failure("timeout"))
    history.completed(1, ["c", "d"])
    history.completed(2, ["a"])
    assert not history.strikes("a")
    assert history.strikes("b")
    strike(history, 3, "a")
    history.completed(4, ["a"])
    assert strike(history, 5, "a").keys() == {"a"}


def test_a_second_opinion_that_never_came_says_nothing_and_a_released_node_starts_anew() -> None:
    history = NodeHistory()
    history.failed(1, ["a"], failure())
    history.forget(1)
    history.completed(1, ["b"])
    assert not history.strikes("a")
    strike(history, 2, "a")
    assert strike(history, 3, "a").keys() == {"a"}
    history.release("a")
    assert strike(history, 4, "a") == {}
    assert strike(history, 5, "a").keys() == {"a"}
