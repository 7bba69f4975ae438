"""The gate on the real application: every role against every route, and whose things are whose."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import iter_route_contexts
from fastapi.testclient import TestClient
from starlette.routing import Mount

from layout_tuner.api.app import create_app
from layout_tuner.api.errors import AccessUndeclaredError
from layout_tuner.api.security.roles import ACCESS, AccessRule, refuse_undeclared
from layout_tuner.api.settings import Settings
from layout_tuner.results_db.actor import TOKEN_ROLES, Actor
from layout_tuner.results_db.errors import DatabaseUnavailableError
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.layouts.layout import Layout
from tests.kit.api import CAMPAIGN, INTRODUCTION, TOKEN, answered, bearer
from tests.kit.postgres import upgraded
from tests.kit.store import failed

STREAMS = {"stream_events", "stream_campaign_events"}
"""An answer of theirs does not end: that they are let through is tried elsewhere."""

OPEN_OPERATIONS = {
    *("openapi", "docs-assets", "read_docs", "read_asset", "show_sign_in", "sign_in"),
    *("read_health", "read_readiness", "create_device_code", "create_device_token"),
    *("begin_owner_sign_in", "finish_owner_sign_in"),
}
OF_EVERYBODY_BUT_WORKERS = {
    *("create_sign_in_code", "sign_out", "show_device", "revoke_device_token")
}
"""Writes that viewers may make: what they change is a sign-in of their own."""
WORKER_OPERATIONS = {
    *("register_worker", "drain_worker", "lease_trials", "post_heartbeat", "post_outcome")
}
ADMIN_OPERATIONS = {
    *("create_token", "list_tokens", "revoke_token", "show_tokens", "sign_out_owner"),
    *("do_create_token", "do_revoke_token", "list_audit", "show_audit"),
    *("list_owners", "put_owner", "put_group", "delete_group"),
    *("quarantine_node", "release_node", "do_quarantine", "do_release"),
    *("remove_allocation", "do_remove_allocation", "put_quota", "delete_quota"),
}


@dataclass(frozen=True)
class Operation:
    name: str
    method: str
    path: str

    def url(self, value: str = "999") -> str:
        return re.sub(r"\{[^}]+\}", value, self.path)


def operations() -> list[Operation]:
    """Every route of the application, as it stands."""
    with closing(Store("sqlite:////never/opened")) as store:
        app = create_app(Settings(token=TOKEN), store)
    return [
        Operation(str(route.name), method, str(route.path))
        for route in iter_route_contexts(app.routes)
        if not isinstance(route.original_route, Mount)
        for method in sorted(route.methods or ())
    ]


OPERATIONS = operations()
GUARDED = [operation for operation in OPERATIONS if operation.name not in OPEN_OPERATIONS]


WORKERS_READ = {"list_clusters", "read_cluster", "read_whoami"}
"""All that a worker's token may read: clusters by name, and whose it is."""


PAGES_OF_SUBMITTERS = {"show_delete_campaign", "show_submit"}
"""Pages that only lead to a change."""


def may(role: str, operation: Operation) -> bool:
    """Who may do what, once more, and in other words than the table's."""
    if operation.name in WORKER_OPERATIONS:
        return role in ("worker", "admin")
    if operation.name in ADMIN_OPERATIONS:
        return role == "admin"
    if operation.name in OF_EVERYBODY_BUT_WORKERS:
        return role != "worker"
    if operation.name in PAGES_OF_SUBMITTERS:
        return role in ("submitter", "admin")
    if operation.method in ("GET", "HEAD"):
        return role != "worker" or operation.name in WORKERS_READ
    return role in ("submitter", "admin")


class Service:
    """A service in this process, with a token of every role."""

    def __init__(self, http: TestClient, store: Store) -> None:
        self.http, self.store = http, store
        self.tokens = {
            role: store.access.create_token(f"a-{role}", role)[1] for role in TOKEN_ROLES
        }
        self.tokens["other"] = store.access.create_token("other", "submitter")[1]
        self.tokens["other worker"] = store.access.create_token("other-worker", "worker")[1]

    def ask(self, who: str | None, method: str, url: str, **request: Any) -> Any:
        token = self.tokens.get(who or "", who)
        headers = {} if token is None else bearer(token)
        return self.http.request(method, url, headers=headers, follow_redirects=False, **request)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    path: Path = tmp_path_factory.mktemp("gate")
    settings = Settings(token=TOKEN, lease_poll_s=0.02)
    with (
        closing(Store.open(upgraded(path))) as store,
        TestClient(create_app(settings, store), raise_server_exceptions=False) as http,
    ):
        yield Service(http, store)


@pytest.mark.parametrize("operation", GUARDED, ids=lambda operation: operation.name)
def test_every_role_meets_every_route_as_the_table_says_and_nobody_else(
    service: Service, operation: Operation
) -> None:
    for role in TOKEN_ROLES:
        if operation.name in STREAMS and may(role, operation):
            continue
        answer = service.ask(role, operation.method, operation.url())
        if may(role, operation):
            assert answer.status_code not in (401, 403, 429, 500), (role, answer.text)
        else:
            assert answer.status_code == 403, (role, answer.text)
            assert f"'a-{role}' has the role {role}" in answer.text
            assert operation.name in answer.text

    tokens: tuple[str | None, ...] = (None, "lt_wrong")
    if operation.name == "list_campaigns":  # whatever the route, one gate compares tokens
        tokens = (*tokens, TOKEN[:-1], f"{TOKEN}x", "")
    for token in tokens:
        answer = answered(service.ask(token, operation.method, operation.url()), 401)
        assert answer.headers["WWW-Authenticate"] == 'Bearer realm="layout-tuner"'


def test_the_table_names_every_route_and_which_of_them_take_no_token(service: Service) -> None:
    opened = {name for name, rule in ACCESS.items() if rule.least is None}
    assert opened == OPEN_OPERATIONS
    for operation in OPERATIONS:
        if operation.name in OPEN_OPERATIONS:
            # An asset of this name does not exist, a sign-in comes from the service's page, and
            # this service has no provider. Whoever asks for a device code or its token has to send
            # something.
            refused = {"read_asset": 404, "sign_in": 403}
            refused |= {"begin_owner_sign_in": 401, "finish_owner_sign_in": 401}
            refused |= {"create_device_code": 422, "create_device_token": 422}
            refusal = refused.get(operation.name)
            status = service.ask(None, operation.method, operation.url()).status_code
            assert status == refusal or (refusal is None and status < 400)

    assert {operation.name for operation in OPERATIONS} | {"docs-assets"} == set(ACCESS)


def test_unknown_routes_need_a_token_and_no_spelling_of_a_path_leads_around_the_gate(
    service: Service,
) -> None:
    assert service.ask(None, "GET", "/v1/nothing").status_code == 401
    assert service.ask(None, "GET", "/v1").status_code == 401
    assert service.ask("worker", "GET", "/v1/nothing").status_code == 404
    assert service.ask(None, "GET", "/nothing").status_code == 404
    assert service.ask("viewer", "DELETE", "/v1/campaigns").status_code == 405

    for path in (
        *("/v1//campaigns", "//v1/campaigns", "/v1/campaigns/", "/v1/campaigns%2f"),
        *("/V1/campaigns", "/v1/../v1/campaigns", "/v1/%63ampaigns", "/v1/campaigns;x"),
    ):
        assert service.ask(None, "GET", path).status_code in (401, 404), path
        assert service.ask("worker", "GET", path).status_code in (403, 404, 307), path
    assert service.ask("submitter", "POST", "/v1/campaigns/%00/pause").status_code in (404, 422)


OWNED = [operation for operation in GUARDED if ACCESS[operation.name].owned]
OF_SUBMITTERS = [each for each in OWNED if ACCESS[each.name].owned != "worker"]
OF_WORKERS = [each for each in OWNED if ACCESS[each.name].owned == "worker"]


@pytest.mark.parametrize("operation", OF_WORKERS, ids=lambda operation: operation.name)
def test_the_token_of_a_worker_speaks_for_its_own_sessions_alone(
    service: Service, operation: Operation
) -> None:
    introduction = {**INTRODUCTION, "name": operation.name}
    session = service.ask("worker", "POST", "/v1/workers", json=introduction).json()["worker_id"]
    url, body = operation.url(session), {"wait_s": 0} if "leases" in operation.path else {}
    others = service.ask("other worker", operation.method, url, json=body)
    answered(others, 403, "belongs to 'a-worker'")
    again = service.ask("other worker", "POST", "/v1/workers", json=introduction)
    answered(again, 403, "registered with the token 'a-worker'")
    answer = service.ask("worker", operation.method, url, json=body)
    assert answer.status_code < 300, answer.text
    answered(service.ask("worker", operation.method, operation.url("nobody"), json=body), 404)


def test_the_token_of_a_worker_sets_no_node_of_another_token_aside(service: Service) -> None:
    nodes = {"cluster": "shared", "nodes": [{"name": "n1", "num_devices": 1}]}
    sessions, states = {}, {"other worker": "quarantined", "worker": "idle"}

    def begin(who: str, name: str) -> Any:
        introduction = {**INTRODUCTION, **nodes, "name": name}
        return answered(service.ask(who, "POST", "/v1/workers", json=introduction), 201).json()

    for who, state in states.items():
        sessions[who] = begin(who, f"beats {who}")["worker_id"]
        body = {"status": {"nodes": [{"name": "n1", "state": state, "reason": "slow"}]}}
        url = f"/v1/workers/{sessions[who]}/heartbeats"
        reply = answered(service.ask(who, "POST", url, json=body), 200).json()
        assert reply["quarantine"] == [], who
    assert begin("worker", "later")["quarantined"] == []
    slow = {"node": "n1", "reason": "slow"}
    assert begin("other worker", "later too")["quarantined"] == [slow]
    (node,) = service.ask("viewer", "GET", "/v1/nodes?cluster=shared").json()["nodes"]
    said = [node["quarantine"][name] for name in ("reported_by", "scope", "requested_by_user")]
    assert said == ["other-worker", "other-worker", False]
    page = service.ask("admin", "GET", "/allocations").text
    assert "set aside by other-worker, for workers of this token only" in page


def test_an_outcome_comes_from_the_workers_own_token_or_an_admin(service: Service) -> None:
    introduction = {**INTRODUCTION, "name": "poster", "cluster": "local-cpu"}
    session = service.ask("worker", "POST", "/v1/workers", json=introduction).json()["worker_id"]
    made = service.ask("submitter", "POST", "/v1/campaigns", json={**CAMPAIGN, "name": "posted"})
    service.store.trials.add(answered(made, 201).json()["id"], Layout(num_microbatches=8))
    asked = {"wait_s": 0, "max_trials": 1}
    leased = service.ask("worker", "POST", f"/v1/workers/{session}/leases", json=asked)
    (lease,) = answered(leased, 200).json()["leases"]
    url = f"/v1/trials/{lease['trial_id']}/outcome"
    outcome = failed(duration_s=0.0).to_mapping()
    body = {"worker_id": session, "attempt": lease["attempt"], "outcome": outcome}
    answered(service.ask("other worker", "POST", url, json=body), 409, "belongs to 'a-worker'")
    answered(service.ask("admin", "POST", url, json=body), 200)


@pytest.mark.parametrize("operation", OF_SUBMITTERS, ids=lambda operation: operation.name)
def test_submitters_change_what_is_theirs_and_nothing_else(
    service: Service, operation: Operation
) -> None:
    name = f"of-{operation.name.replace('_', '-')}"
    mine = service.store.by(Actor(name="a-submitter", role="submitter"))
    owned = ACCESS[operation.name].owned
    if owned in ("campaign", "trial"):
        made = service.ask("submitter", "POST", "/v1/campaigns", json={**CAMPAIGN, "name": name})
        campaign_id = answered(made, 201).json()["id"]
        trial = mine.trials.add(campaign_id, Layout(num_microbatches=8))
        spelled = {
            "campaign": [name, str(campaign_id), f"0{campaign_id}"],
            "trial": [str(trial.id), f"+{trial.id}", f"0{trial.id}", f"{trial.id}.0"],
        }[owned]
    else:
        mine.catalogue.put(owned, name, {}, notes="")
        spelled = [name]
    for value in spelled:
        others = service.ask("other", operation.method, operation.url(value))
        answered(others, 403, "belongs to 'a-submitter'")
    for who in ("submitter", "admin"):
        answer = service.ask(who, operation.method, operation.url(spelled[0]))
        assert answer.status_code not in (401, 403, 429, 500), answer.text


@pytest.mark.parametrize(
    "operation",
    [operation for operation in OWNED if ACCESS[operation.name].owned == "campaign"],
    ids=lambda operation: operation.name,
)
def test_ownership_is_checked_again_with_the_change(
    service: Service, operation: Operation, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, name = service.store, f"passed-on-{operation.name.replace('_', '-')}"
    made = service.ask("submitter", "POST", "/v1/campaigns", json={**CAMPAIGN, "name": name}).json()
    owner_of = store.access.owner_of_campaign

    def answered_too_early(asked: str) -> str | None:
        owner = owner_of(asked)
        store.campaigns.cancel(made["id"])
        store.campaigns.delete(made["id"])
        other = store.by(Actor(name="other", role="submitter"))
        theirs = other.campaigns.create(made["spec"], num_legal_layouts=1)
        if operation.name == "delete_campaign":
            store.campaigns.cancel(theirs.id)
        return owner

    monkeypatch.setattr(store.access, "owner_of_campaign", answered_too_early)
    url, notes = operation.url(name), {"notes": "mine"}
    refused = service.ask("submitter", operation.method, url, json=notes)
    answered(refused, 403, "belongs to 'other', and 'a-submitter' changes only")
    theirs = store.campaigns.by_name(name)
    expected = "CANCELLED" if operation.name == "delete_campaign" else "RUNNING"
    assert (theirs.state, theirs.notes) == (expected, "")


def test_a_token_is_let_in_again_after_a_database_outage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(_hashed: str) -> None:
        raise DatabaseUnavailableError("away")

    settings = Settings(token=TOKEN)
    with closing(Store.open(upgraded(tmp_path / "away"))) as store:
        _, token = store.access.create_token("ci", "viewer")
        with TestClient(create_app(settings, store), headers=bearer(token)) as client:
            with monkeypatch.context() as patch:
                patch.setattr(store.access, "token_by_hash", gone)
                answers = [client.get("/v1/whoami").status_code for _ in range(10)]
            assert answers == [503] * 10
            assert client.get("/v1/whoami").status_code == 200


def test_a_route_that_nobody_declared_is_refused_by_name_and_a_refusal_names_every_role() -> None:
    with pytest.raises(AccessUndeclaredError, match="read_secret: add a line to ACCESS"):
        refuse_undeclared(["read_health", "read_secret"])

    assert AccessRule("viewer").admitted() == "viewer or submitter or admin"
    assert AccessRule("admin").admitted() == "admin"
    assert AccessRule("worker").admitted() == "admin or worker"
