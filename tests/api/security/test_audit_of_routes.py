"""Every route that changes something for a user records the user; reading records nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from fastapi.testclient import TestClient

from layout_tuner.search_spaces.layouts.layout import Layout
from tests.api.security.test_gate import GUARDED
from tests.kit.api import CAMPAIGN, INTRODUCTION, Api
from tests.kit.store import completed, failed
from tests.results_db.campaigns.test_imported_tables import varied_rows
from tests.search_spaces.tables.tables import make_text

UNAUDITED = {
    "do_check": "it stores nothing",
    "do_read_job": "it stores nothing",
    "plan_campaign": "it stores no campaign; a plan for the driver has the name of its token",
    "lease_trials": "attempts tell who leased what, and when",
    "post_heartbeat": "sessions tell when a worker was heard of",
    "post_outcome": "attempts tell how they ended",
    "show_device": "a session allows a command line, which a request with a token does not have",
    "revoke_device_token": "a command line signs out, which another token cannot",
    "test_webhook": "the message is kept with its webhook",
    "sign_out": "a session has ended, which a request with a token does not have",
}
MODEL = {"preset": "tiny", "num_layers": 2}
CLUSTER = {"preset": "frontier", "num_nodes": 2}
NODE = {"cluster": "local-cpu", "node": "n1"}
CHANGE, AGAIN = {"notes": "look", "trials": "9"}, {"name": "again"}
TOKEN_OF_CI = {"name": "ci", "role": "viewer"}
WEBHOOK = {"address": "https://hooks.test/x", "events": ["campaign.ended"]}
SUBMITTED = {"do": "submit", "view": "yaml", "yaml": json.dumps(CAMPAIGN)}

EXAMPLES: dict[str, tuple[str, str, str, Any]] = {
    "create_campaign": ("campaign.create", "", "POST /v1/campaigns", CAMPAIGN),
    "clone_campaign": ("campaign.create", "running", "POST /v1/campaigns/{}/clone", None),
    "import_campaigns": ("campaign.import", "", "POST /v1/campaigns/import?name=theirs", None),
    "update_campaign": ("campaign.update", "running", "PATCH /v1/campaigns/{}", {"notes": "look"}),
    "delete_campaign": ("campaign.delete", "cancelled", "DELETE /v1/campaigns/{}", None),
    "pause_campaign": ("campaign.pause", "running", "POST /v1/campaigns/{}/pause", None),
    "resume_campaign": ("campaign.resume", "paused", "POST /v1/campaigns/{}/resume", None),
    "cancel_campaign": ("campaign.cancel", "running", "POST /v1/campaigns/{}/cancel", None),
    "repeat_trial": ("trial.repeat", "measured", "POST /v1/trials/{}/repeat", None),
    "requeue_trial": ("trial.requeue", "lost", "POST /v1/trials/{}/requeue", None),
    "cancel_trial": ("trial.cancel", "waiting", "POST /v1/trials/{}/cancel", None),
    "put_model": ("model.put", "", "PUT /v1/models/mine", MODEL),
    "delete_model": ("model.delete", "model", "DELETE /v1/models/{}", None),
    "put_cluster": ("cluster.put", "", "PUT /v1/clusters/mine", CLUSTER),
    "delete_cluster": ("cluster.delete", "cluster", "DELETE /v1/clusters/{}", None),
    "remove_allocation": ("allocation.remove", "worker", "DELETE /v1/allocations/{}", None),
    "quarantine_node": ("node.quarantine", "node", "POST /v1/nodes/{}/quarantine", None),
    "release_node": ("node.release", "quarantined", "POST /v1/nodes/{}/release", None),
    "register_worker": ("worker.register", "", "POST /v1/workers", INTRODUCTION),
    "drain_worker": ("worker.drain", "worker", "DELETE /v1/workers/{}", None),
    "create_token": ("token.create", "", "POST /v1/tokens", TOKEN_OF_CI),
    "revoke_token": ("token.revoke", "token", "DELETE /v1/tokens/{}", None),
    "put_owner": ("owner.put", "", "PUT /v1/owners/ann", {"weight": 2.5}),
    "put_group": ("group.put", "", "PUT /v1/groups/lab", {"weight": 2.0}),
    "delete_group": ("group.delete", "group", "DELETE /v1/groups/{}", None),
    "put_quota": ("quota.put", "quota", "PUT /v1/quotas/{}", {"node_hours": 2.0}),
    "delete_quota": ("quota.remove", "quota", "DELETE /v1/quotas/{}", None),
    "sign_out_owner": ("owner.sign_out", "token", "POST /v1/owners/ci/sign-out", None),
    "create_webhook": ("webhook.add", "hosts", "POST /v1/webhooks", WEBHOOK),
    "delete_webhook": ("webhook.delete", "webhook", "DELETE /v1/webhooks/{}", None),
    "create_sign_in_code": ("sign_in.code", "", "POST /v1/sign-in-codes", None),
    "do_pause_campaign": ("campaign.pause", "running", "POST /campaigns/{}/pause", None),
    "do_resume_campaign": ("campaign.resume", "paused", "POST /campaigns/{}/resume", None),
    "do_cancel_campaign": ("campaign.cancel", "running", "POST /campaigns/{}/cancel", None),
    "do_change_campaign": ("campaign.update", "running", "POST /campaigns/{}/change", CHANGE),
    "do_delete_campaign": ("campaign.delete", "cancelled", "POST /campaigns/{}/delete", None),
    "do_clone_campaign": ("campaign.create", "running", "POST /campaigns/{}/clone", AGAIN),
    "do_repeat_trial": ("trial.repeat", "measured", "POST /trials/{}/repeat", None),
    "do_requeue_trial": ("trial.requeue", "lost", "POST /trials/{}/requeue", None),
    "do_cancel_trial": ("trial.cancel", "waiting", "POST /trials/{}/cancel", None),
    "do_submit": ("campaign.create", "", "POST /submit", SUBMITTED),
    "do_remove_allocation": ("allocation.remove", "worker", "POST /allocations/{}/remove", None),
    "do_quarantine": ("node.quarantine", "node", "POST /nodes/quarantine", NODE),
    "do_release": ("node.release", "quarantined", "POST /nodes/release", NODE),
    "do_create_token": ("token.create", "", "POST /tokens", TOKEN_OF_CI),
    "do_revoke_token": ("token.revoke", "token", "POST /tokens/{}/revoke", None),
}
"""By route: what the audit calls its change, what must be there before, and the request."""


def made_ready(api: Api, what: str) -> str:
    """Makes what a change needs, as another user; returns what its path names."""
    if what in ("model", "cluster"):
        described = MODEL if what == "model" else CLUSTER
        assert api.http.put(f"/v1/{what}s/mine", json=described).is_success
        return "mine"
    if what in ("hosts", "webhook"):
        state: Any = api.http.app.state  # type: ignore[attr-defined]
        hosts = frozenset(["https://hooks.test:443"])
        state.settings = replace(state.settings, webhook_hosts=hosts)
        return str(api.post("/webhooks", WEBHOOK, 201)["id"]) if what == "webhook" else ""
    if what == "worker":
        return api.register()
    if what in ("node", "quarantined"):
        api.register(nodes=[{"name": "n1", "num_devices": 4}])
        if what == "quarantined":
            api.post("/nodes/local-cpu/n1/quarantine")
        return "local-cpu/n1"
    if what == "group":
        api.store.owners.put_owner("ann", weight=1.0)
        api.store.owners.put_group("lab", members=["bob"], known_members=False)
        return "lab"
    if what == "quota":
        api.store.quotas.put("owner", "*", "week", node_hours=1.0, beyond="wait", until=None)
        return "owner/*/week"
    if what == "token":
        return str(api.post("/tokens", TOKEN_OF_CI, 201)["id"])
    campaign = api.submit()
    if action := {"paused": "pause", "cancelled": "cancel"}.get(what):
        api.post(f"/campaigns/first/{action}")
    if what not in ("waiting", "measured", "lost"):
        return "first"
    layout = Layout(num_microbatches=8)
    trial = api.store.trials.add(campaign["id"], layout)
    if what != "waiting":
        worker = api.register()
        outcome = completed(layout) if what == "measured" else failed()
        api.report(worker, api.lease(worker), outcome)
    return str(trial.id)


class Group:
    """A user with a name of its own."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self._headers = api.holder("physics", "admin")

    def ask(self, request: str, body: Any = None) -> int:
        """Sends a document, a page's form, or a table; returns the answer's status."""
        method, path = request.split()
        sent: dict[str, Any] = {"json": body} if path.startswith("/v1") else {"data": body}
        sent["headers"] = self._headers
        if "import" in path:
            csv = {"Content-Type": "text/csv"}
            sent = {"content": make_text(*varied_rows()), "headers": self._headers | csv}
        return self.api.http.request(method, path, follow_redirects=False, **sent).status_code

    def audit(self) -> list[Any]:
        return self.api.store.access.audit(actor="physics", limit=500)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def physics(lasting: TestClient) -> Group:
    return Group(Api(lasting))


@pytest.fixture
def group(physics: Group) -> Iterator[Group]:
    """Leaves no campaign and no token to the next test."""
    yield physics
    store = physics.api.store
    for campaign in store.campaigns.find():
        if campaign.ended_at is None:
            store.campaigns.cancel(campaign.id)
        store.campaigns.delete(campaign.id)
    for token in store.access.tokens():
        if token.name == "ci":
            store.access.revoke_token(token.id)


def test_every_route_that_changes_something_is_tried_here() -> None:
    changing = {operation.name for operation in GUARDED if operation.method != "GET"}
    assert changing == set(EXAMPLES) | set(UNAUDITED)


@pytest.mark.parametrize("operation", EXAMPLES)
def test_a_change_is_audited_with_who_and_what(group: Group, operation: str) -> None:
    action, needed, request, body = EXAMPLES[operation]
    request = request.format(made_ready(group.api, needed)) if needed else request
    before = group.audit()
    assert group.ask(request, body) in (200, 201, 202, 204, 303)
    entry, *others = group.audit()
    assert (entry.action, entry.role, entry.address) == (action, "admin", "testclient")
    assert entry.target
    assert others == before


def test_what_is_refused_and_what_is_read_is_not_audited(group: Group) -> None:
    group.api.submit()
    before = group.api.store.access.audit()
    for request in (
        *("GET /v1/campaigns/first", "GET /v1/audit", "POST /v1/campaigns/nothing/pause"),
        *("POST /v1/trials/4711/cancel", "DELETE /v1/tokens/4711"),
    ):
        group.ask(request)
    assert group.ask("POST /v1/campaigns", CAMPAIGN) == 409
    assert group.api.store.access.audit() == before
