"""A service with campaigns to look at, and a worker that posts outcomes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import httpx
from playwright.sync_api import Browser, StorageState

from layout_tuner.api.settings import Settings
from layout_tuner.protocol.outcome import Outcome
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.layouts.layout import Layout
from tests.api.dashboard.browser import Visitor, session_of, visiting
from tests.kit.api import CAMPAIGN, HEADERS, INTRODUCTION, TOKEN, bearer
from tests.kit.campaigns import space_of
from tests.kit.live import live_service
from tests.kit.store import TimelyStore, completed, failed, post_outcome, take_leases

LAYOUTS: Final = [
    Layout(tp=tp, pp=pp, micro_batch_size=size, num_microbatches=8 // size)
    for tp in (1, 2)
    for pp in (1, 2)
    for size in (1, 2, 4)
]
SPEEDS: Final = [3000.0, *(3000.0 - 100 * place for place in range(len(LAYOUTS) - 1))]
"""Tokens a second of each layout; the first two are equal."""
INTRODUCED: Final = {**INTRODUCTION, "cluster": "local-cpu", "devices_per_node": 4}
SPACE: Final = space_of(global_batch_size=8, tp=[1, 2], pp=[1, 2], dp=1, micro_batch_size=[1, 2, 4])


@dataclass(frozen=True, kw_only=True)
class Explored:
    """A service with its store, as its users and its worker see it."""

    url: str
    store: Store
    http: httpx.Client
    """Sends requests below /v1."""
    worker: str
    admin_token: str = TOKEN

    @contextmanager
    def visitor(self, browser: Browser, role: str = "admin", **options: Any) -> Iterator[Visitor]:
        """A new window of somebody who is signed in."""
        state = self._session(role)
        with visiting(browser, self.url, storage_state=state, **options) as visitor:
            yield visitor

    @cache  # noqa: B019 - the service lives as long as the tests of a module
    def _session(self, role: str) -> StorageState:
        token = self.admin_token if role == "admin" else self.token(role)
        return session_of(self.url, token)

    @cache  # noqa: B019
    def token(self, role: str, name: str = "") -> str:
        """A token of a role."""
        document = {"name": name or f"a-{role}", "role": role}
        return str(self.post("/tokens", document)["token"])

    def post(self, path: str, body: Any = None, token: str = "") -> Any:
        answer = self.http.post(path, json=body, headers=bearer(token or self.admin_token))
        assert answer.is_success, answer.text
        return answer.json()

    def read(self, path: str, token: str) -> httpx.Response:
        """What somebody with a token gets of a page."""
        return httpx.get(f"{self.url}{path}", headers=bearer(token), timeout=30)

    def submit(self, name: str, token: str = "", **changes: Any) -> int:
        """Submits a campaign; returns its id."""
        document = {**CAMPAIGN, "name": name, "space": SPACE, "budget": {"trials": 50}, **changes}
        return int(self.post("/campaigns", document, token)["id"])

    def run(self, campaign: int, layout: Layout, outcome: Outcome | None) -> int:
        """Proposes a layout and ends it with an outcome; None: it goes on. Returns its id."""
        trial = self.store.trials.add(campaign, layout).id
        (lease,) = take_leases(self.store, self.worker, 1)
        assert lease.trial_id == trial, "another trial waited"
        if outcome is not None:
            post_outcome(self.store, trial, lease.attempt, outcome)
        return trial

    def measure(self, campaign: int, place: int, **changes: Any) -> int:
        """Measures one of LAYOUTS at its speed."""
        layout = LAYOUTS[place]
        changes = {"tokens_per_s": SPEEDS[place], **changes}
        return self.run(campaign, layout, completed(layout, **changes))

    def search(self, name: str, **changes: Any) -> int:
        """A campaign with a dozen layouts: one failed, one out of memory, one stopped early."""
        campaign = self.submit(name, **changes)
        for place, layout in enumerate(LAYOUTS):
            if place == 4:
                self.run(campaign, layout, failed())
            elif place == 5:
                self.run(campaign, layout, failed("out_of_memory"))
            elif place == 6:
                self.measure(campaign, place, shortened=True, iterations_asked=10)
            else:
                self.measure(campaign, place)
        return campaign


@contextmanager
def explored_service(database_url: str) -> Iterator[Explored]:
    """Serves on loopback while the context lasts, with the campaigns "first" and "both"."""
    settings = Settings(
        token=TOKEN, lease_poll_s=0.02, requests_per_s=1e6, wrong_codes=1000, sweep_interval_s=3600
    )
    with (
        closing(TimelyStore(database_url)) as store,
        live_service(settings, store) as url,
        httpx.Client(base_url=url, headers=HEADERS, timeout=30) as http,
    ):
        worker = http.post("/workers", json=INTRODUCED).json()["worker_id"]
        explored = Explored(url=url.removesuffix("/v1"), store=store, http=http, worker=worker)
        explored.search("first")
        explored.search("both", objective=["tokens_per_s", "memory_headroom"])
        yield explored
