"""Texts that workers report: one visible line, or refused with the field."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from search_spaces.spec.layout import Layout
from tests.kit.api import Api
from tests.kit.hostile_texts import changed, text_places
from tests.kit.store import completed, failed

LAYOUT = Layout(num_microbatches=8)
HOSTILE = "CPU\ntouch me\r$(touch me)\u2028x = 1\u202e"


@pytest.mark.sqlite_is_enough
@pytest.mark.parametrize("outcome", [completed(LAYOUT), failed()], ids=lambda each: each.state)
def test_an_outcome_is_refused_with_the_field_that_is_no_visible_line(
    api: Api, outcome: Any
) -> None:
    campaign = api.submit()
    worker = api.register()
    api.store.trials.add(campaign["id"], LAYOUT)
    lease = api.lease(worker)
    body = {"worker_id": worker, "attempt": lease["attempt"], "outcome": asdict(outcome)}
    places = [place for place in text_places(body) if place[-1] != "log_tail"]
    assert ("outcome", "environment", "device") in places or outcome.environment is None
    for place in places:
        for text in ("a\nb", "a\u202eb"):
            answer = api.post(
                f"/trials/{lease['trial_id']}/outcome", changed(body, place, text), status=422
            )
            assert [error["field"] for error in answer["errors"]] == [
                ".".join(map(str, ("body", *place)))
            ]
    assert api.report(worker, lease, outcome)["accepted"]


@pytest.mark.sqlite_is_enough
def test_why_a_user_sets_a_node_aside_is_one_visible_line(api: Api) -> None:
    path = "/v1/nodes/local-cpu/node-1/quarantine"
    answer = api.http.post(path, json={"reason": HOSTILE})
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "body.reason")
