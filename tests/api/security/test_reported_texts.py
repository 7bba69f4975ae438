"""Texts that workers report: one visible line, or refused with the field."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

import pytest
from sqlalchemy import update

from api.exporters import FORMATS
from results_db.models.tables import EnvironmentRow, MeasurementRow
from search_spaces.spec.layout import Layout
from tests.api.local_api import Api
from tests.hostile_texts import changed, text_places
from tests.results_db.factories import completed, failed

LAYOUT = Layout(num_microbatches=8)
HOSTILE = "CPU\ntouch me\r$(touch me)\u2028x = 1\u202e"


def commands_in(exported: dict[str, Any]) -> list[str]:
    """The lines of files that are no comments."""
    lines = (line for file in exported["files"] for line in file["content"].splitlines())
    return [line for line in lines if not line.startswith("# ")]


@pytest.mark.sqlite_is_enough
@pytest.mark.parametrize("outcome", [completed(LAYOUT), failed()], ids=lambda each: each.state)
def test_an_outcome_is_refused_with_the_field_that_is_no_visible_line(
    api: Api, outcome: Any
) -> None:
    campaign = api.submit()
    worker = api.register()
    api.store.add_trial(campaign["id"], LAYOUT)
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


def test_texts_of_an_older_database_change_no_command(api: Api) -> None:
    """Earlier versions took any text: it is shown on one line."""
    campaign = api.submit(model="tiny-llama")
    layout = Layout(dp=2, num_microbatches=4, precision="bf16")
    api.complete(api.register(), "first", layout)
    path = "/campaigns/first/exports"
    before = {name: api.get(path, format=name, trial=1) for name in FORMATS}
    texts = [each.name for each in fields(completed().environment)]
    with api.store._db.write() as session:
        session.execute(update(EnvironmentRow).values(dict.fromkeys(texts, HOSTILE)))
        session.execute(update(MeasurementRow).values(memory_kind=HOSTILE, trainer_version=HOSTILE))
    for name in FORMATS:
        after = api.get(path, format=name, trial=1)
        assert commands_in(after) == commands_in(before[name])
        assert "touch me" in str(after["notes"])
        assert all(note.isprintable() for note in after["notes"])
    ((environment, number),) = api.store.environments(campaign["id"])
    assert (environment.device, number) == ("CPU touch me $(touch me) x = 1\ufffd", 1)
