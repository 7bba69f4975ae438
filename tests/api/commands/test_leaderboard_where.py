"""`layout-tuner leaderboard --where`: the ranking, narrowed to what is asked for."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from api.campaigns.parquet import num_rows
from search_spaces.spec.layout import Layout
from tests.kit.api import Api, Command
from tests.kit.terminal import Terminal

LAYOUTS = [Layout(tp=tp, pp=pp, num_microbatches=8) for tp in (1, 2) for pp in (1, 2)]


@pytest.fixture
def run(api: Api, command: Command) -> Command:
    """Shows the leaderboard of a campaign of three layouts, each faster than the one before."""
    api.submit()
    worker = api.register()
    for number, layout in enumerate(LAYOUTS[:3], 1):
        api.complete(worker, "first", layout, tokens_per_s=1000.0 * number)
    return lambda *arguments: command("leaderboard", "first", *arguments)


def numbers(run: Command, *conditions: str) -> list[int]:
    where = [word for condition in conditions for word in ("--where", condition)]
    page = json.loads(run("--json", *where).stdout)
    return [trial["number"] for trial in page["trials"]]


def test_only_layouts_that_meet_every_condition_are_ranked(run: Command) -> None:
    assert numbers(run) == [3, 2, 1]
    assert numbers(run, "tp=1") == [2, 1]
    assert numbers(run, "tp=1", "tokens_per_s<=1500") == [1]
    assert "the best 1 of 1 by tokens_per_s" in run("--where", "pp=2").stdout

    header, *rows = run("--csv", "--where", "tp=2").stdout.splitlines()
    assert "tokens_per_s" in header
    assert len(rows) == 1

    assert run("--where", "dp=7").stdout == (
        "campaign first has no ranked trial that meets every --where yet\n"
    )


def test_ranks_are_those_of_the_whole_leaderboard_in_every_format(run: Command, api: Api) -> None:
    where = ("--where", "tp=1")
    page = json.loads(run("--json", *where).stdout)
    assert [(each["number"], each["rank"]) for each in page["trials"]] == [(2, 2), (1, 3)]
    table = run(*where).stdout
    shown = [
        line.split()[:2]
        for line in table.splitlines()
        if line.split()[:1] and line.split()[0].isdigit()
    ]
    assert shown == [["2", "2"], ["3", "1"]]
    assert "where tp=1" in table
    assert "the best that is listed is rank 2" in table
    rows = list(csv.DictReader(io.StringIO(run("--csv", "--intervals", *where).stdout)))
    assert [row["rank"] for row in rows] == ["2", "3"]

    worker = api.register("w2")
    api.complete(worker, "first", LAYOUTS[3], tokens_per_s=3000.0)
    everything, narrowed = run().stdout, run("--where", "pp=2").stdout
    assert "cannot be told apart from the first (95 %): trial 4" in everything
    assert "ranks are those" not in everything
    assert "cannot be told apart from rank 1, which is not listed (95 %): trial 4" in narrowed


def test_a_parquet_file_is_named_with_its_rows_and_not_written_to_a_terminal(
    run: Command, tmp_path: Path
) -> None:
    file = tmp_path / "best.parquet"
    written = run("--parquet", str(file))
    assert written.stdout == f"wrote 3 rows to {file}\n"
    assert num_rows(file.read_bytes()) == 3
    assert "--limit is 2, there may be more" in run("--parquet", str(file), "--limit", "2").stdout
    piped = run("--parquet", "-")
    assert piped.stdout_bytes == run("--parquet", "-").stdout_bytes
    assert num_rows(piped.stdout_bytes) == 3
    assert "wrote 3 rows to the output" in piped.stderr

    with Terminal() as terminal:
        refused = run("--parquet", terminal.path)
    assert refused.exit_code == 2
    assert "the table is binary" in refused.stderr
    assert terminal.printed == ""
