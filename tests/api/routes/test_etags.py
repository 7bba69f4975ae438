"""Pages and lists that have not changed are answered without a body."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from fastapi.testclient import TestClient
from httpx import Response

from layout_tuner.results_db.campaigns.driver_lease import DriverLeases
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.layouts.layout import Layout
from tests.kit.api import Api

LAYOUT = Layout(num_microbatches=8)


def ask(api: Api, path: str, tag: str = "", **headers: str) -> Response:
    api.store.events.number()  # on PostgreSQL the number comes later, and changes the tag
    if tag:
        headers["If-None-Match"] = tag
    return api.http.get(f"/v1/{path}", headers=headers)


def submit(api: Api, name: str) -> tuple[int, str, str]:
    """The id of a new campaign, its list of trials, and its leaderboard."""
    return api.submit(name=name)["id"], f"campaigns/{name}/trials", f"campaigns/{name}/leaderboard"


class Seen:
    """A page that somebody asks for again and again."""

    def __init__(self, api: Api, path: str) -> None:
        self.api, self.path = api, path
        self.tags = [ask(api, path).headers["etag"]]

    def has_changed(self) -> bool:
        """Whether it differs from what was seen last."""
        answer = ask(self.api, self.path, self.tags[-1])
        self.tags.append(answer.headers["etag"])
        return answer.status_code == 200


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("listed", "campaigns?name_contains=listed"),
        ("allocated", "allocations"),
        ("on-nodes", "nodes"),
        ("tried", "campaigns/tried/trials"),
        ("ranked", "campaigns/ranked/leaderboard"),
        ("as-csv", "campaigns/as-csv/leaderboard?format=csv"),
    ],
)
def test_a_page_is_answered_without_a_body_until_it_changes(api: Api, name: str, path: str) -> None:
    submit(api, name)
    api.post(f"/campaigns/{name}/pause")  # the wall time of a running campaign grows
    first = ask(api, path)
    tag = first.headers["etag"]
    again = ask(api, path, tag)
    assert (first.status_code, again.status_code, again.content) == (200, 304, b"")
    assert again.headers["etag"] == tag
    assert again.headers["cache-control"] == "private, no-cache"
    api.register(name, nodes=[{"name": "node-1", "num_devices": 4}])
    api.post(f"/campaigns/{name}/cancel")
    changed = ask(api, path, tag)
    assert changed.status_code == 200
    assert changed.content != first.content or name in path, "a list has what has changed"


def test_only_changes_of_the_campaign_itself_change_its_pages(api: Api) -> None:
    campaign, trials, leaderboard = submit(api, "itself")
    worker = api.register()
    board = Seen(api, leaderboard)
    api.complete(worker, "itself", LAYOUT)
    assert board.has_changed()
    assert not board.has_changed()
    api.post("/campaigns/itself/pause")
    assert board.has_changed()
    api.post("/campaigns/itself/resume")
    assert board.has_changed()
    assert len(set(board.tags)) == 4

    listed = Seen(api, trials)
    submit(api, "another")
    api.post("/campaigns/another/pause")
    assert not listed.has_changed()
    trial = api.store.trials.add(campaign, Layout(tp=2, num_microbatches=8))
    api.lease(worker)
    listed, board = Seen(api, trials), Seen(api, leaderboard)
    beat = {"trials": [{"trial_id": trial.id, "attempt": 1, "iterations_done": 4}]}
    api.post(f"/workers/{worker}/heartbeats", beat)
    told = ask(api, trials, listed.tags[0]).json()
    assert told["trials"][1]["iterations_done"] == 4
    assert not board.has_changed(), "a heartbeat changes the list of trials alone"


def test_lists_change_when_an_allocation_nears_its_end_or_the_driver_is_gone(
    http: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = Api(http)
    api.submit()
    api.register(allocation={"ends_in_s": 60})
    now = api.store.now()
    driver = replace(api.store.driver.lease(), seen_at=now)
    monkeypatch.setattr(DriverLeases, "lease", lambda _store: driver)
    allocations = Seen(api, "allocations")
    first = ask(api, "campaigns")
    monkeypatch.setattr(Store, "now", lambda _store: now + timedelta(seconds=2))
    assert allocations.has_changed()
    monkeypatch.setattr(Store, "now", lambda _store: now + timedelta(seconds=20))
    again = ask(api, "campaigns", first.headers["etag"])
    progress = [answer.json()["campaigns"][0]["progress"] for answer in (first, again)]
    is_away = ["no driver" in str(each["waiting_reason"]) for each in progress]
    assert is_away == [False, True]


def test_each_page_has_its_own_tag_and_any_of_several_tags_matches_weak_or_strong(api: Api) -> None:
    _, trials, leaderboard = submit(api, "tagged")
    pages = [trials, f"{trials}?limit=1", f"{trials}?state=PENDING", leaderboard]
    tag, of_one, *others = (ask(api, page).headers["etag"] for page in pages)
    csv = ask(api, trials, Accept="text/csv").headers["etag"]
    assert len({tag, of_one, *others, csv}) == 5
    assert tag.startswith('W/"')
    for asked, status in (
        (f'"other", {tag}', 304),
        (tag.removeprefix("W/"), 304),
        ("*", 304),
        ('W/"other"', 200),
        (of_one, 200),
    ):
        assert ask(api, trials, asked).status_code == status, asked
    answer = ask(api, "campaigns/third/trials", "*")
    assert (answer.status_code, "etag" in answer.headers) == (404, False)
