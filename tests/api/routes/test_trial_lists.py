"""Lists of trials over HTTP: filters, orders and cursors."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from starlette.requests import Request

from api.client.campaigns import filter_query
from api.http.query_parameters import TrialFilterDep, read_trial_filter
from results_db.trials.filter import LISTED_FIELDS, TrialFilter
from search_spaces.protocol.metrics import METRICS
from search_spaces.spec.layout import Layout
from tests.api.client.samples import full_filter
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


def cursor_of(*parts: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(parts).encode()).decode().rstrip("=")


NEVER_WRITTEN = [
    *("", "%%%"),
    cursor_of(),
    cursor_of(1, "tp", "asc", 0, 1.5, 1),
    cursor_of(1, "tp", "asc", 0, 2**31, 1),
    cursor_of(1, "mood", "asc", 0, 1, 1),
    cursor_of(1, "mfu", "asc", 0, float("nan"), 1),
    cursor_of(1, [], "asc", 0, 1, 1),
]


def test_a_cursor_is_valid_for_its_own_list_only(measured: Api) -> None:
    cursor = measured.get(PATH, sort="tp", limit=1)["next_cursor"]
    problem = measured.get(PATH, status=400, sort="pp", limit=1, cursor=cursor)
    assert "is of campaign 1 sorted by tp asc, not of campaign 1 by pp asc" in problem["detail"]
    measured.get(PATH, status=400, sort="tp", order="desc", cursor=cursor)
    measured.submit(name="second")
    problem = measured.get("/campaigns/second/trials", status=400, sort="tp", cursor=cursor)
    assert problem["type"].endswith(":page-invalid")
    for cursor in NEVER_WRITTEN:
        problem = measured.get(PATH, status=400, sort="tp", cursor=cursor)
        assert "comes from no page of this service" in problem["detail"]


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


def test_a_log_is_plain_text_whatever_ranks_printed(measured: Api, http: TestClient) -> None:
    answer = http.get("/v1/trials/4/log")
    assert answer.text == "Traceback ..."
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert http.get("/v1/trials/1/log").text == "the last line\n"  # of a completed trial
    assert "PENDING and has no log" in measured.get("/trials/5/log", status=404)["detail"]


@pytest.fixture
def echo() -> TestClient:
    """Answers with the filter that its query states, written as a query again."""
    app = FastAPI()

    @app.get("/")
    def read(wanted: TrialFilterDep, request: Request) -> dict[str, Any]:
        del request
        return dict(filter_query(wanted))

    return TestClient(app)


def test_every_field_of_a_filter_goes_through_a_url_unchanged(echo: TestClient) -> None:
    wanted = full_filter()
    query = filter_query(wanted)
    assert len(query) == len(LISTED_FIELDS) + 2 * len(METRICS), "each field is stated"
    assert read_trial_filter(**echo.get("/", params=dict(query)).json()) == wanted


def test_an_empty_filter_has_no_query() -> None:
    assert filter_query(TrialFilter()) == {}
    assert filter_query(TrialFilter(states=("FAILED",), min_mfu=0.0)) == {
        "state": ["FAILED"],
        "min_mfu": 0.0,
    }


@pytest.mark.parametrize(
    "query", ["tp=x", "tp=1&" * 101, "node=%00", "min_mfu=nan", "min_peak_memory_bytes=1.5"]
)
def test_an_invalid_value_of_a_filter_is_refused(echo: TestClient, query: str) -> None:
    assert echo.get(f"/?{query}").status_code == 422
