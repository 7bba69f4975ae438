"""`layout-tuner leaderboard --where`: the ranking, narrowed to what is asked for."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from click.testing import CliRunner, Result

from api.client import Client
from api.commands.leaderboard import leaderboard
from search_spaces.layout import Layout
from tests.api.service import TOKEN, Api

Run = Callable[..., Result]
LAYOUTS = [Layout(tp=tp, pp=pp, num_microbatches=8) for tp in (1, 2) for pp in (1, 2)]


@pytest.fixture
def run(api: Api, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Shows the leaderboard of a campaign of three layouts, each faster than the one before."""
    api.submit()
    worker = api.register()
    for number, layout in enumerate(LAYOUTS[:3], 1):
        api.complete(worker, "first", layout, tokens_per_s=1000.0 * number)

    def connect(*_: object) -> Client:
        return Client("http://testserver", TOKEN, transport=api.http._transport)

    monkeypatch.setattr("api.commands.connection.connect", connect)
    return lambda *arguments: CliRunner().invoke(leaderboard, ["first", *arguments])


def numbers(run: Run, *conditions: str) -> list[int]:
    where = [word for condition in conditions for word in ("--where", condition)]
    page = json.loads(run("--json", *where).stdout)
    return [trial["number"] for trial in page["trials"]]


def test_only_layouts_that_meet_every_condition_are_ranked(run: Run) -> None:
    assert numbers(run) == [3, 2, 1]
    assert numbers(run, "tp=1") == [2, 1]
    assert numbers(run, "tp=1", "tokens_per_s<=1500") == [1]
    assert "the best 1 of 1 by tokens_per_s" in run("--where", "pp=2").stdout


def test_a_table_has_the_same_layouts(run: Run) -> None:
    header, *rows = run("--csv", "--where", "tp=2").stdout.splitlines()
    assert "tokens_per_s" in header
    assert len(rows) == 1


def test_a_ranking_without_any_says_that_none_meets_the_conditions(run: Run) -> None:
    assert run("--where", "dp=7").stdout == (
        "campaign first has no ranked trial that meets every --where yet\n"
    )


def test_a_condition_that_is_none_is_bad_usage(run: Run) -> None:
    refused = run("--where", "tpp=2")
    assert refused.exit_code == 2
    assert "did you mean 'tp'?" in refused.output
