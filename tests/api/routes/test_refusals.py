"""Refusals arrive with their status, the field's path and the reason, and change nothing.

What is refused, value by value, is tested where it is judged: in the readers of documents and in
the store. Here each route needs one row for each way in which it refuses.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from search_spaces.spec.layout import Layout
from tests.kit.allocation import NODES, node, register
from tests.kit.api import CAMPAIGN, CLUSTER, INTRODUCTION, Api
from tests.kit.store import completed, failed

LAYOUT = Layout(num_microbatches=8)
OUTCOME = completed(LAYOUT).to_mapping()
BEAT = {"trial_id": 1, "attempt": 1, "iterations_done": 0}
MODEL = {
    "family": "gpt",
    "num_layers": 2,
    "hidden_size": 64,
    "num_heads": 2,
    "seq_length": 64,
    "vocab_size": 128,
}
ACCEPTED: dict[str, dict[str, Any]] = {
    "POST /campaigns": {**CAMPAIGN, "name": "second"},
    "POST /workers": INTRODUCTION,
    "PUT /models/mine": MODEL,
    "PUT /clusters/mine": {key: value for key, value in CLUSTER.items() if key != "name"},
    "POST /workers/{worker}/leases": {"wait_s": 0},
    "POST /tokens": {"name": "ci", "role": "viewer"},
    "POST /trials/3/outcome": {"worker_id": "{worker}", "attempt": 1, "outcome": OUTCOME},
}
"""Documents that a refused one differs from in the fields of its row."""


def status(**said: Any) -> dict[str, Any]:
    return {"status": said}


def beat(**said: Any) -> dict[str, Any]:
    return {"trials": [{**BEAT, **said}]}


def space(**knobs: Any) -> dict[str, Any]:
    return {"space": {**CAMPAIGN["space"], **knobs}}


def theirs(**said: Any) -> dict[str, Any]:
    return {"probe": {"trainer": "theirs", **said}}


DIGITS = "is not a number in plain digits"
FINITE = "'6.0' is not a finite number or null"
NO_LINE = "is not a number, a switch, or one line of text"
PROGRAM = "a campaign names a trainer and cannot bring a program"
OVER = "min_mfu=0.5 is over max_mfu=0.4"

QUERIES: list[tuple[str, str, str]] = [
    ("GET /campaigns?strategy=luck", "query.strategy", ""),
    ("GET /campaigns?model=a%00b", "query.model", ""),
    ("GET /campaigns?created_after=2026-01-01T00:00:00", "query.created_after", ""),
    ("GET /campaigns?limit=1_0", "query.limit", DIGITS),
    ("GET /campaigns?sate=RUNNING", "", "'sate' is unknown (did you mean 'state'?)"),
    ("GET /events?after=1_0", "query.after", DIGITS),
    ("GET /trials/1_0", "path.trial_id", DIGITS),
    ("GET /trials/1?full=yes", "", "'full' is unknown; there is none here"),
    ("GET /audit?until=2026", "query.until", "2026-01-31T12:00:00Z"),
    ("GET /audit?until=0.5", "query.until", "2026-01-31T12:00:00Z"),
    ("GET /audit?actor=a%00b", "query.actor", ""),
    ("GET /campaigns/first/trials?tp=1&tp=0_2", "query.tp", DIGITS),
    ("GET /campaigns/first/trials?tp=two", "query.tp.0", ""),
    ("GET /campaigns/first/trials?tpp=2", "", "'tpp' is unknown (did you mean 'tp'?)"),
    ("GET /campaigns/first/trials?sort=mood", "query.sort", ""),
    ("GET /campaigns/first/trials?min_mfu=0.5&max_mfu=0.4", "", OVER),
    (f"GET /campaigns/first/trials?cursor={'x' * 201}", "query.cursor", ""),
    ("GET /campaigns/first/leaderboard?sort=mood", "query.sort", ""),
    ("GET /campaigns/first/leaderboard?order=desc", "", "order=desc needs a sort key"),
    ("GET /campaigns/first/leaderboard?within=101", "query.within", ""),
    ("GET /campaigns/first/leaderboard?within=nan", "query.within", ""),
    ("GET /campaigns/first/report?nodes=2", "query.tokens", ""),
    ("POST /plans?tokens=many", "query.tokens", ""),
    ("POST /plans?nodes=4", "query.tokens", ""),
    ("POST /plans?top=0", "query.top", ""),
]

DOCUMENTS: list[tuple[str, Any, str, str]] = [
    ("POST /campaigns", [], "", "not a mapping"),
    ("POST /campaigns", space(tp={"from": 1, "to": "x", "step": 1}), "body.space.tp.to", ""),
    ("POST /campaigns", space(tp=[3, 6]), "", "heads_over_tp excludes 4"),
    ("POST /campaigns", {"model": "gpt-22b"}, "", "GiB"),
    (
        "POST /campaigns",
        {"start_from": ["nobody"]},
        "body.start_from",
        "no campaign named 'nobody'",
    ),
    ("POST /campaigns", theirs(command=["sh", "-c", "id"]), "body.probe.command", PROGRAM),
    ("POST /campaigns", {"probe": {"trainer": "../x"}}, "body.probe.trainer", "1 to 64 characters"),
    ("POST /campaigns", theirs(parameters={"a": {}}), "body.probe.parameters.a", NO_LINE),
    ("POST /campaigns/first/clone", {"budget": {}}, "body.budget", "at least one bound"),
    ("POST /campaigns/first/clone", {"budget": {"trials": 0}}, "body.budget.trials", ""),
    ("POST /campaigns/first/clone", {"colour": "red"}, "body.colour", ""),
    ("POST /campaigns/first/clone", [1], "", "not a mapping"),
    ("POST /campaigns/first/clone", {"start_from": ["x"]}, "body.start_from", "named 'x'"),
    ("PATCH /campaigns/first", {"budget": {"trials": 0}}, "body.budget.trials", ""),
    ("PATCH /campaigns/first", {"notes": None}, "body.notes", ""),
    ("PATCH /campaigns/first", {"notes": "\ud800"}, "body.notes", ""),
    ("PATCH /campaigns/first", {"seed": 3}, "body.seed", ""),
    ("PATCH /campaigns/first", [], "body", ""),
    ("PUT /models/mine", {"num_heads": 3}, "", "hidden_size=64"),
    ("PUT /models/mine", {"name": "other"}, "body.name", "under which the model is put"),
    ("PUT /models/mine", [], "", "not a mapping"),
    ("PUT /models/123", MODEL, "", "digits alone"),
    ("PUT /clusters/mine", {"num_nodes": 0}, "body.num_nodes", ""),
    ("PUT /clusters/mine", {"preset": "nothing"}, "body.cluster", "nothing"),
    ("POST /workers", {"num_nodes": 0}, "body.num_nodes", ""),
    ("POST /workers", {"name": ""}, "body.name", ""),
    ("POST /workers", {"speed": 1}, "body.speed", ""),
    ("POST /workers", {"allocation": {"scheduler": "pbs"}}, "body.allocation.scheduler", ""),
    ("POST /workers", {"allocation": {"ends_in_s": -1.0}}, "body.allocation.ends_in_s", ""),
    ("POST /workers", {"allocation": {"job_id": "x" * 65}}, "body.allocation.job_id", ""),
    ("POST /workers", {"allocation": {"shares_nodes": 1}}, "body.allocation.shares_nodes", ""),
    ("POST /workers", {"nodes": [{"name": "", "num_devices": 1}]}, "body.nodes.0.name", ""),
    ("POST /workers", {"nodes": [{"name": "n", "num_devices": 0}]}, "body.nodes.0.num_devices", ""),
    ("POST /workers", {"nodes": [NODES[0], NODES[0]]}, "body.nodes", ""),
    ("POST /workers/{worker}/leases", {"wait_s": 21}, "body.wait_s", ""),
    ("POST /workers/{worker}/leases", {"wait_s": "0"}, "body.wait_s", ""),
    ("POST /workers/{worker}/leases", {"room": {"nodes": -1, "devices": 0}}, "body.room.nodes", ""),
    ("POST /workers/{worker}/leases", {"room": {"nodes": 1}}, "body.room.devices", ""),
    ("POST /workers/{worker}/leases", {"longest_s": -1.0}, "body.longest_s", ""),
    ("POST /workers/{worker}/heartbeats", beat(trial_id="1"), "body.trials.0.trial_id", ""),
    ("POST /workers/{worker}/heartbeats", {"trials": [BEAT] * 1001}, "body.trials", "1001"),
    ("POST /workers/{worker}/heartbeats", beat(phase="resting"), "body.trials.0.phase", ""),
    ("POST /workers/{worker}/heartbeats", beat(held_s=-0.5), "body.trials.0.held_s", ""),
    ("POST /workers/{worker}/heartbeats", beat(held_s=1e10), "body.trials.0.held_s", ""),
    ("POST /workers/{worker}/heartbeats", beat(nodes_held=-1.0), "body.trials.0.nodes_held", ""),
    ("POST /workers/{worker}/heartbeats", status(idle_node_s=-1.0), "body.status.idle_node_s", ""),
    ("POST /workers/{worker}/heartbeats", status(idle_node_s="3"), "body.status.idle_node_s", ""),
    ("POST /workers/{worker}/heartbeats", status(ends_in_s=1e12), "body.status.ends_in_s", ""),
    ("POST /workers/{worker}/heartbeats", status(state="resting"), "body.status.state", ""),
    ("POST /workers/{worker}/heartbeats", status(mood="good"), "body.status.mood", ""),
    ("POST /trials/3/outcome", {"attempt": "1"}, "body.attempt", ""),
    ("POST /trials/3/outcome", {"outcome": {**OUTCOME, "state": "failed"}}, "body.outcome", ""),
    ("POST /trials/3/outcome", {"outcome": {**OUTCOME, "mood": 1}}, "body.outcome.mood", ""),
    ("POST /trials/1/repeat", {"times": 0}, "body.times", ""),
    ("POST /trials/1/repeat", {"times": 21}, "body.times", ""),
    ("POST /trials/1/repeat", {"times": "2"}, "body.times", ""),
    ("POST /trials/1/repeat", {"often": 2}, "body.often", ""),
    ("POST /nodes/local-cpu/n1/quarantine", {"reason": ""}, "body.reason", ""),
    ("POST /nodes/local-cpu/n1/quarantine", {"reason": "a\nb\u202e"}, "body.reason", ""),
    ("POST /tokens", {"name": "ci", "role": "system"}, "body.role", ""),
    ("POST /tokens", {"expires_at": "2030-01-01T00:00:00"}, "body.expires_at", ""),
]

STATUSES_OF_NODES: list[tuple[list[dict[str, Any]], str]] = [
    ([node("n1", "dead")], "nodes.0.state"),
    ([node("n1", doing="x" * 2001)], "nodes.0.doing"),
    ([node("n1", free_devices=-1)], "nodes.0.free_devices"),
    ([node("n1"), node("n1")], "nodes"),
    ([node("n1", health={"x": "y" * 5000})], "nodes.0.health"),
    ([node("n1", health=[1])], "nodes.0.health"),
]

OTHER_REFUSALS: list[tuple[int, str, Any, str]] = [
    (400, "GET /campaigns?cursor=!", None, "cursor"),
    (400, "GET /campaigns?cursor=OTk5OTk5OTk5OTk5OTk5OTk5OTk5OTk", None, "cursor"),
    (404, "GET /campaigns/7", None, "7"),
    (404, "GET /campaigns/999999999999999999999999999999", None, "999"),
    (404, "GET /campaigns/nobody/trials", None, "nobody"),
    (404, "GET /campaigns/nobody/leaderboard", None, "nobody"),
    (404, "GET /campaigns/nobody/table", None, "nobody"),
    (404, "GET /campaigns/nobody/exports?format=trainer", None, "nobody"),
    (404, "POST /campaigns/nobody/pause", None, "nobody"),
    (404, "GET /allocations/nobody", None, "there is no allocation 'nobody'"),
    (404, "GET /plans/99", None, "there is no plan 99"),
    (404, "GET /trials/99/log", None, "99"),
    (404, "POST /trials/99/repeat", None, "99"),
    (404, "POST /trials/99/cancel", None, "99"),
    (404, "POST /trials/999/outcome", ACCEPTED["POST /trials/3/outcome"], "999"),
    (422, "POST /trials/0/outcome", ACCEPTED["POST /trials/3/outcome"], "trial_id"),
    (404, "PUT /clusters/..", MODEL, "nothing at"),
    (404, "POST /nodes/local-cpu/n9/release", None, "no allocation of cluster"),
    (404, "POST /nodes/frontier/n1/release", None, "no allocation of cluster"),
    (404, "POST /nodes/local-cpu/n9/quarantine", None, "no allocation of cluster"),
    (
        409,
        "POST /nodes/local-cpu/n1/release",
        None,
        "node n1 of cluster local-cpu is not in quaran",
    ),
    (409, "POST /campaigns", CAMPAIGN, "'first' exists already"),
    (409, "POST /campaigns/first/clone", {"name": "first"}, "exists already"),
    (409, "POST /trials/3/outcome", {"attempt": 5}, "no attempt 5"),
    (409, "POST /trials/2/repeat", None, "requeue it"),
    (409, "POST /trials/1/requeue", None, ""),
    (409, "POST /trials/1/cancel", None, "it is COMPLETED"),
]


@pytest.fixture(scope="module")
def api(lasting: TestClient) -> Iterator[Api]:
    """Of the trials the first is measured, the second has crashed and the third runs."""
    api = Api(lasting)
    before = api.submit()
    worker = register(api)
    api.complete(worker, "first", Layout(tp=2, num_microbatches=8))
    for layout in (Layout(pp=2, num_microbatches=8), LAYOUT):
        api.store.trials.add(before["id"], layout)
        lease = api.lease(worker)
        if lease["trial_id"] == 2:
            api.report(worker, lease, failed("crashed"))
    yield api
    assert len(api.get("/campaigns")["campaigns"]) == 1
    after = api.get("/campaigns/first")
    assert (after["spec"], after["notes"]) == (before["spec"], "")
    trials = api.get("/campaigns/first/trials")["trials"]
    assert [trial["state"] for trial in trials] == ["COMPLETED", "FAILED", "RUNNING"]
    assert [each["name"] for each in api.get("/workers")["workers"]] == ["w1"]
    for kind in ("models", "clusters"):
        assert all(each["preset"] for each in api.get(f"/{kind}")[kind])


def refused(api: Api, code: int, request: str, body: Any) -> Any:
    """The problem that the service answers."""
    (worker,) = api.get("/workers")["workers"]
    if isinstance(body, dict):
        body = {**ACCEPTED.get(request, {}), **body}
    method, path = request.replace("{worker}", worker["id"]).split()
    answer = api.http.request(
        method,
        f"/v1{path}",
        content=json.dumps(body).replace("{worker}", worker["id"]),  # ASCII, surrogates too
        headers={"Content-Type": "application/json"},
    )
    assert answer.status_code == code, answer.text
    return answer.json()


def assert_names(problem: Any, field: str) -> None:
    """The errors are about the field alone; without one they are about the whole request."""
    fields = {error["field"].partition(".literal[")[0] for error in problem.get("errors", ())}
    assert fields == ({field} if field else set())


@pytest.mark.parametrize(("request_line", "field", "says"), QUERIES)
def test_a_wrong_query_is_refused_by_name(
    api: Api, request_line: str, field: str, says: str
) -> None:
    body = CAMPAIGN if "plans" in request_line else None
    problem = refused(api, 422, request_line, body)
    assert_names(problem, field)
    assert says in problem["detail"]


@pytest.mark.parametrize(
    ("request_line", "changes", "field", "says"), DOCUMENTS, ids=lambda value: str(value)[:60]
)
def test_a_wrong_document_is_refused_by_the_path_of_its_field(
    api: Api, request_line: str, changes: Any, field: str, says: str
) -> None:
    problem = refused(api, 422, request_line, changes)
    assert_names(problem, field)
    assert says in problem["detail"]


@pytest.mark.parametrize(("nodes", "field"), STATUSES_OF_NODES)
def test_a_wrong_status_of_a_node_is_refused_by_its_field(
    api: Api, nodes: list[dict[str, Any]], field: str
) -> None:
    problem = refused(api, 422, "POST /workers/{worker}/heartbeats", status(nodes=nodes))
    assert_names(problem, f"body.status.{field}")


@pytest.mark.parametrize(("code", "request_line", "body", "says"), OTHER_REFUSALS)
def test_what_cannot_be_done_is_refused_with_its_reason(
    api: Api, code: int, request_line: str, body: Any, says: str
) -> None:
    assert says in refused(api, code, request_line, body)["detail"]


def test_a_wrong_field_deep_in_an_outcome_is_named(api: Api) -> None:
    outcome = json.loads(json.dumps(OUTCOME))
    outcome["measurement"]["iterations"][1]["loss"] = "6.0"
    problem = refused(api, 422, "POST /trials/3/outcome", {"outcome": outcome})
    assert problem["detail"] == f"body.outcome.measurement.iterations.1.loss: {FINITE}"
