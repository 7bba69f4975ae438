"""Lists of trials over HTTP: filters, orders, cursors; and what becomes of trials by wish."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

from search_spaces.spec.layout import Layout
from tests.kit.api import Api
from tests.kit.store import failed

PATH = "/campaigns/first/trials"


@pytest.fixture
def measured(api: Api) -> Api:
    """Trials 1 to 3 measured 100, 300 and 200 tokens/s; 4 crashed; 5 waits."""
    campaign = api.submit()
    worker = api.register()
    for tp, pp, rate in ((1, 1, 100.0), (2, 1, 300.0), (1, 2, 200.0)):
        layout = Layout(tp=tp, pp=pp, num_microbatches=8)
        api.complete(worker, "first", layout, tokens_per_s=rate)
    api.store.trials.add(campaign["id"], Layout(tp=2, pp=2, num_microbatches=8))
    api.report(worker, api.lease(worker), failed("crashed"))
    api.store.trials.add(campaign["id"], Layout(tp=4, num_microbatches=8))
    return api


def listed(api: Api, **query: Any) -> list[int]:
    """The numbers of all pages."""
    found: list[int] = []
    cursor: str | None = None
    while True:
        given = query if cursor is None else {**query, "cursor": cursor}
        page = api.get(PATH, **given)
        found += [trial["number"] for trial in page["trials"]]
        cursor = page["next_cursor"]
        if cursor is None:
            return found


def test_trials_are_filtered_by_knobs_metrics_states_and_reasons(measured: Api) -> None:
    assert listed(measured, tp=[2, 4]) == [2, 4, 5]
    assert listed(measured, tp=2, pp=1) == [2]
    assert listed(measured, min_tokens_per_s=200, max_tokens_per_s=250.5) == [3]
    assert listed(measured, state=["FAILED", "PENDING"]) == [4, 5]
    assert listed(measured, reason="crashed", node="node-1") == [4]
    assert listed(measured, sequence_parallel="false", precision="fp32", num_devices=2) == [2, 3]
    assert listed(measured, precision="bf16") == []


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ({"sort": "mood"}, "query.sort"),
        ({"tp": "two"}, "query.tp.0"),
        ({"min_mfu": 0.5, "max_mfu": 0.4}, "min_mfu=0.5 is over max_mfu=0.4"),
        ({"cursor": "x" * 201}, "query.cursor"),
    ],
)
def test_an_invalid_query_is_refused_by_name(
    measured: Api, query: dict[str, Any], words: str
) -> None:
    assert words in measured.get(PATH, status=422, **query)["detail"]


def test_a_misspelt_filter_is_refused_and_shows_nothing(measured: Api) -> None:
    problem = measured.get(PATH, status=422, tpp=2)
    assert problem["type"].endswith(":query-unknown")
    assert "'tpp' is unknown (did you mean 'tp'?)" in problem["detail"]
    problem = measured.get("/trials/1", status=422, full="yes")
    assert "'full' is unknown; there is none here" in problem["detail"]
    measured.get("/campaigns", status=422, sate="RUNNING")


def test_a_cursor_is_valid_for_its_own_list_only(measured: Api) -> None:
    cursor = measured.get(PATH, sort="tp", limit=1)["next_cursor"]
    problem = measured.get(PATH, status=400, sort="pp", limit=1, cursor=cursor)
    assert "is of campaign 1 sorted by tp asc, not of campaign 1 by pp asc" in problem["detail"]
    measured.get(PATH, status=400, sort="tp", order="desc", cursor=cursor)
    measured.submit(name="second")
    problem = measured.get("/campaigns/second/trials", status=400, sort="tp", cursor=cursor)
    assert problem["type"].endswith(":page-invalid")


def test_pages_go_backwards_too_and_say_how_many_trials_pass(measured: Api) -> None:
    query = {"sort": "tokens_per_s", "order": "desc", "limit": 2}
    first = measured.get(PATH, **query)
    second = measured.get(PATH, **query, cursor=first["next_cursor"])
    back = measured.get(PATH, **query, before=second["previous_cursor"])
    assert [trial["number"] for trial in back["trials"]] == [2, 3]
    assert back == first
    assert (first["previous_cursor"], first["total"], first["is_total_exact"]) == (None, 5, True)
    assert measured.get(PATH, tp=[2, 4], limit=1)["total"] == 3
    both = {"cursor": first["next_cursor"], "before": second["previous_cursor"]}
    problem = measured.get(PATH, status=400, **query, **both)
    assert "cursor and before exclude each other" in problem["detail"]
    problem = measured.get(PATH, status=400, sort="tp", before=second["previous_cursor"])
    assert "sorted by tokens_per_s desc, not of campaign 1 by tp asc" in problem["detail"]


def cursor_of(*parts: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(parts).encode()).decode().rstrip("=")


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "cursor",
    [
        "",
        "%%%",
        cursor_of(),
        cursor_of(1, "tp", "asc", 0, 1.5, 1),
        cursor_of(1, "tp", "asc", 0, 2**31, 1),
        cursor_of(1, "mood", "asc", 0, 1, 1),
        cursor_of(1, "mfu", "asc", 0, float("nan"), 1),
        cursor_of(1, [], "asc", 0, 1, 1),
    ],
)
def test_a_cursor_that_the_service_never_wrote_is_refused(measured: Api, cursor: str) -> None:
    problem = measured.get(PATH, status=400, sort="tp", cursor=cursor)
    assert "comes from no page of this service" in problem["detail"]


def test_a_log_is_plain_text_whatever_ranks_printed(measured: Api, http: TestClient) -> None:
    answer = http.get("/v1/trials/4/log")
    assert answer.text == "Traceback ..."
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert http.get("/v1/trials/1/log").text == "the last line\n"  # of a completed trial
    assert "PENDING and has no log" in measured.get("/trials/5/log", status=404)["detail"]
    measured.get("/trials/99/log", status=404)


def test_a_completed_trial_is_measured_again(measured: Api) -> None:
    assert [t["number"] for t in measured.post("/trials/1/repeat", status=201)["trials"]] == [6]
    added = measured.post("/trials/1/repeat", {"times": 2}, status=201)["trials"]
    assert [(t["number"], t["repeat_of"], t["state"]) for t in added] == [
        (7, 1, "PENDING"),
        (8, 1, "PENDING"),
    ]
    for times in (0, 21, "2", None):
        measured.post("/trials/1/repeat", {"times": times}, status=422)
    measured.post("/trials/1/repeat", {"often": 2}, status=422)
    problem = measured.post("/trials/4/repeat", status=409)
    assert "requeue it" in problem["detail"]
    measured.post("/trials/99/repeat", status=404)


def test_a_failed_trial_is_queued_again_and_a_waiting_one_cancelled(measured: Api) -> None:
    again = measured.post("/trials/4/requeue", status=201)
    assert (again["number"], again["repeat_of"], again["state"]) == (6, 4, "PENDING")
    assert (
        "trial number 6 is of the same layout"
        in (measured.post("/trials/4/requeue", status=409)["detail"])
    )
    cancelled = measured.post(f"/trials/{again['id']}/cancel")
    assert (cancelled["state"], cancelled["reason"]) == ("CANCELLED", "cancelled")
    assert measured.post(f"/trials/{again['id']}/cancel") == cancelled, "twice is once"
    assert "it is COMPLETED" in measured.post("/trials/1/cancel", status=409)["detail"]
    measured.post("/trials/1/requeue", status=409)
    measured.post("/trials/99/cancel", status=404)
