"""A campaign whose stored document this version cannot read is shown, refused where it is needed,
ended and deleted; the others are not affected."""

from __future__ import annotations

import json
from contextlib import closing
from html import unescape
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import text

from layout_tuner.results_db.admin.integrity import check_database
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.tuner.driver.driver import Driver
from tests.kit.api import Api, answered
from tests.kit.waiting import wait_until
from tests.tuner.factories import make_spec, submit

pytestmark = pytest.mark.sqlite_is_enough

LAYOUT = Layout(num_microbatches=8)

DEEP: Any = "deep"
for _ in range(300):
    DEEP = [DEEP]

DAMAGES: dict[str, tuple[Any, str]] = {
    "a list": (["lost"], "not a mapping of fields to values"),
    "null": (None, "the campaign is None, not a mapping of fields to values"),
    "a number": (7, "the campaign is 7, not a mapping of fields to values"),
    "a text": ("first", "the campaign is 'first', not a mapping of fields to values"),
    "nothing": ({}, "model: the field is missing"),
    "deep nesting": ({"model": {"name": "tiny", "wings": DEEP}}, "unknown model field 'wings'"),
    "a newer version": ({"color": "red"}, "unknown campaign field 'color'"),
    "a newer model": ({"model": {"name": "tiny", "wings": 2}}, "unknown model field 'wings'"),
    "a wrong type": ({"probe": {"warmup": "long"}}, "probe.warmup: 'long'"),
    "a wrong budget": ({"budget": [5]}, "the budget is [5], not a mapping"),
}


UNREADABLE = {"empty": "", "cut": '{"name": "fi', "too deep": "[" * 5000 + "]" * 5000}
"""Texts that are no JSON, or too deep to be parsed; PostgreSQL does not store them."""


@pytest.mark.parametrize("document", [*UNREADABLE.values(), "null"], ids=[*UNREADABLE, "null"])
def test_one_that_cannot_be_parsed_is_found_and_stops_no_other(
    sqlite_url: str, document: str
) -> None:
    with closing(Store(sqlite_url)) as store:
        for name in ("first", "sound"):
            submit(store, make_spec(name))
        with store._db.write() as session:
            damage = "UPDATE campaigns SET spec = :spec WHERE name = 'first'"
            session.execute(text(damage), {"spec": document})
        (finding,) = check_database(sqlite_url).findings
        assert (finding.check, finding.num_rows) == ("documents", 1)
        assert finding.message == "campaigns whose document has no fields, 1 of them: first"
        driver = Driver(store)
        driver.step()
        driver.step()
        driver.close()
        found = {each.name: each.state for each in store.campaigns.find()}
        assert found == {"first": "FAILED", "sound": "RUNNING"}
        sound = store.campaigns.by_name("sound").id
        assert store.campaigns.count_trials(sound)["PENDING"]


@pytest.fixture(params=DAMAGES)
def damaged(request: pytest.FixtureRequest, http: TestClient) -> tuple[Api, str]:
    """A service with two campaigns, of which `first` measured a layout before it was damaged."""
    api = Api(http)
    made = api.submit()
    api.complete(api.register(), "first", LAYOUT)
    api.submit(name="sound")
    changes, said = DAMAGES[request.param]
    document = made["spec"] | changes if isinstance(changes, dict) and changes else changes
    with api.store._db.write() as session:
        session.execute(
            text("UPDATE campaigns SET spec = :spec WHERE name = 'first'"),
            {"spec": json.dumps(document)},
        )
    return api, said


Damaged = tuple[Api, str]


def rows_of(api: Api) -> dict[str, Any]:
    return {each["name"]: each for each in api.get("/campaigns")["campaigns"]}


def test_it_is_listed_and_shown_with_what_it_measured(damaged: Damaged) -> None:
    api, said = damaged
    row = rows_of(api)["first"]
    assert (row["state"], row["model"], row["progress"]["trials_ended"]) == ("RUNNING", "tiny", 1)
    shown = api.get("/campaigns/first")
    assert shown["progress"]["best"] == row["progress"]["best"] > 0
    assert shown["spec"].get("name") in (None, "first") or "budget" in said
    (trial,) = api.get("/campaigns/first/trials")["trials"]
    assert trial["state"] == "COMPLETED"
    assert api.get(f"/trials/{trial['id']}")["measurement"]["tokens_per_s"] > 0


def test_its_layouts_are_ranked(damaged: Damaged) -> None:
    api, _ = damaged
    (first,) = api.get("/campaigns/first/leaderboard")["trials"]
    assert (first["rank"], first["layout_key"]) == (1, LAYOUT.key)
    assert api.get("/campaigns/first/leaderboard", objective="tokens_per_s_per_device")["trials"]


def test_its_pages_are_shown_and_say_why_it_cannot_be_read(damaged: Damaged) -> None:
    api, said = damaged
    for tab in ("", "/plots", "/timeline", "/trials", "/failures", "/events"):
        assert said in unescape(answered(api.http.get(f"/campaigns/first{tab}"), 200).text)
    assert said in unescape(answered(api.http.get("/v1/campaigns/first/report"), 200).text)
    answered(api.http.get("/"), 200, "first", "sound")
    (trial,) = api.get("/campaigns/first/trials")["trials"]
    answered(api.http.get(f"/trials/{trial['id']}"), 200)
    answered(api.http.get("/compare-campaigns", params={"campaign": ["first", "sound"]}), 200)


@pytest.mark.parametrize("path", ["/exports?format=command", "/table"])
def test_what_needs_its_document_is_refused_with_the_reason(damaged: Damaged, path: str) -> None:
    api, said = damaged
    answered(api.http.get(f"/v1/campaigns/first{path}"), 422, said)
    answered(api.http.post("/v1/campaigns/first/clone", json={}), 422, said)


def test_the_driver_ends_it_with_the_reason_and_it_can_be_deleted(damaged: Damaged) -> None:
    api, said = damaged
    driver = Driver(api.store)
    wait_until(
        "the campaign has ended",
        lambda: (driver.step() and False) or rows_of(api)["first"]["state"] == "FAILED",
    )
    driver.close()
    row = rows_of(api)["first"]
    assert row["reason"] == "error"
    assert said in row["message"]
    assert rows_of(api)["sound"]["state"] == "RUNNING"
    assert api.http.delete("/v1/campaigns/first").is_success
    assert list(rows_of(api)) == ["sound"]


def test_a_worker_that_leases_its_trial_gets_the_reason_and_others_get_theirs(
    damaged: Damaged,
) -> None:
    api, said = damaged
    first, sound = (api.store.campaigns.by_name(name).id for name in ("first", "sound"))
    api.store.trials.add(first, Layout(tp=2, num_microbatches=8))
    worker = api.register("w2")
    answered(
        api.http.post(f"/v1/workers/{worker}/leases", json={"max_trials": 1, "wait_s": 0}),
        422,
        said,
    )
    api.store.trials.add(sound, LAYOUT)
    assert api.lease(worker)["campaign"] == "sound"
