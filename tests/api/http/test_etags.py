import pytest
from fastapi.testclient import TestClient
from httpx import Response

from search_spaces.spec.layout import Layout
from tests.api.local_api import Api

TRIALS = "/v1/campaigns/first/trials"
LEADERBOARD = "/v1/campaigns/first/leaderboard"
LAYOUT = Layout(num_microbatches=8)


def ask(http: TestClient, path: str, tag: str = "") -> Response:
    return http.get(path, headers={"If-None-Match": tag} if tag else {})


@pytest.fixture(autouse=True)
def _campaign(api: Api) -> None:
    api.submit()


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


def test_a_page_is_read_again_after_every_step_of_a_trial(api: Api, http: TestClient) -> None:
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


def test_a_heartbeat_changes_the_list_of_trials_and_not_the_leaderboard(
    api: Api, http: TestClient
) -> None:
    worker = api.register()
    trial = api.store.add_trial(1, LAYOUT)
    api.lease(worker)
    tags = {path: ask(http, path).headers["etag"] for path in (TRIALS, LEADERBOARD)}
    beat = {"trials": [{"trial_id": trial.id, "attempt": 1, "iterations_done": 4}]}
    api.post(f"/workers/{worker}/heartbeats", beat)
    assert ask(http, TRIALS, tags[TRIALS]).json()["trials"][0]["iterations_done"] == 4
    assert ask(http, LEADERBOARD, tags[LEADERBOARD]).status_code == 304


def test_what_happens_to_another_campaign_changes_nothing(api: Api, http: TestClient) -> None:
    tag = ask(http, TRIALS).headers["etag"]
    api.submit(name="second")
    api.post("/campaigns/second/pause")
    assert ask(http, TRIALS, tag).status_code == 304


def test_another_page_of_the_same_campaign_has_another_tag(http: TestClient) -> None:
    pages = [TRIALS, f"{TRIALS}?limit=1", f"{TRIALS}?state=PENDING", LEADERBOARD]
    tags = [ask(http, page).headers["etag"] for page in pages]
    csv = http.get(TRIALS, headers={"Accept": "text/csv"}).headers["etag"]
    assert len({*tags, csv}) == 5
    assert ask(http, TRIALS, tags[1]).status_code == 200


def test_one_of_several_tags_is_enough_weak_or_strong(http: TestClient) -> None:
    tag = ask(http, TRIALS).headers["etag"]
    assert tag.startswith('W/"')
    assert ask(http, TRIALS, f'"other", {tag}').status_code == 304
    assert ask(http, TRIALS, tag.removeprefix("W/")).status_code == 304
    assert ask(http, TRIALS, "*").status_code == 304
    assert ask(http, TRIALS, 'W/"other"').status_code == 200


def test_a_page_that_is_not_there_has_no_tag(http: TestClient) -> None:
    answer = ask(http, "/v1/campaigns/third/trials", "*")
    assert answer.status_code == 404
    assert "etag" not in answer.headers
