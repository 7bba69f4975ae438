from __future__ import annotations

from typing import Any

import pytest
from fastapi import FastAPI
from starlette.requests import Request

from api.http.filter_encoding import filter_query
from api.http.query_parameters import TrialFilterDep, read_trial_filter
from results_db.trials.filter import LISTED_FIELDS, TrialFilter
from search_spaces.protocol.metrics import METRICS
from tests.api.client.samples import full_filter
from tests.api.conftest import TestClient
from tests.kit.api import CAMPAIGN, Api


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
    "query",
    ["tp=x", "tp=1&" * 101, "node=%00", "min_mfu=nan", "min_peak_memory_bytes=1.5"],
)
def test_an_invalid_value_of_a_filter_is_refused(echo: TestClient, query: str) -> None:
    assert echo.get(f"/?{query}").status_code == 422


@pytest.mark.sqlite_is_enough
@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/campaigns?limit=1_0", "query.limit"),
        ("/v1/campaigns/first/trials?tp=1&tp=0_2", "query.tp"),
        ("/v1/events?after=1_0", "query.after"),
        ("/v1/trials/1_0", "path.trial_id"),
    ],
)
def test_a_number_in_an_address_has_plain_digits(api: Api, path: str, field: str) -> None:
    api.post("/campaigns", CAMPAIGN, status=201)
    refused = api.http.get(path)
    assert refused.status_code == 422, refused.text
    (error,) = refused.json()["errors"]
    assert (error["field"], "is not a number in plain digits" in error["message"]) == (field, True)
