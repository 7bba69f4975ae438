from __future__ import annotations

import json

import click
import pytest
from click.testing import Result

from api.commands.trial_conditions import read_conditions
from results_db.trials.filter import TrialFilter
from search_spaces.spec.layout import Layout
from tests.kit.api import Api, Command
from tests.kit.store import failed


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
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines()]
    return [row[1] for row in rows if row and row[0].isdigit()]


def test_trials_are_listed_by_condition_in_the_order_that_is_asked_for(run: Command) -> None:
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


def test_a_trial_is_shown_by_its_id_or_its_number_with_its_figures_and_log(run: Command) -> None:
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
    waiting = run("log", "first/3")
    assert waiting.exit_code == 1
    assert "trial first/3 (id 3) is PENDING and has no log" in waiting.output


def test_trials_are_repeated_queued_again_and_cancelled(run: Command) -> None:
    repeated = run("repeat", "first/1", "--times", "2")
    assert repeated.stdout.count("is PENDING") == 2, repeated.output
    assert "number 6" in run("requeue", "first/2").stdout
    again = run("requeue", "first/2")
    assert (again.exit_code, "of the same layout" in again.output) == (1, True)
    assert run("cancel", "first/6").stdout == "trial first/6 (id 6) is CANCELLED\n"
    assert json.loads(run("requeue", "first/2", "--json").stdout)["number"] == 7
    assert len(json.loads(run("repeat", "first/1", "--json").stdout)["trials"]) == 1
    assert json.loads(run("cancel", "first/3", "--json").stdout)["state"] == "CANCELLED"


def test_cancelling_a_running_trial_says_that_its_worker_stops_it(run: Command, api: Api) -> None:
    api.lease(api.register("w2"))
    assert "its worker is told" in run("cancel", "first/3").stdout


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
