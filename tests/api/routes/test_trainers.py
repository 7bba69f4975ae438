"""Campaigns of other trainers over HTTP, in the terminal and on the pages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from search_spaces.spec.layout import Layout
from tests.kit.api import Api, Command
from tests.kit.store import make_measurement

LAYOUT = Layout(num_microbatches=8)
THEIRS: dict[str, Any] = {
    "trainer": "theirs",
    "trainer_version": "1.2",
    "tokens": "assumed",
    "memory_kind": "sampled",
    "peak_memory_bytes_by_stage": (),
    "breakdown": None,
    "iterations": tuple(
        replace(each, loss=None, grad_norm=None) for each in make_measurement().iterations
    ),
}


@pytest.fixture
def measured(api: Api) -> Api:
    api.submit(probe={"trainer": "theirs", "parameters": {"rate": 0.1}})
    worker = api.register(trainers={"theirs": "1.2"})
    api.store.trials.add(api.store.campaigns.by_name("first").id, LAYOUT)
    lease = api.lease(worker)
    assert lease["request"]["trainer"] == "theirs"
    assert lease["request"]["parameters"] == {"rate": 0.1}
    api.report_measured(worker, lease, LAYOUT, **THEIRS)
    return api


def test_a_campaign_says_that_no_worker_lists_its_trainer(api: Api) -> None:
    api.submit(probe={"trainer": "theirs"})
    api.store.trials.add(api.store.campaigns.by_name("first").id, LAYOUT)
    api.register("plain")
    read = api.get("/campaigns/first")
    assert read["trainer"] == "theirs"
    assert "lists the trainer 'theirs'" in read["progress"]["waiting_reason"]
    assert "worker --trainers FILE" in read["progress"]["waiting_reason"]
    api.register("right", trainers={"theirs": "1.2"})
    assert "lists" not in (api.get("/campaigns/first")["progress"]["waiting_reason"] or "")


def test_measurements_show_their_trainer_everywhere(measured: Api, command: Command) -> None:
    words = "theirs 1.2, tokens assumed from the layout, not counted"
    (ranked,) = measured.get("/campaigns/first/leaderboard")["trials"]
    figures = ranked["measurement"]
    assert (figures["trainer"], figures["tokens"]) == ("theirs", "assumed")
    assert f"measured by the trainer {words}" in command("leaderboard", "first").output
    assert words in command("trial", "show", str(ranked["id"])).output
    assert f"Measured by the trainer {words}." in measured.http.get("/campaigns/first").text
    page = measured.http.get(f"/trials/{ranked['id']}").text
    assert "--trainers trainers.yaml --trainer theirs --parameter rate=0.1" in page
    assert "Peak memory by pipeline stage" not in page, "the estimate is of the embedded trainer"
    assert words in page
    assert "not reported" in page, "losses and gradient norms"
    assert "sampled" in page
    text = command("leaderboard", "first", "--csv").output
    assert "layout-tuner campaign first with theirs" in text
    exported = measured.get("/campaigns/first/exports", format="command")
    assert f"by the trainer {words}" in exported["files"][0]["content"]
    report = measured.http.get("/v1/campaigns/first/report")
    assert words in report.text
