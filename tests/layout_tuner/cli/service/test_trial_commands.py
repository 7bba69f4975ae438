"""Commands that show and change trials, and what a campaign has found."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def test_trials_are_listed_in_the_order_that_is_asked_for(run: Command) -> None:
    assert shown(run("list", "first")) == ["1", "2", "3"]
    assert shown(run("list", "first", "--sort", "tp", "--descending")) == ["2", "1", "3"]
    table = run("list", "first").stdout
    assert "FAILED (crashed)" in table
    assert "10.24 s" in table


def test_trials_are_listed_that_meet_every_condition(run: Command) -> None:
    assert shown(run("list", "first", "--where", "tp=1,4", "--where", "state=PENDING")) == ["3"]
    assert shown(run("list", "first", "--where", "tokens_per_s>=100")) == ["1"]
    assert shown(run("list", "first", "--where", "tokens_per_s <= 99.5")) == []
    page = json.loads(run("list", "first", "--where", "reason=crashed", "--json").stdout)
    assert [each["number"] for each in page["trials"]] == [2]


def test_a_list_of_trials_that_is_cut_says_so(run: Command) -> None:
    result = run("list", "first", "--limit", "2")
    assert shown(result) == ["1", "2"]
    assert "there are more than 2" in result.stderr
    assert run("list", "first", "--limit", "3").stderr == ""


def test_a_trial_is_shown_by_its_id_or_its_campaign_and_number(run: Command) -> None:
    by_id, by_number = run("show", "2"), run("show", "first/2")
    assert by_id.exit_code == 0, by_id.output
    assert by_id.stdout == by_number.stdout
    assert "message       rank 1 of 2: crashed" in by_id.stdout
    assert "1 on w1 (node-1): reported" in by_id.stdout
    for wrong in ("first", "first/", "/2", "first/two", "-1", "\u0662"):
        assert run("show", "--", wrong).exit_code == 2, wrong


def test_a_trial_is_shown_with_its_figures(run: Command) -> None:
    text = run("show", "first/1").stdout
    assert "tokens/s      100" in text
    assert "peak memory   5 GiB" in text
    detail = json.loads(run("show", "first/1", "--json").stdout)
    assert detail["measurement"]["tokens_per_s"] == 100.0


def test_the_log_of_a_trial_is_printed_once_it_has_one(run: Command) -> None:
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
        "recompute=moe_act+mlp",
        "mfu>=0.3",
        "mfu<=0.5",
        "peak_memory_bytes<=8e9",
    ]
    assert read_conditions(conditions) == TrialFilter(
        numbers=(1, 2),
        states=("FAILED",),
        sequence_parallel=(True,),
        precision=("bf16", "fp16"),
        recompute=("mlp+moe_act",),
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


def test_only_layouts_that_meet_every_condition_are_ranked(ranked: Command) -> None:
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


def test_layouts_that_meet_a_condition_keep_their_ranks_of_the_whole_leaderboard(
    ranked: Command,
) -> None:
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


def test_ties_with_the_first_are_told_also_where_it_is_not_listed(
    ranked: Command, api: Api
) -> None:
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


@pytest.fixture
def analysed(api: Api) -> Any:
    """The analysis of a campaign of two layouts, as its document."""
    campaign = api.submit()
    worker = api.register()
    api.complete(worker, "first", Layout(tp=2, num_microbatches=8), tokens_per_s=50.0)
    winner = api.complete(worker, "first", BEST, tokens_per_s=100.0)
    api.store.reports.keep_analysis(campaign["id"], make_analysis(winner))
    return api.get("/campaigns/first/analysis")


def test_a_campaign_without_an_analysis_says_when_it_is_made(api: Api) -> None:
    api.submit()
    problem = api.get("/campaigns/first/analysis", status=404)
    assert "'first' (RUNNING) has no analysis yet: it is made when" in problem["detail"]
    assert problem["type"].endswith("analysis-unavailable")


def test_an_analysis_names_the_winner_its_neighbours_and_what_matters(analysed: Any) -> None:
    found = (analysed["campaign"], analysed["winner"], analysed["winner_layout"])
    assert found == ("first", 2, BEST.key)
    assert [each["knob"] for each in analysed["importances"]] == ["tp", "micro_batch_size", "pp"]
    down, up = analysed["steps"]
    assert (down["state"], down["effect"], down["source"]) == ("out_of_memory", None, "predicted")
    assert (up["effect"], up["source"], up["is_apart"]) == (-0.1, "measured", True)
    assert up["also"] == ["dp", "num_microbatches"]


def test_the_command_prints_an_analysis_as_a_table_or_as_its_document(
    command: Command, analysed: Any
) -> None:
    shown = ends(command("campaign", "analysis", "first"), 0)
    lines = shown.output.splitlines()
    assert "share of the variation of tokens_per_s over 9 layouts" in lines[0]
    assert ["tp", "70.0%"] in [line.split() for line in lines]
    assert any("out of memory" in line and "predicted" in line for line in lines)
    assert any("-10.0%" in line and "measured" in line for line in lines)
    document = json.loads(command("campaign", "analysis", "first", "--json").stdout)
    assert document == analysed


@pytest.fixture
def cheap(api: Api, command: Command) -> Callable[..., str]:
    """What a command prints; the campaign `large` has cheap probes, and `first` has none."""
    add_cheap_campaign(api)
    api.submit()
    return lambda *arguments: click.unstyle(ends(command(*arguments), 0).stdout)


def step_of(client: Client, number: int) -> str:
    step = client.trial_page("large").trials[number - 1].cheap_probe.full_step
    return f"{step.expected_s:.4g} s (95 %: {step.low_s:.4g} to {step.high_s:.4g} s)"


def test_a_cheap_trial_is_shown_with_what_it_stands_for(
    cheap: Callable[..., str], client: Client
) -> None:
    assert (
        f"stands for    cheap probe of {FULL.key}: 8 of 64 micro-batches, 1 of 2 replicas; "
        f"extrapolated step {step_of(client, 1)}\n"
    ) in cheap("trial", "show", "large/1")
    step = step_of(client, 2)
    told = f"8 of 64 micro-batches, 2 of 4 layers; extrapolated step {step}; it says nothing"
    assert f"{told} of the memory\n" in cheap("trial", "show", "large/2")
    assert "cheap" not in cheap("trial", "show", "large/3")


def test_a_list_of_trials_marks_the_cheap_ones(cheap: Callable[..., str], client: Client) -> None:
    _, _, *rows = cheap("trial", "list", "large").splitlines()
    assert "8 of 64 micro-batches, 1 of 2 replicas" in rows[0]
    assert rows[0].rstrip().endswith(step_of(client, 1))
    assert "micro-batches" not in rows[2]
    assert "cheap probe" not in cheap("trial", "list", "first")


def test_cheap_trials_are_counted_beside_the_leaderboard_and_not_ranked(
    cheap: Callable[..., str],
) -> None:
    ranked = cheap("leaderboard", "large")
    assert "the best 1 of 1" in ranked
    assert "beside them: 2 cheap probes, " in ranked
    assert "not ranked" in cheap("campaign", "show", "large")
    assert "cheap" not in cheap("leaderboard", "first")
    assert "cheap" not in cheap("campaign", "show", "first")


def test_whoever_watches_sees_which_cheap_probe_runs_and_none_among_the_best(
    api: Api, client: Client
) -> None:
    add_cheap_campaign(api)
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
