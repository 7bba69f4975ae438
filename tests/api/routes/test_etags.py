from datetime import timedelta

import pytest
from fastapi.testclient import TestClient
from httpx import Response

from results_db.campaigns.driver_lease import DriverLeases
from results_db.store import Store
from search_spaces.spec.layout import Layout
from tests.kit.api import Api

TRIALS = "/v1/campaigns/first/trials"
LEADERBOARD = "/v1/campaigns/first/leaderboard"
LAYOUT = Layout(num_microbatches=8)


def ask(http: TestClient, path: str, tag: str = "") -> Response:
    return http.get(path, headers={"If-None-Match": tag} if tag else {})


@pytest.fixture(autouse=True)
def _campaign(api: Api) -> None:
    api.submit()
    api.store.events.number()  # on PostgreSQL the number comes later, and changes the tag


@pytest.mark.parametrize("path", [TRIALS, LEADERBOARD, f"{LEADERBOARD}?format=csv"])
def test_a_page_that_has_not_changed_is_answered_without_a_body(
    http: TestClient, path: str
) -> None:
    first = ask(http, path)
    again = ask(http, path, first.headers["etag"])
    assert (first.status_code, again.status_code) == (200, 304)
    assert again.content == b""
    assert again.headers["etag"] == first.headers["etag"]
    assert again.headers["cache-control"] == "private, no-cache"


def test_only_changes_of_the_campaign_itself_change_its_pages(api: Api, http: TestClient) -> None:
    worker = api.register()
    tags = [ask(http, LEADERBOARD).headers["etag"]]

    def changed() -> bool:
        answer = ask(http, LEADERBOARD, tags[-1])
        tags.append(answer.headers["etag"])
        return answer.status_code == 200

    api.complete(worker, "first", LAYOUT)
    assert changed()
    assert not changed()
    api.post("/campaigns/first/pause")
    assert changed()
    api.post("/campaigns/first/cancel")
    assert changed()
    assert len(set(tags)) == 4

    tag = ask(http, TRIALS).headers["etag"]
    api.submit(name="second")
    api.post("/campaigns/second/pause")
    assert ask(http, TRIALS, tag).status_code == 304


def test_a_heartbeat_changes_the_list_of_trials_and_not_the_leaderboard(
    api: Api, http: TestClient
) -> None:
    worker = api.register()
    trial = api.store.trials.add(1, LAYOUT)
    api.lease(worker)
    tags = {path: ask(http, path).headers["etag"] for path in (TRIALS, LEADERBOARD)}
    beat = {"trials": [{"trial_id": trial.id, "attempt": 1, "iterations_done": 4}]}
    api.post(f"/workers/{worker}/heartbeats", beat)
    assert ask(http, TRIALS, tags[TRIALS]).json()["trials"][0]["iterations_done"] == 4
    assert ask(http, LEADERBOARD, tags[LEADERBOARD]).status_code == 304


@pytest.mark.parametrize("path", ["/v1/campaigns", "/v1/allocations", "/v1/nodes"])
def test_a_list_is_answered_without_a_body_until_it_changes(
    api: Api, http: TestClient, path: str
) -> None:
    api.post("/campaigns/first/pause")  # the wall time of a running campaign grows
    first = ask(http, path)
    again = ask(http, path, first.headers["etag"])
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == first.headers["etag"]
    if path == "/v1/campaigns":
        api.post("/campaigns/first/cancel")
    else:
        api.register(nodes=[{"name": "node-1", "num_devices": 4}])
    changed = ask(http, path, first.headers["etag"])
    assert (changed.status_code, changed.json() == first.json()) == (200, False)


def test_the_list_changes_while_an_allocation_comes_to_its_end(
    api: Api, http: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.register(allocation={"ends_in_s": 60})
    tag = ask(http, "/v1/allocations").headers["etag"]
    now = api.store.now()
    monkeypatch.setattr(Store, "now", lambda _store: now + timedelta(seconds=2))
    assert ask(http, "/v1/allocations", tag).status_code == 200


def test_a_list_of_campaigns_says_that_no_driver_is_at_work_any_more(
    api: Api, http: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = api.store.now()
    monkeypatch.setattr(DriverLeases, "seen_at", lambda _store: now)
    first = ask(http, "/v1/campaigns")
    monkeypatch.setattr(Store, "now", lambda _store: now + timedelta(seconds=20))
    again = ask(http, "/v1/campaigns", first.headers["etag"])
    reasons = [
        answer.json()["campaigns"][0]["progress"]["waiting_reason"] for answer in (first, again)
    ]
    assert "no driver" not in reasons[0]
    assert "no driver" in reasons[1]


def test_tags_are_of_one_page_and_one_of_several_is_enough_weak_or_strong(http: TestClient) -> None:
    pages = [TRIALS, f"{TRIALS}?limit=1", f"{TRIALS}?state=PENDING", LEADERBOARD]
    tags = [ask(http, page).headers["etag"] for page in pages]
    csv = http.get(TRIALS, headers={"Accept": "text/csv"}).headers["etag"]
    assert len({*tags, csv}) == 5
    assert ask(http, TRIALS, tags[1]).status_code == 200

    tag = ask(http, TRIALS).headers["etag"]
    assert tag.startswith('W/"')
    assert ask(http, TRIALS, f'"other", {tag}').status_code == 304
    assert ask(http, TRIALS, tag.removeprefix("W/")).status_code == 304
    assert ask(http, TRIALS, "*").status_code == 304
    assert ask(http, TRIALS, 'W/"other"').status_code == 200

    answer = ask(http, "/v1/campaigns/third/trials", "*")
    assert answer.status_code == 404
    assert "etag" not in answer.headers
