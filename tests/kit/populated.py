"""A service with something of everything in it, for tests that ask whatever they like."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import httpx

from layout_tuner.api.settings import Settings
from layout_tuner.results_db.actor import TOKEN_ROLES
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.layouts.layout import Layout
from tests.kit.api import CAMPAIGN, HEADERS, INTRODUCTION, TOKEN, bearer
from tests.kit.live import live_service
from tests.kit.store import TimelyStore, completed, failed

MANY: Final = 1_000_000
LISTS = ("allocations", "nodes", "workers", "campaigns", "models", "clusters", "audit", "tokens")
LAYOUTS: Final = [Layout(tp=tp, pp=pp) for tp in (1, 2) for pp in (1, 2)]


@dataclass(frozen=True, kw_only=True)
class Populated:
    """Where it is, and what there is to ask for."""

    url: str
    """Without /v1."""
    tokens: Mapping[str, str]
    """One of each role."""
    names: Mapping[str, list[str]]
    """Values that path parameters may have, by parameter."""

    def headers(self, role: str) -> dict[str, str]:
        return bearer(self.tokens[role])

    def ask(self, role: str, request: str, **sent: Any) -> httpx.Response:
        """What somebody of a role is answered who asks for "GET /v1/campaigns"."""
        method, path = request.split(" ", 1)
        headers = self.headers(role) | sent.pop("headers", {})
        return httpx.request(method, f"{self.url}{path}", headers=headers, timeout=60, **sent)

    def assert_lists_answer(self) -> None:
        """Whatever was sent: no list is broken by it."""
        for path in LISTS:
            answer = self.ask("admin", f"GET /v1/{path}")
            assert answer.status_code == 200, (path, answer.text[:300])


@contextmanager
def populated_service(database_url: str) -> Iterator[Populated]:
    """Serves on loopback while the context lasts; streams end at once, and no rate is too high."""
    patience = {"lease_poll_s": 0.02, "event_stream_s": 0.2}
    settings = Settings(token=TOKEN, requests_per_s=MANY, wrong_codes=MANY, **patience)
    with (
        closing(TimelyStore(database_url)) as store,
        live_service(settings, store) as url,
        httpx.Client(base_url=url, headers=HEADERS, timeout=30) as http,
    ):
        yield _populate(http, store, url.removesuffix("/v1"))


def _populate(http: httpx.Client, store: Store, url: str) -> Populated:
    def post(path: str, body: Any = None) -> Any:
        answer = http.post(path, json=body)
        assert answer.is_success, answer.text
        return answer.json()

    tokens = {
        role: post("/tokens", {"name": f"a-{role}", "role": role})["token"] for role in TOKEN_ROLES
    }
    first = post("/campaigns", {**CAMPAIGN, "budget": {"trials": MANY}})
    post("/campaigns", {**CAMPAIGN, "name": "ended"})
    local = {"cluster": "local-cpu", "devices_per_node": 4}
    nodes = [{"name": "n0", "num_devices": 4}]
    worker = post("/workers", {**INTRODUCTION, **local, "nodes": nodes})["worker_id"]
    trials = [store.trials.add(first["id"], layout).id for layout in LAYOUTS]
    ends = [completed(LAYOUTS[0]), failed(), failed("out_of_memory"), None]
    for trial, outcome in zip(trials, ends, strict=True):
        (lease,) = post(f"/workers/{worker}/leases", {"max_trials": 1, "wait_s": 0})["leases"]
        assert lease["trial_id"] == trial
        if outcome is not None:
            body = {"worker_id": worker, "attempt": 1, "outcome": dataclasses.asdict(outcome)}
            post(f"/trials/{trial}/outcome", body)
    trials.append(store.trials.add(first["id"], Layout(tp=1, micro_batch_size=2)).id)
    post("/campaigns/ended/cancel")
    post("/nodes/local-cpu/n0/quarantine", {"reason": "loud"})
    return Populated(
        url=url,
        tokens=tokens,
        names={
            "campaign": ["first", "ended", str(first["id"])],
            "trial_id": [str(trial) for trial in trials],
            "worker_id": [worker],
            "allocation_id": [worker, INTRODUCTION["name"]],
            "cluster": ["local-cpu"],
            "node": ["n0"],
            "name": ["tiny", "local-cpu", "own"],
        },
    )
