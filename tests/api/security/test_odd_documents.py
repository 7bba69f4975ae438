"""Odd documents to every route that takes one, in batches: no server error, lists stay readable."""

from __future__ import annotations

import json
from typing import Any, Final

import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from search_spaces.spec.layout import Layout
from tests.kit.api import CAMPAIGN, Api
from tests.kit.bodies import BODIES
from tests.kit.odd_values import bodies_with_odd_maps, odd_bodies, odd_texts, odd_yaml_bodies

LISTS: Final = (
    *("allocations", "nodes", "workers", "campaigns", "models", "clusters", "audit", "tokens"),
    *("campaigns/first/trials", "campaigns/first/leaderboard"),
)
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
        self._campaign = self.api.submit()["id"]
        self._tokens = {role: self._token(role) for role in ROLES}

    def _token(self, role: str) -> str:
        body = {"name": f"a-{role}", "role": role}
        return str(self.api.post("/tokens", body, status=201)["token"])

    def send(self, request: Request) -> None:
        """Sends it as one who may, and as one of the others."""
        method, path, kind, body = request
        if path.endswith("outcome"):
            path = self._leased_trial()
        path = path.replace("/workers/w/", f"/workers/{self._worker}/").format(campaign="first")
        body = body.replace('"worker_id": "w"', f'"worker_id": "{self._worker}"')
        role = "worker" if path.startswith(("/v1/workers", "/v1/trials")) else "submitter"
        self._made += 1
        for token in {self._tokens[role], self._tokens[ROLES[self._made % 3]]}:
            self._made += 1
            named = body.replace('"name": "first"', f'"name": "c{self._made}"')
            headers = {"Authorization": f"Bearer {token}", "Content-Type": kind}
            if self._made % 2:
                headers["Idempotency-Key"] = str(self._made)
            content = named.replace("name: first\n", f"name: c{self._made}\n").encode()
            answer = self.http.request(method, path, content=content, headers=headers)
            shown = (method, path, kind, len(content), content[:300], content[-300:])
            assert answer.status_code < 500, (answer.text[:300], shown)
            self.seen.add(answer.status_code)

    def _leased_trial(self) -> str:
        self._made += 1
        self.api.store.trials.add(self._campaign, Layout(num_microbatches=self._made))
        return f"/v1/trials/{self.api.lease(self._worker)['trial_id']}/outcome"

    def find_all_readable(self) -> None:
        for path in LISTS:
            answer = self.http.get(f"/v1/{path}")
            assert answer.status_code == 200, (path, answer.text[:300])

    def find_importable(self, name: str) -> None:
        """Measures a trial under the name, unless it is refused; imports the campaign's tables."""
        self._made += 1
        campaign = f"c{self._made}"
        cluster = {**CAMPAIGN["cluster"], "name": name}
        body = {**CAMPAIGN, "name": campaign, "model": {**MODEL, "name": name}, "cluster": cluster}
        json_type = {"Content-Type": "application/json"}
        answer = self.http.post("/v1/campaigns", content=json.dumps(body), headers=json_type)
        if answer.status_code in (400, 422):
            return
        assert answer.status_code == 201, answer.text
        worker = self.api.register(f"w{self._made}", cluster=name)
        self.api.complete(worker, campaign, Layout(tp=2, micro_batch_size=1, num_microbatches=8))
        for view in ("table", "leaderboard?format=csv"):
            table = self.http.get(f"/v1/campaigns/{campaign}/{view}").content
            url = f"/v1/campaigns/import?name={campaign}-{view[:5]}"
            again = self.http.post(url, content=table, headers={"Content-Type": "text/csv"})
            assert again.status_code == 201, (name, again.text)


@pytest.fixture(scope="module")
def service(lasting: TestClient) -> Odd:
    return Odd(lasting)


def check_batches(service: Odd, number: int) -> None:
    @settings(asking, max_examples=number)
    @given(batch=batches())
    def check(batch: tuple[Request, ...]) -> None:
        for request in batch:
            service.send(request)
        service.find_all_readable()

    check()
    assert {201, 403, 422} <= service.seen, "the documents do not reach far"


def test_no_batch_of_odd_documents_is_a_fault_or_breaks_a_list(service: Odd) -> None:
    check_batches(service, 8)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_batch_of_many_is_a_fault_or_breaks_a_list(service: Odd) -> None:
    check_batches(service, 30)


@settings(asking, max_examples=12)
@given(name=odd_texts.filter(lambda text: len(text) < 100))
def test_the_tables_of_every_accepted_campaign_can_be_imported(service: Odd, name: str) -> None:
    service.find_importable(name)
