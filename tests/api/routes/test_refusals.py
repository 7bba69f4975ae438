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

from layout_tuner.errors import MAX_PARTS
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.trainers.exports.export import FORMATS
from tests.kit.allocation import NODES, node, register
from tests.kit.api import CAMPAIGN, CLUSTER, INTRODUCTION, MACHINE, MODEL, Api, answered
from tests.kit.store import completed, failed
from tests.search_spaces.tables.tables import make_row, make_text

LAYOUT = Layout(num_microbatches=8)
BEAT = {"trial_id": 1, "attempt": 1, "iterations_done": 0}
OUTCOME = completed(LAYOUT).to_mapping()
FIRST = OUTCOME["measurement"]["iterations"][0]
REPORT = {"worker_id": "{worker}", "attempt": 1, "outcome": OUTCOME}
TABLE = make_text(make_row())
WRONG_TABLE = make_text(make_row(), make_row(tp=3))
MANY = {f"p{number}": {} for number in range(33)}
NESTED = "(" * 9999 + ")" * 9999
THEIRS = "body.trainer_parameters.theirs"
DEFAULT = f"{THEIRS}.p.default"
LOSS = "body.outcome.measurement.iterations.0.loss"
ACCEPTED: dict[str, dict[str, Any]] = {
    "POST /campaigns": {**CAMPAIGN, "name": "second"},
    "POST /plans": CAMPAIGN,
    "POST /workers": INTRODUCTION,
    "PUT /models/mine": MODEL,
    "PUT /clusters/mine": MACHINE,
    "POST /workers/{worker}/leases": {"wait_s": 0},
    "POST /tokens": {"name": "ci", "role": "viewer"},
    "POST /trials/3/outcome": REPORT,
    "POST /trials/999/outcome": REPORT,
}
"""Documents that a refused one differs from in the fields of its row."""


def status(*nodes: dict[str, Any], **said: Any) -> dict[str, Any]:
    return {"status": {**said, "nodes": nodes} if nodes else said}


def beat(**said: Any) -> dict[str, Any]:
    return {"trials": [{**BEAT, **said}]}


def space(**knobs: Any) -> dict[str, Any]:
    return {"space": {**CAMPAIGN["space"], **knobs}}


def takes(**parameters: Any) -> dict[str, Any]:
    return {"trainer_parameters": {"theirs": parameters}}


def matches(pattern: str) -> dict[str, Any]:
    return takes(p={"type": "text", "pattern": pattern})


def measured(**changes: Any) -> dict[str, Any]:
    return {"outcome": {**OUTCOME, "measurement": {**OUTCOME["measurement"], **changes}}}


DIGITS = "is not a number in plain digits"
PROGRAM = "a campaign names a trainer and cannot bring a program"
EARLIER = "OTk5OTk5OTk5OTk5OTk5OTk5OTk5OTk"

WAYS: dict[str, list[tuple[int, Any, str, str]]] = {
    "GET /campaigns": [
        (422, "?strategy=luck", "query.strategy", ""),
        (422, "?model=a%00b", "query.model", ""),
        (422, "?created_after=2026-01-01T00:00:00", "query.created_after", ""),
        (400, "?cursor=!", "", "cursor"),
        (400, f"?cursor={EARLIER}", "", "cursor"),
    ],
    "GET /events": [(422, "?after=1_0", "query.after", DIGITS)],
    "GET /trials/1_0": [(422, "", "path.trial_id", DIGITS)],
    "GET /trials/1": [(422, "?full=yes", "", "'full' is unknown; there is none here")],
    "GET /audit": [
        (422, "?until=2026", "query.until", "2026-01-31T12:00:00Z"),
        (422, "?until=0.5", "query.until", "2026-01-31T12:00:00Z"),
        (422, "?actor=a%00b", "query.actor", ""),
    ],
    "GET /campaigns/first/trials": [
        (422, "?tp=1&tp=0_2", "query.tp", DIGITS),
        (422, "?tp=two", "query.tp.0", ""),
        (422, f"?{'tp=1&' * 101}", "query.tp", ""),
        (422, "?tpp=2", "", "'tpp' is unknown (did you mean 'tp'?)"),
        (422, "?node=%00", "query.node.0", ""),
        (422, "?sort=mood", "query.sort", ""),
        (422, "?min_mfu=nan", "query.min_mfu", ""),
        (422, "?min_peak_memory_bytes=1.5", "query.min_peak_memory_bytes", ""),
        (422, "?min_mfu=0.5&max_mfu=0.4", "", "min_mfu=0.5 is over max_mfu=0.4"),
        (422, f"?cursor={'x' * 201}", "query.cursor", ""),
    ],
    "GET /campaigns/first/leaderboard": [
        (422, "?sort=mood", "query.sort", ""),
        (422, "?order=desc", "", "order=desc needs a sort key"),
        (422, "?within=101", "query.within", ""),
        (422, "?within=nan", "query.within", ""),
        (422, "?objective=memory_headroom", "query.objective", ""),
    ],
    "GET /campaigns/first/report": [(422, "?nodes=2", "query.tokens", "")],
    "GET /campaigns/first/exports": [
        (422, "?format=paper", "", ", ".join(FORMATS)),
        (404, "?format=trainer&trial=9", "", "9"),
        (409, "?format=trainer&trial=2", "", "is FAILED (crashed);"),
        (409, "?format=megatron-lm&trial=3", "", "is RUNNING;"),
    ],
    "POST /plans": [
        (422, "?tokens=many", "query.tokens", ""),
        (422, "?nodes=4", "query.tokens", ""),
        (422, "?top=0", "query.top", ""),
    ],
    "POST /campaigns": [
        (415, ("text/html", "x"), "", "application/yaml"),
        (400, ("application/yaml", "a: x\nb: [t\nc: 1\n"), "", "line 3"),
        (422, {"start_from": ["x"]}, "body.start_from", "no campaign named 'x'"),
        (422, {"probe": {"trainer": "t", "command": ["id"]}}, "body.probe.command", PROGRAM),
        (422, {"probe": {"trainer": "../x"}}, "body.probe.trainer", "1 to 64 characters"),
        (422, {"probe": {"trainer": "t", "parameters": {"a": {}}}}, "body.probe.parameters.a", ""),
        (409, CAMPAIGN, "", "'first' exists already"),
    ],
    "POST /campaigns/first/clone": [
        (409, {"name": "first"}, "", "exists already"),
        (422, {"budget": {}}, "body.budget", "at least one bound"),
        (422, {"budget": {"trials": 0}}, "body.budget.trials", ""),
        (422, {"colour": "red"}, "body.colour", ""),
        (422, [1], "", "not a mapping"),
        (422, {"start_from": ["x"]}, "body.start_from", "named 'x'"),
    ],
    "PATCH /campaigns/first": [
        (422, {"budget": {"trials": 0}}, "body.budget.trials", ""),
        (422, {"notes": None}, "body.notes", ""),
        (422, {"notes": "\ud800"}, "body.notes", ""),
        (422, {"seed": 3}, "body.seed", ""),
        (422, [], "body", ""),
    ],
    "POST /campaigns/import": [
        (415, {}, "", "'application/json' is not text/csv"),
        (413, ("text/csv", b"x" * ((4 << 20) + 1)), "", "4 MiB"),
        (422, ("text/csv", "/etc/hostname"), "", "the header is one column, '/etc/hostname'"),
        (422, ("text/csv", b"tp,pp\n\xff,2\n"), "", "line 2 is not UTF-8"),
        (422, ("text/csv", WRONG_TABLE), "", "row 2 (line 3): tp*pp*dp=3*2*2=12 is not num_dev"),
    ],
    "POST /campaigns/import?name=first": [(409, ("text/csv", TABLE), "", "exists already")],
    "POST /campaigns/import?name=a b": [(422, ("text/csv", TABLE), "", "1 to 64 characters")],
    "POST /campaigns/import?cell=model=x": [(422, ("text/csv", TABLE), "", "no cell is sel")],
    "POST /campaigns/import?cell=colour=red": [(422, ("text/csv", TABLE), "", "selects no cells")],
    "PUT /models/mine": [
        (422, {"num_heads": 3}, "", "hidden_size=64"),
        (422, {"name": "other"}, "body.name", "under which the model is put"),
        (422, [], "", "not a mapping"),
        (415, ("text/plain", "tiny"), "", "application/yaml"),
    ],
    "PUT /models/123": [(422, MODEL, "", "digits alone")],
    "DELETE /models/tiny": [(409, "", "", "'tiny' is a preset")],
    "PUT /clusters/mine": [
        (422, {"num_nodes": 0}, "body.num_nodes", ""),
        (422, {"preset": "nothing"}, "body.cluster", "nothing"),
        (400, ("application/json", "{"), "", "line 1"),
        (413, ("application/json", b" " * (257 << 10)), "", "256 KiB"),
    ],
    "PUT /clusters/..": [(404, MODEL, "", "nothing at")],
    "PUT /clusters/frontier": [(409, MACHINE, "", "'frontier' is a preset")],
    "DELETE /clusters/frontier": [(409, "", "", "'frontier' is a preset")],
    "POST /workers": [
        (422, {"num_nodes": 0}, "body.num_nodes", ""),
        (422, {"speed": 1}, "body.speed", ""),
        (422, {"allocation": {"scheduler": "pbs"}}, "body.allocation.scheduler", ""),
        (422, {"nodes": [NODES[0], NODES[0]]}, "body.nodes", ""),
        (422, takes(p=3), f"{THEIRS}.p", "a parameter is 3, not a mapping"),
        (422, takes(p={"type": "number"}), f"{THEIRS}.p.type", "'number' is unknown"),
        (422, takes(p={"type": "choice", "choices": ["\u202e"]}), f"{THEIRS}.p.choices", ""),
        (422, takes(p={"type": "text", "pattern": ".*", "default": "\0"}), DEFAULT, ""),
        (422, takes(p={"type": "path", "below": "/\x1b"}), f"{THEIRS}.p.below", ""),
        (422, matches("(a+)+"), f"{THEIRS}.p.pattern", "may take long to match"),
        (422, matches("\u202e"), f"{THEIRS}.p.pattern", "not one line"),
        (422, matches("a{999999999999}"), f"{THEIRS}.p.pattern", "regular expres"),
        (422, matches(NESTED), f"{THEIRS}.p.pattern", "regular expression"),
        (422, takes(**{"\x1b": {"type": "int"}}), THEIRS, "not a name of small letters"),
        (422, takes(**MANY), THEIRS, "33 are more than 32"),
    ],
    "POST /workers/{worker}/leases": [
        (422, {"wait_s": 21}, "body.wait_s", ""),
        (422, {"wait_s": "0"}, "body.wait_s", ""),
        (422, {"room": {"nodes": 1}}, "body.room.devices", ""),
    ],
    "POST /workers/{worker}/heartbeats": [
        (422, beat(trial_id="1"), "body.trials.0.trial_id", ""),
        (422, {"trials": [BEAT] * 1001}, "body.trials", "1001"),
        (422, beat(phase="resting"), "body.trials.0.phase", ""),
        (422, status(mood="good"), "body.status.mood", ""),
        (422, status(node("n1"), node("n1")), "body.status.nodes", ""),
        (422, status(node("n1", "dead")), "body.status.nodes.0.state", ""),
        (422, status(node("n1", health={"x": "y" * 5000})), "body.status.nodes.0.health", ""),
        (422, status(node("n1", health=[1])), "body.status.nodes.0.health", ""),
    ],
    "POST /trials/3/outcome": [
        (422, {"attempt": "1"}, "body.attempt", ""),
        (422, {"outcome": {**OUTCOME, "state": "failed"}}, "body.outcome", ""),
        (422, {"outcome": {**OUTCOME, "mood": 1}}, "body.outcome.mood", ""),
        (422, measured(others_share=1.5), "body.outcome.measurement.others_share", ""),
        (422, measured(iterations=[{**FIRST, "loss": "6.0"}]), LOSS, f"{LOSS}: '6.0' is not a"),
        (409, {"attempt": 5}, "", "no attempt 5"),
    ],
    "POST /trials/0/outcome": [(422, REPORT, "path.trial_id", "")],
    "POST /trials/1/repeat": [
        (422, {"times": 0}, "body.times", ""),
        (422, {"times": "2"}, "body.times", ""),
        (422, {"often": 2}, "body.often", ""),
    ],
    "POST /nodes/local-cpu/n1/quarantine": [
        (422, {"reason": ""}, "body.reason", ""),
        (422, {"reason": "a\nb\u202e"}, "body.reason", ""),
    ],
    "POST /tokens": [(422, {"expires_at": "2030-01-01T00:00:00"}, "body.expires_at", "")],
}
"""By route the ways in which it refuses: status, what is asked, the wrong field, and a sentence.

What is asked is a query, changes of the accepted document, another document, or its type and text.
"""

ABSENT_OR_NOT_SO: list[tuple[int, str, str]] = [
    (404, "GET /campaigns/7", "7"),
    (404, "GET /campaigns/nobody/trials", "nobody"),
    (404, "GET /campaigns/nobody/leaderboard", "nobody"),
    (404, "GET /campaigns/nobody/table", "nobody"),
    (404, "GET /campaigns/nobody/report", "nobody"),
    (404, "GET /campaigns/nobody/exports?format=trainer", "nobody"),
    (404, "DELETE /models/mine", "no model named 'mine'"),
    (404, "GET /plans/99", "there is no plan 99"),
    (404, "GET /trials/3/log", "RUNNING and has no log"),
    (404, "POST /trials/99/repeat", "99"),
    (404, "POST /trials/99/cancel", "99"),
    (404, "POST /trials/999/outcome", "999"),
    (409, "POST /trials/2/repeat", "requeue it"),
    (409, "POST /trials/1/requeue", ""),
    (409, "POST /trials/1/cancel", "it is COMPLETED"),
    (404, "POST /nodes/local-cpu/n9/release", "no allocation of cluster"),
    (404, "POST /nodes/frontier/n1/release", "no allocation of cluster"),
    (404, "POST /nodes/local-cpu/n9/quarantine", "no allocation of cluster"),
    (409, "POST /nodes/local-cpu/n1/release", "node n1 of cluster local-cpu is not in quaran"),
]

CASES = [
    *((request, *way) for request, ways in WAYS.items() for way in ways),
    *((request, status, "", "", says) for status, request, says in ABSENT_OR_NOT_SO),
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


@pytest.fixture(scope="module")
def worker(api: Api) -> str:
    (only,) = api.get("/workers")["workers"]
    return str(only["id"])


def content_of(request: str, asked: Any) -> tuple[str, str | bytes]:
    """The type and the text of what is sent."""
    if isinstance(asked, tuple):
        return asked
    if isinstance(asked, (str, dict)):
        asked = {**ACCEPTED.get(request, {}), **(asked if isinstance(asked, dict) else {})}
    return "application/json", json.dumps(asked)  # ASCII, surrogates too


@pytest.mark.parametrize(
    ("request_line", "code", "asked", "field", "says"),
    CASES,
    ids=[f"{code} {request} {field or says}"[:80] for request, code, _, field, says in CASES],
)
def test_a_refusal_has_its_status_the_path_of_the_field_and_the_reason(
    api: Api, worker: str, request_line: str, code: int, asked: Any, field: str, says: str
) -> None:
    kind, content = content_of(request_line, asked)
    query = asked if isinstance(asked, str) else ""
    method, path = request_line.replace("{worker}", worker).split(" ", 1)
    if isinstance(content, str):
        content = content.replace("{worker}", worker)
    headers = {"Content-Type": kind}
    answer = api.http.request(method, f"/v1{path}{query}", content=content, headers=headers)
    problem = answered(answer, code).json()
    assert says in problem["detail"]
    fields = {error["field"].partition(".literal[")[0] for error in problem.get("errors", ())}
    assert fields == ({field} if field else set()), "without one it is about the whole request"


SECTIONS: dict[str, dict[str, Any]] = {
    "model": {"preset": "tiny", "num_layers": 0, "num_heads": -1, "colour": 1},
    "cluster": {**CLUSTER, "num_nodes": 0, "device_memory_gb": "much", "colour": 1},
    **space(tp=[0], pp={"from": "x", "to": 0}, tpp=1),
    "budget": {"trials": 0, "node_hours": "few", "trails": 1},
    "probe": {"warmup": 0, "deadline": "soon", "iterations": True},
    "stop": {"early": 1, "remeasure": -1},
    "constraints": {"memory_headroom": 2},
}
WRONG_IN_SECTIONS = {
    *("model.num_layers", "model.num_heads", "model.colour", "stop.early", "stop.remeasure"),
    *("cluster.num_nodes", "cluster.device_memory_gb", "cluster.colour"),
    *("space.tp", "space.pp.from", "space.pp.to", "space.tpp", "constraints.memory_headroom"),
    *("budget.trials", "budget.node_hours", "budget.trails"),
    *("probe.warmup", "probe.deadline", "probe.iterations"),
}
TEXTS = {"name": "a b", "objective": "speed", "strategy": "luck", "knowledge": "all"}
NO_MODEL = {"num_layers": 0, "num_heads": 0}
NO_CLUSTER = {"num_nodes": 0, "devices_per_node": 0}
WHOLE: dict[str, Any] = {**TEXTS, "seed": -1, "start_from": 3, "colour": 1, "buget": {}}


@pytest.mark.parametrize(
    ("request_line", "document", "fields"),
    [
        ("POST /campaigns", {**CAMPAIGN, **SECTIONS}, WRONG_IN_SECTIONS),
        ("POST /campaigns", {**CAMPAIGN, **WHOLE}, set(WHOLE)),
        ("POST /campaigns", {**CAMPAIGN, "model": "tyni", **space(tp=0)}, {"model", "space.tp"}),
        ("PUT /models/ours", {"preset": "tiny", **NO_MODEL}, set(NO_MODEL)),
        ("PUT /clusters/ours", {"preset": "frontier", **NO_CLUSTER}, set(NO_CLUSTER)),
    ],
    ids=["sections", "whole fields", "an unknown name", "a model", "a cluster"],
)
def test_all_wrong_fields_of_a_document_are_listed_by_their_paths(
    api: Api, request_line: str, document: dict[str, Any], fields: set[str]
) -> None:
    method, path = request_line.split()
    refused = answered(api.http.request(method, f"/v1{path}", json=document), 422)
    assert {each["field"] for each in refused.json()["errors"]} == {f"body.{f}" for f in fields}


def test_only_the_first_of_very_many_wrong_fields_are_listed(api: Api) -> None:
    problem = api.post("/campaigns", {**SECTIONS, **WHOLE}, status=422)
    assert len(problem["errors"]) == MAX_PARTS
    assert "more" in problem["detail"]
