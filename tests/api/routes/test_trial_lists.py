"""Lists of trials over HTTP: filters, orders and cursors."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from starlette.requests import Request

from layout_tuner.api.http.query_parameters import TrialFilterDep, read_trial_filter
from layout_tuner.client.campaigns import filter_query
from layout_tuner.protocol.metrics import METRICS
from layout_tuner.results_db.trials.filter import LISTED_FIELDS, TrialFilter
from layout_tuner.search_spaces.layouts.layout import Layout
from tests.kit.api import Api
from tests.kit.store import failed
from tests.layout_tuner.client.samples import full_filter

PATH = "/campaigns/first/trials"
FASTEST_FIRST: dict[str, Any] = {"sort": "tokens_per_s", "order": "desc", "limit": 2}


@pytest.fixture(scope="module")
def api(module_api: Api) -> Api:
    """Trials 1 to 3 measured 100, 300 and 200 tokens/s; 4 crashed; 5 waits."""
    campaign = module_api.submit()
    worker = module_api.register()
    for tp, pp, rate in ((1, 1, 100.0), (2, 1, 300.0), (1, 2, 200.0)):
        layout = Layout(tp=tp, pp=pp, num_microbatches=8)
        module_api.complete(worker, "first", layout, tokens_per_s=rate)
    module_api.store.trials.add(campaign["id"], Layout(tp=2, pp=2, num_microbatches=8))
    module_api.report(worker, module_api.lease(worker), failed("crashed"))
    module_api.store.trials.add(campaign["id"], Layout(tp=4, num_microbatches=8))
    return module_api


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


def test_pages_go_both_ways(api: Api) -> None:
    first = api.get(PATH, **FASTEST_FIRST)
    before = api.get(PATH, **FASTEST_FIRST, cursor=first["next_cursor"])["previous_cursor"]
    assert [trial["number"] for trial in first["trials"]] == [2, 3]
    assert api.get(PATH, **FASTEST_FIRST, before=before) == first
    assert (first["previous_cursor"], first["total"], first["is_total_exact"]) == (None, 5, True)
    assert api.get(PATH, tp=[2, 4], limit=1)["total"] == 3


def refused(api: Api, path: str = PATH, **asked: Any) -> str:
    """Why a page is refused."""
    problem = api.get(path, status=400, **asked)
    assert problem["type"].endswith(":page-invalid")
    return str(problem["detail"])


def test_a_cursor_is_valid_for_its_own_list_only(api: Api) -> None:
    after = api.get(PATH, **FASTEST_FIRST)["next_cursor"]
    before = api.get(PATH, **FASTEST_FIRST, cursor=after)["previous_cursor"]
    assert "exclude each other" in refused(api, **FASTEST_FIRST, cursor=after, before=before)
    words = "is of campaign 1 sorted by tokens_per_s desc, not of campaign 1 by tp asc"
    assert words in refused(api, sort="tp", cursor=after)
    assert words in refused(api, sort="tp", before=before)
    refused(api, **{**FASTEST_FIRST, "order": "asc"}, cursor=after)
    api.submit(name="second")
    refused(api, "/campaigns/second/trials", **FASTEST_FIRST, cursor=after)


@pytest.mark.parametrize("cursor", NEVER_WRITTEN)
def test_a_cursor_that_no_page_had_is_refused(api: Api, cursor: str) -> None:
    assert "comes from no page of this service" in refused(api, sort="tp", cursor=cursor)


def test_a_log_is_plain_text_whatever_ranks_printed(api: Api) -> None:
    answer = api.http.get("/v1/trials/4/log")
    assert answer.text == "Traceback ..."
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert api.http.get("/v1/trials/1/log").text == "the last line\n"  # of a completed trial


def test_every_field_of_a_filter_goes_through_a_url_unchanged() -> None:
    app = FastAPI()

    @app.get("/")
    def written_again(wanted: TrialFilterDep, request: Request) -> dict[str, Any]:
        del request
        return dict(filter_query(wanted))

    query = filter_query(full_filter())
    assert len(query) == len(LISTED_FIELDS) + 2 * len(METRICS), "each field is stated"
    answer = TestClient(app).get("/", params=dict(query))
    assert read_trial_filter(**answer.json()) == full_filter()
    assert filter_query(TrialFilter()) == {}
    few = TrialFilter(states=("FAILED",), min_mfu=0.0)
    assert filter_query(few) == {"state": ["FAILED"], "min_mfu": 0.0}


@pytest.mark.parametrize("text", ["moe_act%2Bmlp", "moe_act+mlp", "mlp%2Bmoe_act"])
def test_modules_of_a_filter_are_read_in_any_order(text: str) -> None:
    app = FastAPI()

    @app.get("/")
    def written_again(wanted: TrialFilterDep, request: Request) -> dict[str, Any]:
        del request
        return dict(filter_query(wanted))

    answer = TestClient(app).get(f"/?recompute={text}&recompute=core_attention")
    assert answer.json() == {"recompute": ["mlp+moe_act", "selective"]}


def test_a_word_that_is_no_module_is_refused_in_a_filter(api: Api) -> None:
    problem = api.get(PATH, status=422, recompute="mlp+norms")
    assert "'mlp+norms' is not one of none, selective, full" in problem["detail"]
