"""Campaigns of several objectives and with constraints, over HTTP and on the command line."""

import csv
import io
import json

import pytest

from search_spaces.spec.layout import Layout
from tests.kit.api import Api, Command

GIB = 1 << 30
OBJECTIVES = ["tokens_per_s", "memory_headroom"]
LAYOUTS = [
    Layout(num_microbatches=8),
    Layout(tp=2, num_microbatches=8),
    Layout(pp=2, num_microbatches=8),
]


@pytest.fixture
def measured(api: Api) -> Api:
    """Of the three the second is beaten in both objectives, the first breaks the constraint."""
    api.submit(objective=OBJECTIVES, constraints={"memory_headroom": 0.25})
    worker = api.register()
    for layout, speed, peak in zip(
        LAYOUTS, (9000.0, 1000.0, 2000.0), (7 * GIB, 6 * GIB, 5 * GIB), strict=True
    ):
        api.complete(worker, "first", layout, tokens_per_s=speed, peak_memory_bytes=peak)
    return api


def test_a_campaign_of_several_objectives_is_ranked_by_the_first_and_its_constraints(
    measured: Api,
) -> None:
    campaign = measured.get("/campaigns/first")
    assert (campaign["objective"], campaign["objectives"]) == ("tokens_per_s", OBJECTIVES)
    assert campaign["spec"]["objective"] == OBJECTIVES
    assert campaign["progress"]["best_trial"] == 3, "the fastest breaks the constraint"

    page = measured.get("/campaigns/first/leaderboard")
    assert (page["total"], page["constrained"], page["objectives"]) == (2, 1, OBJECTIVES)
    assert [(t["number"], t["rank"], t["on_front"]) for t in page["trials"]] == [
        (3, 1, True),
        (2, 2, False),
    ]
    assert page["trials"][0]["objectives"] == {"tokens_per_s": 2000.0, "memory_headroom": 0.375}
    assert measured.get("/trials/1")["measurement"]["tokens_per_s"] == 9000.0, "kept and shown"

    page = measured.get("/campaigns/first/leaderboard", front=True)
    assert ([t["number"] for t in page["trials"]], page["total"]) == ([3], 1)
    table = measured.http.get(
        "/v1/campaigns/first/leaderboard", params={"format": "csv", "front": True}
    ).text
    assert len(list(csv.DictReader(io.StringIO(table)))) == 1

    page = measured.get("/campaigns/first/leaderboard", objective="tokens_per_node_hour")
    assert page["objective"] == "tokens_per_node_hour"
    assert page["trials"][0]["objectives"]["tokens_per_node_hour"] == 2000.0 * 3600
    problem = measured.get("/campaigns/first/leaderboard", status=422, objective="memory_headroom")
    assert "objective" in problem["detail"]

    assert measured.get("/campaigns/first/exports", format="trainer")["trial"] == 3


def test_the_command_shows_every_objective_and_the_front_alone_in_every_format(
    measured: Api, command: Command
) -> None:
    shown = command("leaderboard", "first").output.splitlines()
    assert shown[0] == "first: the best 2 of 2 by tokens_per_s"
    heads = shown[1].split()
    shown_heads = heads[heads.index("tokens/s") : heads.index("step")]
    assert shown_heads == ["tokens/s", "memory", "headroom", "front"]
    assert "2,000" in shown[3]
    assert "37.5%" in shown[3]
    assert " * " in shown[3]
    assert " * " not in shown[4]
    assert shown[-1] == "not ranked, for they break the campaign's constraints: 1 completed trial"

    table = command("leaderboard", "first", "--front").output
    assert table.startswith("first: of the front, the best 1 of 1 by tokens_per_s")
    rows = command("leaderboard", "first", "--front", "--csv").output
    assert len(rows.splitlines()) == 2
    page = json.loads(command("leaderboard", "first", "--front", "--json").output)
    assert [trial["number"] for trial in page["trials"]] == [3]
