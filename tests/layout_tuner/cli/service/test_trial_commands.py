"""Commands that show and change trials, and what a campaign has found."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import click
import pytest
from click.testing import Result
from pyarrow import parquet

from layout_tuner.cli.service.trial import read_conditions
from layout_tuner.cli.service.watching import CampaignView, progress_line
from layout_tuner.client.clients import Client
from layout_tuner.results_db.trials.filter import TrialFilter
from layout_tuner.search_spaces.layouts.layout import Layout
from tests.kit.api import Api, Command, ends
from tests.kit.cheap_campaign import FEWER, FULL, ONLY_CHEAP, add_cheap_campaign
from tests.kit.store import failed
from tests.kit.terminal import Terminal
from tests.results_db.campaigns.test_analyses import make_analysis


@pytest.fixture
def run(api: Api, command: Command) -> Command:
    """Runs a command on three trials: one measured, one that crashed, one that waits."""
    campaign = api.submit()
    worker = api.register()
    api.complete(worker, "first", Layout(num_microbatches=8), tokens_per_s=100.0)
    api.store.trials.add(campaign["id"], Layout(tp=2, num_microbatches=8))
    api.report(worker, api.lease(worker), failed("crashed"))
    api.store.trials.add(campaign["id"], Layout(pp=2, num_microbatches=8))
    return lambda *arguments: command("trial", *arguments)


def shown(result: Result) -> list[str]:
    rows = [line.split() for line in ends(result, 0).stdout.splitlines()]
    return [row[1] for row in rows if row and row[0].isdigit()]


def test_trials_are_listed_by_condition_and_shown_with_their_figures_and_log(run: Command) -> None:
    assert shown(run("list", "first")) == ["1", "2", "3"]
    assert shown(run("list", "first", "--sort", "tp", "--descending")) == ["2", "1", "3"]
    table = run("list", "first").stdout
    assert "FAILED (crashed)" in table
    assert "10.24 s" in table

    assert shown(run("list", "first", "--where", "tp=1,4", "--where", "state=PENDING")) == ["3"]
    assert shown(run("list", "first", "--where", "tokens_per_s>=100")) == ["1"]
    assert shown(run("list", "first", "--where", "tokens_per_s <= 99.5")) == []

    result = run("list", "first", "--limit", "2")
    assert shown(result) == ["1", "2"]
    assert "there are more than 2" in result.stderr
    assert run("list", "first", "--limit", "3").stderr == ""

    page = json.loads(run("list", "first", "--where", "reason=crashed", "--json").stdout)
    assert [each["number"] for each in page["trials"]] == [2]

    by_id, by_number = run("show", "2"), run("show", "first/2")
    assert by_id.exit_code == 0, by_id.output
    assert by_id.stdout == by_number.stdout
    assert "message       rank 1 of 2: crashed" in by_id.stdout
    assert "1 on w1 (node-1): reported" in by_id.stdout
    for wrong in ("first", "first/", "/2", "first/two", "-1", "\u0662"):
        assert run("show", "--", wrong).exit_code == 2, wrong

    text = run("show", "first/1").stdout
    assert "tokens/s      100" in text
    assert "peak memory   5 GiB" in text
    detail = json.loads(run("show", "first/1", "--json").stdout)
    assert detail["measurement"]["tokens_per_s"] == 100.0

    assert run("log", "first/2").stdout == "Traceback ..."
    ends(run("log", "first/3"), 1, "trial first/3 (id 3) is PENDING and has no log")


def test_trials_are_repeated_queued_again_and_cancelled(run: Command) -> None:
    repeated = run("repeat", "first/1", "--times", "2")
    assert repeated.stdout.count("is PENDING") == 2, repeated.output
    assert "number 6" in run("requeue", "first/2").stdout
    ends(run("requeue", "first/2"), 1, "of the same layout")
    assert run("cancel", "first/6").stdout == "trial first/6 (id 6) is CANCELLED\n"
    assert json.loads(run("requeue", "first/2", "--json").stdout)["number"] == 7
    assert len(json.loads(run("repeat", "first/1", "--json").stdout)["trials"]) == 1
    assert json.loads(run("cancel", "first/3", "--json").stdout)["state"] == "CANCELLED"


def test_cancelling_a_running_trial_says_that_its_worker_stops_it(run: Command, api: Api) -> None:
    api.lease(api.register("w2"))
    assert "its worker stops it" in run("cancel", "first/3").stdout


def test_conditions_are_combined_into_one_filter() -> None:
    conditions = [
        "number=1,2",
        "state=FAILED",
        "sequence_parallel=true",
        "precision=bf16, fp16",
        "mfu>=0.3",
        "mfu<=0.5",
        "peak_memory_bytes<=8e9",
    ]
    assert read_conditions(conditions) == TrialFilter(
        numbers=(1, 2),
        states=("FAILED",),
        sequence_parallel=(True,),
        precision=("bf16", "fp16"),
        min_mfu=0.3,
        max_mfu=0.5,
        max_peak_memory_bytes=8_000_000_000,
    )


@pytest.mark.parametrize(
    ("condition", "words"),
    [
        ("tp", "is not NAME=VALUE, NAME>=NUMBER"),
        ("tp=1 tp=2", "tp is stated twice"),
        ("tp>2", "is not NAME=VALUE"),
        ("tpp=2", r"'tpp' does not go with = \(did you mean 'tp'\?\)"),
        ("tp>=2", "'tp' does not go with >="),
        ("mfu=0.3", "'mfu' does not go with ="),
        ("tp=two", "'two' is not a whole number"),
        ("tp=-1", "tp=-1 is not a whole number"),
        ("tp=", "'' is not a whole number"),
        ("sequence_parallel=1", "'1' is not true or false"),
        ("precision=fp4", "'fp4' is not one of fp32"),
        ("mfu>=much", "'much' is not a number"),
        ("mfu>=nan", "'nan' is not a number"),
        ("peak_memory_bytes<=0.5", "is not a whole number"),
    ],
)
def test_an_invalid_condition_is_bad_usage(condition: str, words: str) -> None:
    with pytest.raises(click.UsageError, match=words):
        read_conditions(condition.split())


FOUR = [Layout(tp=tp, pp=pp, num_microbatches=8) for tp in (1, 2) for pp in (1, 2)]


@pytest.fixture
def ranked(api: Api, command: Command) -> Command:
    """Shows the leaderboard of a campaign of three layouts, each faster than the one before."""
    api.submit()
    worker = api.register()
    for number, layout in enumerate(FOUR[:3], 1):
        api.complete(worker, "first", layout, tokens_per_s=1000.0 * number)
    return lambda *arguments: command("leaderboard", "first", *arguments)


def numbers(ranked: Command, *conditions: str) -> list[int]:
    where = [word for condition in conditions for word in ("--where", condition)]
    page = json.loads(ranked("--json", *where).stdout)
    return [trial["number"] for trial in page["trials"]]


def test_only_layouts_that_meet_every_condition_are_ranked_as_in_the_whole_leaderboard(
    ranked: Command, api: Api
) -> None:
    assert numbers(ranked) == [3, 2, 1]
    assert numbers(ranked, "tp=1") == [2, 1]
    assert numbers(ranked, "tp=1", "tokens_per_s<=1500") == [1]
    assert "the best 1 of 1 by tokens_per_s" in ranked("--where", "pp=2").stdout

    header, *rows = ranked("--csv", "--where", "tp=2").stdout.splitlines()
    assert "tokens_per_s" in header
    assert len(rows) == 1

    assert ranked("--where", "dp=7").stdout == (
        "campaign first has no ranked trial that meets every --where yet\n"
    )

    where = ("--where", "tp=1")
    page = json.loads(ranked("--json", *where).stdout)
    assert [(each["number"], each["rank"]) for each in page["trials"]] == [(2, 2), (1, 3)]
    table = ranked(*where).stdout
    ranks = [words[:2] for line in table.splitlines() if (words := line.split())]
    assert [each for each in ranks if each[0].isdigit()] == [["2", "2"], ["3", "1"]]
    assert "where tp=1" in table
    assert "the best that is listed is rank 2" in table
    rows = list(csv.DictReader(io.StringIO(ranked("--csv", "--intervals", *where).stdout)))
    assert [row["rank"] for row in rows] == ["2", "3"]

    worker = api.register("w2")
    api.complete(worker, "first", FOUR[3], tokens_per_s=3000.0)
    everything, narrowed = ranked().stdout, ranked("--where", "pp=2").stdout
    assert "cannot be told apart from the first (95 %): trial 4" in everything
    assert "ranks are those" not in everything
    assert "cannot be told apart from rank 1, which is not listed (95 %): trial 4" in narrowed


def test_a_parquet_file_is_named_and_not_written_to_a_terminal(
    ranked: Command, tmp_path: Path
) -> None:
    file = tmp_path / "best.parquet"
    written = ranked("--parquet", str(file))
    assert written.stdout == f"wrote {file}: at most 10 rows, see --limit\n"
    assert parquet.read_metadata(file).num_rows == 3
    piped = ranked("--parquet", "-")
    assert piped.stdout_bytes == ranked("--parquet", "-").stdout_bytes
    assert piped.stdout_bytes == file.read_bytes()
    assert "wrote the table" in piped.stderr

    with Terminal() as terminal:
        ends(ranked("--parquet", terminal.path), 2, "the table is binary")
    assert terminal.printed == ""


BEST = Layout(num_microbatches=8)


def test_an_analysis_names_the_winner_its_neighbours_and_what_matters(
    api: Api, command: Command
) -> None:
    campaign = api.submit()
    problem = api.get("/campaigns/first/analysis", status=404)
    assert "'first' (RUNNING) has no analysis yet: it is made when" in problem["detail"]
    assert problem["type"].endswith("analysis-unavailable")
    worker = api.register()
    api.complete(worker, "first", Layout(tp=2, num_microbatches=8), tokens_per_s=50.0)
    winner = api.complete(worker, "first", BEST, tokens_per_s=100.0)
    api.store.reports.keep_analysis(campaign["id"], make_analysis(winner))

    read = api.get("/campaigns/first/analysis")
    assert (read["campaign"], read["winner"], read["winner_layout"]) == ("first", 2, BEST.key)
    assert [each["knob"] for each in read["importances"]] == ["tp", "micro_batch_size", "pp"]
    down, up = read["steps"]
    assert (down["state"], down["effect"], down["source"]) == ("out_of_memory", None, "predicted")
    assert (up["effect"], up["source"], up["is_apart"]) == (-0.1, "measured", True)
    assert up["also"] == ["dp", "num_microbatches"]

    shown = ends(command("campaign", "analysis", "first"), 0)
    lines = shown.output.splitlines()
    assert "share of the variation of tokens_per_s over 9 layouts" in lines[0]
    assert ["tp", "70.0%"] in [line.split() for line in lines]
    assert any("out of memory" in line and "predicted" in line for line in lines)
    assert any("-10.0%" in line and "measured" in line for line in lines)
    document = json.loads(command("campaign", "analysis", "first", "--json").stdout)
    assert document == read


def test_cheap_trials_say_what_they_stand_for_and_are_not_ranked(
    api: Api, command: Command, client: Client
) -> None:
    add_cheap_campaign(api)

    def cheap(*arguments: str) -> str:
        return click.unstyle(ends(command(*arguments), 0).stdout)

    def step_of(number: int) -> str:
        step = client.trial_page("large").trials[number - 1].cheap_probe.full_step
        return f"{step.expected_s:.4g} s (95 %: {step.low_s:.4g} to {step.high_s:.4g} s)"

    assert (
        f"stands for    cheap probe of {FULL.key}: 8 of 64 micro-batches, 1 of 2 replicas; "
        f"extrapolated step {step_of(1)}\n"
    ) in cheap("trial", "show", "large/1")
    told = f"8 of 64 micro-batches, 2 of 4 layers; extrapolated step {step_of(2)}; it says nothing"
    assert f"{told} of the memory\n" in cheap("trial", "show", "large/2")
    assert "cheap" not in cheap("trial", "show", "large/3")

    _, _, *rows = cheap("trial", "list", "large").splitlines()
    assert "8 of 64 micro-batches, 1 of 2 replicas" in rows[0]
    assert rows[0].rstrip().endswith(step_of(1))
    assert "micro-batches" not in rows[2]
    api.submit()
    assert "cheap probe" not in cheap("trial", "list", "first")

    ranked = cheap("leaderboard", "large")
    assert "the best 1 of 1" in ranked
    assert "beside them: 2 cheap probes, " in ranked
    assert "not ranked" in cheap("campaign", "show", "large")
    assert "cheap" not in cheap("leaderboard", "first")
    assert "cheap" not in cheap("campaign", "show", "first")

    api.store.trials.add(api.store.campaigns.by_name("large").id, ONLY_CHEAP, fidelity=FEWER)
    api.lease(api.store.workers.find()[0].id)
    campaign = client.campaign("large")
    assert "3 trials done (2 cheap probes), 1 running" in progress_line(campaign)
    view = CampaignView(client, "large")
    view.update(campaign)
    lines = view.lines(campaign, 300)
    (now,) = (line for line in lines if line.startswith("now"))
    assert f"cheap probe of {ONLY_CHEAP.key}: 8 of 64 micro-batches, 1 of 2 replicas" in now
    assert "iteration 0 of 6:" in now, "two of warm-up, and four timed ones"
    (so_far,) = (line for line in lines if line.startswith("so far"))
    assert len(so_far.split()[-1]) == 1, "cheap probes are not among the best so far"
