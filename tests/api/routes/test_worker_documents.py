"""What workers say beyond their trials: what is refused, and what is leased to them."""

from typing import Any

import pytest

from search_spaces.spec.layout import Layout
from tests.kit.allocation import NODES, node, register
from tests.kit.api import INTRODUCTION, Api


@pytest.fixture
def campaign_id(api: Api) -> int:
    return int(api.submit()["id"])


@pytest.mark.parametrize(
    ("status", "named"),
    [
        ({"idle_node_s": -1.0}, "idle_node_s"),
        ({"idle_node_s": "3"}, "idle_node_s"),
        ({"ends_in_s": 1e12}, "ends_in_s"),
        ({"state": "resting"}, "state"),
        ({"mood": "good"}, "mood"),
        ({"nodes": [node("n1", "dead")]}, "nodes.0.state"),
        ({"nodes": [node("n1", doing="x" * 2001)]}, "nodes.0.doing"),
        ({"nodes": [node("n1", free_devices=-1)]}, "nodes.0.free_devices"),
        ({"nodes": [node("n1"), node("n1")]}, "nodes"),
        ({"nodes": [node("n1", health={"x": "y" * 5000})]}, "nodes.0.health"),
        ({"nodes": [node("n1", health=[1])]}, "nodes.0.health"),
    ],
)
def test_an_invalid_status_is_refused_with_its_field(
    api: Api, status: dict[str, Any], named: str
) -> None:
    worker = register(api)
    problem = api.post(f"/workers/{worker}/heartbeats", {"status": status}, status=422)
    (error,) = problem["errors"]
    assert error["field"] == f"body.status.{named}"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"allocation": {"scheduler": "pbs"}}, "allocation.scheduler"),
        ({"allocation": {"ends_in_s": -1.0}}, "allocation.ends_in_s"),
        ({"allocation": {"job_id": "x" * 65}}, "allocation.job_id"),
        ({"allocation": {"shares_nodes": 1}}, "allocation.shares_nodes"),
        ({"nodes": [{"name": "", "num_devices": 1}]}, "nodes.0.name"),
        ({"nodes": [{"name": "n", "num_devices": 0}]}, "nodes.0.num_devices"),
        ({"nodes": [NODES[0], NODES[0]]}, "nodes"),
    ],
)
def test_an_invalid_allocation_is_refused_with_its_field(
    api: Api, changes: dict[str, Any], named: str
) -> None:
    (error,) = api.post("/workers", {**INTRODUCTION, **changes}, status=422)["errors"]
    assert error["field"] == f"body.{named}"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"phase": "resting"}, "phase"),
        ({"held_s": -0.5}, "held_s"),
        ({"held_s": 1e10}, "held_s"),
        ({"nodes_held": -1.0}, "nodes_held"),
        ({"waiting_because": "x" * 2001}, "waiting_because"),
    ],
)
def test_an_invalid_heartbeat_is_refused_with_its_field(
    api: Api, changes: dict[str, Any], named: str
) -> None:
    worker = register(api)
    trial = {"trial_id": 1, "attempt": 1, "iterations_done": 0, **changes}
    problem = api.post(f"/workers/{worker}/heartbeats", {"trials": [trial]}, status=422)
    (error,) = problem["errors"]
    assert error["field"] == f"body.trials.0.{named}"


@pytest.mark.parametrize(
    ("room", "longest_s", "numbers"),
    [
        (None, None, [1, 2, 3]),
        ({"nodes": 2, "devices": 0}, None, [1, 2, 3]),
        ({"nodes": 1, "devices": 0}, None, [2, 3]),
        ({"nodes": 0, "devices": 4}, None, [2, 3]),
        ({"nodes": 0, "devices": 2}, None, [3]),
        ({"nodes": 0, "devices": 0}, None, []),
        (None, 299.0, []),
        (None, 300.0, [1, 2, 3]),
    ],
)
def test_a_worker_leases_what_its_room_and_its_time_allow_the_oldest_first(
    api: Api, campaign_id: int, room: Any, longest_s: float | None, numbers: list[int]
) -> None:
    worker = register(api)
    for layout in (Layout(num_nodes=2, dp=8), Layout(dp=4), Layout(dp=1)):
        api.store.trials.add(campaign_id, layout)
    body = {"max_trials": 9, "wait_s": 0, "room": room, "longest_s": longest_s}
    leases = api.post(f"/workers/{worker}/leases", body)["leases"]
    assert [lease["number"] for lease in leases] == numbers


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "body",
    [
        {"room": {"nodes": -1, "devices": 0}},
        {"room": {"nodes": 1}},
        {"room": {"nodes": 1, "devices": "2"}},
        {"longest_s": -1.0},
        {"longest_s": "3"},
    ],
)
def test_an_invalid_lease_request_is_refused(api: Api, body: dict[str, Any]) -> None:
    api.post(f"/workers/{register(api)}/leases", {"wait_s": 0, **body}, status=422)
