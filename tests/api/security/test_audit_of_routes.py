"""Every route that changes something for a user records the user; reading records nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from httpx import Response

from search_spaces.spec.layout import Layout
from tests.api.security.test_gate import GUARDED
from tests.kit.api import CAMPAIGN, INTRODUCTION, Api
from tests.kit.store import completed, failed
from tests.results_db.campaigns.test_imports import varied_rows
from tests.search_spaces.tables.tables import make_text

UNAUDITED = {
    "do_check": "it stores nothing",
    "plan_campaign": "it stores no campaign; a plan for the driver has the name of its token",
    "lease_trials": "attempts tell who leased what, and when",
    "post_heartbeat": "sessions tell when a worker was heard of",
    "post_outcome": "attempts tell how they ended",
    "sign_out": "a session has ended, which a request with a token does not have",
}
TABLE_HEADER = {"Content-Type": "text/csv"}


@dataclass
class Group:
    """Asks in a name of its own; another has made ready what it needs."""

    api: Api
    headers: dict[str, str]
    prefix: str = "/v1"

    @property
    def page(self) -> Group:
        """The same user at a browser, who sends forms of pages."""
        return replace(self, prefix="")

    def ask(self, method: str, path: str, **request: Any) -> Response:
        headers = {**self.headers, **request.pop("headers", {})}
        return self.api.http.request(method, f"{self.prefix}{path}", headers=headers, **request)

    def on_campaign(self, method: str, rest: str = "", **request: Any) -> Response:
        self.api.submit()
        return self.ask(method, f"/campaigns/first{rest}", **request)

    def on_trial(self, action: str, ended: str | None = None) -> Response:
        campaign = self.api.submit()
        layout = Layout(num_microbatches=8)
        trial = self.api.store.trials.add(campaign["id"], layout)
        if ended is not None:
            worker = self.api.register()
            outcome = completed(layout) if ended == "COMPLETED" else failed()
            self.api.report(worker, self.api.lease(worker), outcome)
        return self.ask("POST", f"/trials/{trial.id}/{action}")

    def on_described(self, method: str, kind: str, described: dict[str, Any]) -> Response:
        if method == "DELETE":
            self.api.http.put(f"/v1/{kind}s/mine", json=described)
        return self.ask(method, f"/{kind}s/mine", json=described if method == "PUT" else None)

    def on_node(self, action: str) -> Response:
        self.api.register(nodes=[{"name": "n1", "num_devices": 4}])
        if action == "release":
            self.api.post("/nodes/local-cpu/n1/quarantine")
        if not self.prefix:
            return self.ask("POST", f"/nodes/{action}", data={"cluster": "local-cpu", "node": "n1"})
        return self.ask("POST", f"/nodes/local-cpu/n1/{action}")

    def imported(self) -> Response:
        table = make_text(*varied_rows())
        return self.ask(
            "POST", "/campaigns/import?name=theirs", content=table, headers=TABLE_HEADER
        )

    def deleted(self) -> Response:
        self.api.submit()
        self.api.post("/campaigns/first/cancel")
        if not self.prefix:
            return self.ask("POST", "/campaigns/first/delete")
        return self.ask("DELETE", "/campaigns/first")

    def resumed(self) -> Response:
        self.api.submit()
        self.api.post("/campaigns/first/pause")
        return self.ask("POST", "/campaigns/first/resume")

    def revoked(self) -> Response:
        made = self.api.post("/tokens", {"name": "ci", "role": "viewer"}, 201)
        if not self.prefix:
            return self.ask("POST", f"/tokens/{made['id']}/revoke")
        return self.ask("DELETE", f"/tokens/{made['id']}")


MODEL = {"preset": "tiny", "num_layers": 2}
CLUSTER = {"preset": "frontier", "num_nodes": 2}

EXAMPLES: dict[str, tuple[str, Callable[[Group], Response]]] = {
    "create_campaign": ("campaign.create", lambda a: a.ask("POST", "/campaigns", json=CAMPAIGN)),
    "clone_campaign": ("campaign.create", lambda a: a.on_campaign("POST", "/clone")),
    "import_campaigns": ("campaign.import", Group.imported),
    "update_campaign": (
        "campaign.update",
        lambda a: a.on_campaign("PATCH", json={"notes": "look"}),
    ),
    "delete_campaign": ("campaign.delete", Group.deleted),
    "pause_campaign": ("campaign.pause", lambda a: a.on_campaign("POST", "/pause")),
    "resume_campaign": ("campaign.resume", Group.resumed),
    "cancel_campaign": ("campaign.cancel", lambda a: a.on_campaign("POST", "/cancel")),
    "repeat_trial": ("trial.repeat", lambda a: a.on_trial("repeat", "COMPLETED")),
    "requeue_trial": ("trial.requeue", lambda a: a.on_trial("requeue", "FAILED")),
    "cancel_trial": ("trial.cancel", lambda a: a.on_trial("cancel")),
    "put_model": ("model.put", lambda a: a.on_described("PUT", "model", MODEL)),
    "delete_model": ("model.delete", lambda a: a.on_described("DELETE", "model", MODEL)),
    "put_cluster": ("cluster.put", lambda a: a.on_described("PUT", "cluster", CLUSTER)),
    "delete_cluster": ("cluster.delete", lambda a: a.on_described("DELETE", "cluster", CLUSTER)),
    "remove_allocation": (
        "allocation.remove",
        lambda a: a.ask("DELETE", f"/allocations/{a.api.register()}"),
    ),
    "quarantine_node": ("node.quarantine", lambda a: a.on_node("quarantine")),
    "release_node": ("node.release", lambda a: a.on_node("release")),
    "register_worker": ("worker.register", lambda a: a.ask("POST", "/workers", json=INTRODUCTION)),
    "drain_worker": ("worker.drain", lambda a: a.ask("DELETE", f"/workers/{a.api.register()}")),
    "create_token": (
        "token.create",
        lambda a: a.ask("POST", "/tokens", json={"name": "ci", "role": "viewer"}),
    ),
    "revoke_token": ("token.revoke", Group.revoked),
    "do_pause_campaign": ("campaign.pause", lambda a: a.page.on_campaign("POST", "/pause")),
    "do_resume_campaign": ("campaign.resume", lambda a: a.page.resumed()),
    "do_cancel_campaign": ("campaign.cancel", lambda a: a.page.on_campaign("POST", "/cancel")),
    "do_change_campaign": (
        "campaign.update",
        lambda a: a.page.on_campaign("POST", "/change", data={"notes": "look", "trials": "9"}),
    ),
    "do_delete_campaign": ("campaign.delete", lambda a: a.page.deleted()),
    "do_clone_campaign": (
        "campaign.create",
        lambda a: a.page.on_campaign("POST", "/clone", data={"name": "again"}),
    ),
    "do_repeat_trial": ("trial.repeat", lambda a: a.page.on_trial("repeat", "COMPLETED")),
    "do_requeue_trial": ("trial.requeue", lambda a: a.page.on_trial("requeue", "FAILED")),
    "do_cancel_trial": ("trial.cancel", lambda a: a.page.on_trial("cancel")),
    "do_submit": (
        "campaign.create",
        lambda a: a.page.ask(
            "POST", "/submit", data={"do": "submit", "view": "yaml", "yaml": json.dumps(CAMPAIGN)}
        ),
    ),
    "do_remove_allocation": (
        "allocation.remove",
        lambda a: a.page.ask("POST", f"/allocations/{a.api.register()}/remove"),
    ),
    "do_quarantine": ("node.quarantine", lambda a: a.page.on_node("quarantine")),
    "do_release": ("node.release", lambda a: a.page.on_node("release")),
    "do_create_token": (
        "token.create",
        lambda a: a.page.ask("POST", "/tokens", data={"name": "ci", "role": "viewer"}),
    ),
    "do_revoke_token": ("token.revoke", lambda a: a.page.revoked()),
    "create_sign_in_code": ("sign_in.code", lambda a: a.ask("POST", "/sign-in-codes")),
}
"""A change by each route, and what the audit calls it."""


@pytest.fixture
def group(api: Api) -> Group:
    made = api.post("/tokens", {"name": "physics", "role": "admin"}, 201)
    return Group(api, {"Authorization": f"Bearer {made['token']}"})


def test_every_route_that_changes_something_is_tried_here() -> None:
    changing = {operation.name for operation in GUARDED if operation.method != "GET"}
    assert changing == set(EXAMPLES) | set(UNAUDITED)


@pytest.mark.parametrize("operation", EXAMPLES)
def test_a_change_is_audited_with_who_and_what(group: Group, operation: str) -> None:
    action, change = EXAMPLES[operation]
    answer = change(group)
    assert answer.is_success, answer.text
    (entry, *_) = group.api.store.access.audit(actor="physics")
    assert (entry.action, entry.role, entry.address) == (action, "admin", "testclient")
    assert entry.target
    assert len(group.api.store.access.audit(actor="physics")) == 1


def test_what_is_refused_and_what_is_read_is_not_audited(group: Group) -> None:
    group.api.submit()
    before = group.api.store.access.audit()
    for method, path in (
        ("GET", "/campaigns/first"),
        ("GET", "/audit"),
        ("POST", "/campaigns/nothing/pause"),
        ("POST", "/trials/4711/cancel"),
        ("DELETE", "/tokens/4711"),
    ):
        group.ask(method, path)
    assert group.ask("POST", "/campaigns", json=CAMPAIGN).status_code == 409
    assert group.api.store.access.audit() == before
