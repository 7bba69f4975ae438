"""Every document from outside is accepted, or refused with the field's name: no server error."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from typing import Any, Final

import pytest
import yaml
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from layout_tuner.api.app import create_app
from layout_tuner.api.http.request_bodies import BodyRoute
from layout_tuner.api.settings import Settings
from layout_tuner.documents.json_and_yaml import read_json
from layout_tuner.documents.limits import MAX_DEPTH, text_problem
from layout_tuner.errors import DocumentInvalidError, DocumentMalformedError
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.layouts.layout import Layout
from tests.kit.api import CAMPAIGN, INTRODUCTION, TOKEN, Api, answered
from tests.kit.bodies import BODIES, Body
from tests.kit.hostile_texts import Place, changed, mappings, text_places
from tests.kit.odd_values import (
    bodies_with_odd_maps,
    nested,
    odd_bodies,
    odd_texts,
    odd_yaml_bodies,
)
from tests.kit.store import completed, failed

JSON = {"Content-Type": "application/json"}
YAML = {"Content-Type": "application/yaml"}
LISTS: Final = (
    *("allocations", "nodes", "workers", "campaigns", "models", "clusters", "audit", "tokens"),
    *("campaigns/first/trials", "campaigns/first/leaderboard"),
)

SURROGATE = "x\ud800"
NUL = "x\x00"
TOO_LONG = "x" * 300_000


# Depth and numbers


def test_a_heartbeat_that_is_nested_too_deeply_is_refused_and_breaks_no_list(
    api: Api, http: TestClient
) -> None:
    worker = api.register(nodes=[{"name": "n1", "num_devices": 4}])
    for depth, status in ((MAX_DEPTH + 1, 422), (15_000, 422), (MAX_DEPTH - 4, 200)):
        health = nested(depth)
        body = f'{{"status": {{"nodes": [{{"name": "n1", "state": "idle", "health": {health}}}]}}}}'
        answer = http.post(f"/v1/workers/{worker}/heartbeats", content=body, headers=JSON)
        assert answer.status_code == status, answer.text
        assert status == 200 or "nested too deeply, more than 100 levels" in answer.text
        for path in LISTS[:8]:
            api.get(f"/{path}")
    (node,) = api.get("/nodes")["nodes"]
    assert node["node"]["health"] == json.loads(health)


@pytest.mark.parametrize(
    "body",
    [
        '{"a": 1, "a": 2}',
        '[{"a\\"": 1, "a\\u0022" : 2}]',
        '[{"\\\\": 1, "\\u005c" : 2}, "\\\\"]',
        '{"a": "\\u0000"}',
        '{"\\u0000": 1}',
        "[" * 101 + "]" * 101,
        '{"a":' * 101 + "1" + "}" * 101,
        "[" + "9" * 310 + "]",
        "-1e999",
    ],
)
def test_requests_are_refused_that_repeat_fields_or_exceed_a_limit(body: str) -> None:
    with pytest.raises((DocumentInvalidError, DocumentMalformedError)):
        read_json(body.encode(), text_rule=text_problem)


@pytest.mark.parametrize(
    "body",
    [
        "[" * 100 + "]" * 100,
        '{"a":' * 100 + "1" + "}" * 100,
        r'{"a": "quotes \" and \\", "b\\": "\n\\\"", "c": ":\"a\":1,"}',
        '{"gr\u00f6\u00dfe": "\\u00e9"}',
        "[1.7e308, -1.7e308, 1e-400]",
        "7",
    ],
)
def test_requests_up_to_the_limits_are_accepted(body: str) -> None:
    assert read_json(body.encode(), text_rule=text_problem) == json.loads(body)


@pytest.mark.parametrize("depth", [MAX_DEPTH, 985])
@pytest.mark.parametrize("headers", [JSON, YAML], ids=["json", "yaml"])
def test_a_campaign_that_is_nested_too_deeply_is_refused(
    lasting: TestClient, headers: dict[str, str], depth: int
) -> None:
    for field in ("model", "space"):
        body = json.dumps({**CAMPAIGN, field: "@"}).replace('"@"', nested(depth))
        refused = lasting.post("/v1/campaigns", content=body, headers=headers)
        answered(refused, 422, "nested too deeply")


def test_numbers_of_thousands_of_digits_in_paths_queries_and_headers_are_refused(
    lasting: TestClient,
) -> None:
    digits = "7" * 5000
    submitter = Api(lasting).holder("somebody", "submitter")
    asked = [
        ("GET", f"/campaigns/{digits}", {}),
        ("GET", f"/campaigns/{digits}/leaderboard", {}),
        ("PATCH", f"/campaigns/{digits}", submitter),
        ("POST", f"/campaigns/{digits}/pause", submitter),
        ("POST", f"/trials/{digits}/cancel", submitter),
        ("GET", f"/campaigns?limit={digits}", {}),
        ("GET", f"/campaigns?cursor={digits}", {}),
        ("GET", f"/audit?since={digits}", {}),
        ("POST", f"/plans?top={digits}", submitter),
        ("POST", f"/plans?tokens={digits}", submitter),
        ("GET", f"/campaigns/first/report?nodes={digits}", {}),
        ("GET", "/events", {"Last-Event-ID": digits}),
        ("POST", "/campaigns", {"Content-Length": digits}),
    ]
    for method, path, headers in asked:
        answer = lasting.request(method, f"/v1{path}", headers=headers)
        assert 400 <= answer.status_code < 500, (path[:40], answer.text)


# YAML


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("name: a\n2020-01-01: b\n", "unknown campaign field '2020-01-01'"),
        ("name: a\n~: b\n", "the key None is not text"),
        ("seed: .nan\n", "seed: NaN is not a JSON number"),
        ('name: "a\\0b"\n', "cannot be shown"),
        ("[a, b]\n", "not a mapping"),
    ],
)
def test_what_yaml_can_say_and_json_cannot_is_refused(
    lasting: TestClient, body: str, why: str
) -> None:
    headers = {**YAML, "Idempotency-Key": "k"}
    answered(lasting.post("/v1/campaigns", content=body, headers=headers), 422, why)


def test_a_request_is_the_same_in_yaml_and_in_json(api: Api, http: TestClient) -> None:
    links = {"intra_node_bandwidth_bytes_per_s": {2: 1e9, 4: 2e9}}
    document = {**CAMPAIGN, "cluster": {**CAMPAIGN["cluster"], **links}}
    key = {"Idempotency-Key": "same"}
    first, again = (
        answered(http.post("/v1/campaigns", content=text, headers={**kind, **key}), 201)
        for text, kind in ((yaml.safe_dump(document), YAML), (json.dumps(document), JSON))
    )
    assert again.json()["id"] == first.json()["id"]


# Every text of every request


def test_every_route_with_a_json_body_uses_the_one_parser() -> None:
    with closing(Store("sqlite:////never/opened")) as store:
        routes = create_app(Settings(token=TOKEN), store).state.routes
    assert routes.operations
    assert {body.path for body in BODIES} == {
        route.path for route in _routes() if route.body_field is not None
    }
    assert all(isinstance(route, BodyRoute) for route in _routes() if route.body_field is not None)


def _routes() -> Iterator[APIRoute]:
    for name in (
        *("access", "allocations", "campaigns", "events", "exports", "imports", "leaderboard"),
        *("models_and_clusters", "plans", "reports", "trials", "workers"),
    ):
        router = importlib.import_module(f"layout_tuner.api.routes.{name}").router
        yield from (route for route in router.routes if isinstance(route, APIRoute))


def text_paths(schema: dict[str, Any], definitions: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Paths of all texts that a JSON schema has; a list's places are "0", free keys "*"."""
    if "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    for choice in (*schema.get("anyOf", ()), *schema.get("allOf", ())):
        yield from text_paths(choice, definitions)
    if schema.get("type") == "string":
        yield ()
    for name, inner in schema.get("properties", {}).items():
        for path in text_paths(inner, definitions):
            yield (name, *path)
    if isinstance(schema.get("additionalProperties"), dict):
        for path in text_paths(schema["additionalProperties"], definitions):
            yield ("*", *path)
    if isinstance(schema.get("items"), dict):
        for path in text_paths(schema["items"], definitions):
            yield ("0", *path)


FREE = ("versions", "trainers", "health")
"""Maps whose keys a client may choose."""


def attacked(document: Any, text: str) -> Iterator[tuple[Place, Any]]:
    """The document with a text in place of each of its own, and of a free key; and where it is."""
    for place in text_places(document):
        yield place, changed(document, place, text)
    for place in mappings(document):
        if place and place[-1] in FREE:
            yield place, changed(document, (*place, text), "1")


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.path)
def test_the_bodies_of_the_kit_have_every_text_of_their_schema(body: Body) -> None:
    (route,) = [
        route
        for route in _routes()
        if route.path == body.path and body.method in route.methods and route.body_field
    ]
    schema = TypeAdapter(route.body_field.field_info.annotation).json_schema()
    wanted = set(text_paths(schema, schema.get("$defs", {})))
    found = {
        tuple("*" if i and place[i - 1] in FREE else str(name) for i, name in enumerate(place))
        for place in text_places(body.document)
    }
    assert wanted <= found | {("outcome", "reason")}  # a completed outcome has none


@pytest.mark.parametrize("attack", [SURROGATE, NUL, TOO_LONG], ids=["surrogate", "nul", "long"])
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.path)
def test_a_text_that_cannot_be_stored_is_refused_with_its_field(
    lasting: TestClient, body: Body, attack: str
) -> None:
    if attack is TOO_LONG and not body.path.startswith(("/v1/workers", "/v1/trials/")):
        attack = attack[:12_000]  # longer bodies are refused unread
    for place, document in attacked(body.document, attack):
        url = body.url.replace("{campaign}", "first")
        answer = lasting.request(body.method, url, content=json.dumps(document), headers=JSON)
        assert answer.status_code == 422, (place, answer.text)
        named = ".".join(map(str, ("body", *place)))
        whole = named.rpartition(".health.")[0] + ".health" if ".health." in named else named
        fields = [error["field"] for error in answer.json()["errors"]]
        assert any(field.startswith((named, whole)) for field in fields), (named, fields)


@pytest.mark.parametrize("attack", [SURROGATE, NUL, TOO_LONG], ids=["surrogate", "nul", "long"])
def test_a_text_of_a_campaign_that_cannot_be_stored_is_refused_with_its_field(
    lasting: TestClient, attack: str
) -> None:
    original = lasting.get("/v1/campaigns/first").json()
    spec = {**original["spec"], "name": "second", "start_from": ["first"], "warnings": ["w"]}
    attack = attack[:50_000]
    for place in text_places(spec):
        content = json.dumps(changed(spec, place, attack))
        answer = lasting.post("/v1/campaigns", content=content, headers=JSON)
        assert answer.status_code == 422, (place, answer.text)
        (error, *_) = answer.json()["errors"]
        assert error["field"].startswith(f"body.{place[0]}"), (place, error)


@pytest.fixture(scope="module")
def lasting(lasting: TestClient) -> TestClient:
    """With a campaign."""
    Api(lasting).submit()
    return lasting


# Names

WIDE = ["\uff1d1+1", "\uff0b1+x", "\uff0d1+x", "\uff20SUM(1)", "\ufe661+1", "\u3000=1"]
"""Signs of formulas in wide and small forms, and a sign after a wide space."""


@pytest.mark.parametrize("name", ["=HYPERLINK(1)", "-2", "\t=1", " x", *WIDE])
def test_a_name_that_reads_as_a_formula_is_refused(lasting: TestClient, name: str) -> None:
    model, cluster = {"preset": "tiny", "name": name}, {**CAMPAIGN["cluster"], "name": name}
    node = {"name": name, "num_devices": 1}
    for path, document, field in (
        ("campaigns", {**CAMPAIGN, "name": "other", "model": model}, "model.name"),
        ("campaigns", {**CAMPAIGN, "name": "other", "cluster": cluster}, "cluster.name"),
        ("campaigns/first/clone", {"model": model}, "model.name"),
        ("campaigns/first/clone", {"cluster": cluster}, "cluster.name"),
        ("workers", {**INTRODUCTION, "name": name}, "name"),
        ("workers", {**INTRODUCTION, "host": name}, "host"),
        ("workers", {**INTRODUCTION, "cluster": name}, "cluster"),
        ("workers", {**INTRODUCTION, "nodes": [node]}, "nodes.0.name"),
    ):
        answer = answered(lasting.post(f"/v1/{path}", json=document), 422)
        assert answer.json()["errors"][0]["field"] == f"body.{field}"
    assert len(lasting.get("/v1/campaigns").json()["campaigns"]) == 1


LAYOUT = Layout(num_microbatches=8)


@pytest.mark.sqlite_is_enough
@pytest.mark.parametrize("outcome", [completed(LAYOUT), failed()], ids=lambda each: each.state)
def test_an_outcome_is_refused_with_the_field_that_is_no_visible_line(
    api: Api, outcome: Any
) -> None:
    campaign = api.submit()
    worker = api.register()
    api.store.trials.add(campaign["id"], LAYOUT)
    lease = api.lease(worker)
    body = {"worker_id": worker, "attempt": lease["attempt"], "outcome": asdict(outcome)}
    places = [place for place in text_places(body) if place[-1] != "log_tail"]
    assert ("outcome", "environment", "device") in places or outcome.environment is None
    for place in places:
        for text in ("a\nb", "a\u202eb"):
            document = changed(body, place, text)
            answer = api.post(f"/trials/{lease['trial_id']}/outcome", document, status=422)
            (error,) = answer["errors"]
            assert error["field"] == ".".join(map(str, ("body", *place)))
    assert api.report(worker, lease, outcome)["accepted"]


# Batches of odd documents to every route that takes one


MODEL: Final = {"preset": "tiny", "name": "odd", "seq_length": 64}
CAMPAIGN_DOCUMENT: Final[dict[str, Any]] = {
    **CAMPAIGN,
    "model": MODEL,
    "start_from": ["first"],
    "seed": 1,
    "probe": {"warmup": 2},
}
OTHER_BODIES: Final = [
    ("PUT", "/v1/models/odd", MODEL),
    ("PUT", "/v1/clusters/odd", CAMPAIGN["cluster"]),
    ("POST", "/v1/campaigns", CAMPAIGN_DOCUMENT),
    ("POST", "/v1/campaigns/first/clone", {"model": MODEL, "seed": 3}),
]
"""Of the routes that read their documents themselves, JSON or YAML."""

ROLES: Final = ("submitter", "worker", "admin")

Request = tuple[str, str, str, str]
"""Method, path, type and body."""


def batches() -> st.SearchStrategy[tuple[Request, ...]]:
    """Requests, one to every route that takes a document, and of each type that it takes."""
    ways: list[st.SearchStrategy[Request]] = []
    for method, path, document in (
        *((body.method, body.url, body.document) for body in BODIES),
        *OTHER_BODIES,
    ):
        json_type = st.just("application/json")
        ways += [
            st.tuples(st.just(method), st.just(path), json_type, bodies)
            for bodies in (odd_bodies(document), bodies_with_odd_maps(document))
        ]
    for method, path, document in OTHER_BODIES:
        yaml_type, texts = st.just("application/yaml"), odd_yaml_bodies(document)
        either = texts | odd_bodies(document)  # JSON is YAML too
        ways.append(st.tuples(st.just(method), st.just(path), yaml_type, either))
    return st.tuples(*ways)


asking: Final = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],  # what was stored stays: smaller batches show nothing
)


class Odd:
    """A service with a campaign, a worker and tokens, that many batches share."""

    def __init__(self, http: TestClient) -> None:
        self.http = http
        self.api = Api(http)
        self.seen: set[int] = set()
        self._made = 0
        self._worker = self.api.register("fuzz", nodes=[{"name": "n1", "num_devices": 4}])
        self._campaign = self.api.get("/campaigns/first")["id"]
        self._holders = [self.api.holder(f"a-{role}", role) for role in ROLES]

    def send(self, request: Request) -> None:
        """Sends it as one who may, and as one of the others."""
        method, path, kind, body = request
        if path.endswith("outcome"):
            path = self._leased_trial()
        path = path.replace("/workers/w/", f"/workers/{self._worker}/").format(campaign="first")
        body = body.replace('"worker_id": "w"', f'"worker_id": "{self._worker}"')
        role = "worker" if path.startswith(("/v1/workers", "/v1/trials")) else "submitter"
        self._made += 1
        for place in {ROLES.index(role), self._made % 3}:
            self._made += 1
            named = body.replace('"name": "first"', f'"name": "c{self._made}"')
            headers = self._holders[place] | {"Content-Type": kind}
            if self._made % 2:
                headers["Idempotency-Key"] = str(self._made)
            content = named.replace("name: first\n", f"name: c{self._made}\n").encode()
            answer = self.http.request(method, path, content=content, headers=headers)
            shown = (method, path, kind, len(content), content[:300], content[-300:])
            assert answer.status_code < 500, (answer.text[:300], shown)
            self.seen.add(answer.status_code)

    def new_name(self) -> str:
        self._made += 1
        return f"c{self._made}"

    def _leased_trial(self) -> str:
        self._made += 1
        self.api.store.trials.add(self._campaign, Layout(num_microbatches=self._made))
        return f"/v1/trials/{self.api.lease(self._worker)['trial_id']}/outcome"


@pytest.fixture(scope="module")
def service(lasting: TestClient) -> Odd:
    return Odd(lasting)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [10, pytest.param(30, marks=pytest.mark.slow)])
def test_no_batch_of_odd_documents_is_a_fault_or_breaks_a_list(service: Odd, number: int) -> None:
    @settings(asking, max_examples=number)
    @given(batch=batches())
    def check(batch: tuple[Request, ...]) -> None:
        for request in batch:
            service.send(request)
        for path in LISTS:
            answered(service.http.get(f"/v1/{path}"), 200)

    check()
    assert {201, 403, 422} <= service.seen, "the documents do not reach far"


@settings(asking, max_examples=12)
@given(name=odd_texts.filter(lambda text: len(text) < 100))
def test_the_tables_of_every_accepted_campaign_can_be_imported(service: Odd, name: str) -> None:
    campaign = service.new_name()
    cluster = {**CAMPAIGN["cluster"], "name": name}
    body = {**CAMPAIGN, "name": campaign, "model": {**MODEL, "name": name}, "cluster": cluster}
    answer = service.http.post("/v1/campaigns", content=json.dumps(body), headers=JSON)
    if answer.status_code in (400, 422):
        return
    assert answer.status_code == 201, answer.text
    layout = Layout(tp=2, micro_batch_size=1, num_microbatches=8)
    service.api.complete(service.api.register(campaign, cluster=name), campaign, layout)
    for view in ("table", "leaderboard?format=csv"):
        table = service.http.get(f"/v1/campaigns/{campaign}/{view}").content
        url = f"/v1/campaigns/import?name={campaign}-{view[:5]}"
        again = service.http.post(url, content=table, headers={"Content-Type": "text/csv"})
        assert again.status_code == 201, (name, again.text)
