"""A campaign's analysis over HTTP and in the terminal."""

from __future__ import annotations

import json

import pytest

from search_spaces.spec.layout import Layout
from tests.kit.api import Api, Command
from tests.results_db.campaigns.test_analyses import make_analysis

BEST = Layout(num_microbatches=8)


@pytest.fixture
def analysed(api: Api) -> Api:
    campaign = api.submit()
    worker = api.register()
    api.complete(worker, "first", Layout(tp=2, num_microbatches=8), tokens_per_s=50.0)
    winner = api.complete(worker, "first", BEST, tokens_per_s=100.0)
    api.store.reports.keep_analysis(campaign["id"], make_analysis(winner))
    return api


def test_an_analysis_names_the_winner_its_neighbours_and_what_matters(
    analysed: Api, command: Command
) -> None:
    read = analysed.get("/campaigns/first/analysis")
    assert (read["campaign"], read["winner"], read["winner_layout"]) == ("first", 2, BEST.key)
    assert [each["knob"] for each in read["importances"]] == ["tp", "micro_batch_size", "pp"]
    down, up = read["steps"]
    assert (down["state"], down["effect"], down["source"]) == ("out_of_memory", None, "predicted")
    assert (up["effect"], up["source"], up["is_apart"]) == (-0.1, "measured", True)
    assert up["also"] == ["dp", "num_microbatches"]

    shown = command("campaign", "analysis", "first")
    assert shown.exit_code == 0, shown.output
    lines = shown.output.splitlines()
    assert "share of the variation of tokens_per_s over 9 layouts" in lines[0]
    assert ["tp", "70.0%"] in [line.split() for line in lines]
    assert any("out of memory" in line and "predicted" in line for line in lines)
    assert any("-10.0%" in line and "measured" in line for line in lines)
    document = json.loads(command("campaign", "analysis", "first", "--json").stdout)
    assert document == analysed.get("/campaigns/first/analysis")


def test_without_an_analysis_the_service_says_when_there_will_be_one(api: Api) -> None:
    api.submit()
    problem = api.get("/campaigns/first/analysis", status=404)
    assert "'first' (RUNNING) has no analysis yet: it is made when" in problem["detail"]
    assert problem["type"].endswith("analysis-unavailable")
