"""A campaign's baseline over HTTP and in the terminal: refused, shown, marked, exported."""

from __future__ import annotations

import dataclasses

import pytest

from layout_tuner.predictions.estimates.prediction import Prediction
from layout_tuner.search_spaces.layouts.layout import Layout
from tests.kit.api import Api, Command
from tests.kit.store import failed

SLOW = Layout(tp=2, num_microbatches=8)
FAST = Layout(num_microbatches=8)
OTHER = Layout(pp=2, num_microbatches=8)
GAIN = "trial 2 gives 1.25 times (95 %: 1.014 to 1.541) the tokens/s of the baseline, trial 1"


@pytest.fixture(scope="module")
def api(module_api: Api) -> Api:
    """The winner of the first campaign gives 1.25 times what the baseline does."""
    module_api.submit(baseline={"tp": 2})
    worker = module_api.register()
    for layout, speed in ((SLOW, 800.0), (FAST, 1000.0), (OTHER, 400.0)):
        module_api.complete(worker, "first", layout, tokens_per_s=speed)
    return module_api


def test_a_campaign_shows_its_baseline_and_what_the_winner_gains_over_it(api: Api) -> None:
    read = api.get("/campaigns/first")
    (listed,) = api.get("/campaigns", name_contains="first")["campaigns"]
    assert read["spec"]["baseline"] == SLOW.to_mapping()
    assert read["baseline"] == listed["baseline"]
    baseline = read["baseline"]
    assert baseline["layout"] == SLOW.to_mapping(every_knob=True) | {"job": {}}
    assert (baseline["trial_number"], baseline["state"]) == (1, "COMPLETED")
    assert (baseline["value"], baseline["outside_space"]) == (pytest.approx(800.0), False)
    gain = baseline["gain"]
    assert (gain["trial_number"], gain["ratio"]) == (2, pytest.approx(1.25))
    assert gain["ratio_low"] < 1.25 < gain["ratio_high"]


def test_a_leaderboard_a_list_of_trials_and_a_trial_mark_the_baseline(api: Api) -> None:
    rows = api.get("/campaigns/first/leaderboard")["trials"]
    found = [(row["number"], row["is_baseline"]) for row in rows]
    assert found == [(2, False), (1, True), (3, False)]
    trials = api.get("/campaigns/first/trials")["trials"]
    assert [trial["is_baseline"] for trial in trials] == [True, False, False]
    assert api.get(f"/trials/{trials[0]['id']}")["is_baseline"]


def test_an_export_says_what_its_trial_gains_over_the_baseline(api: Api) -> None:
    bundle = api.get("/campaigns/first/exports", format="megatron-lm")
    assert GAIN in bundle["notes"]
    assert f"\n# {GAIN}\n" in bundle["files"][0]["content"]
    for trial, note in ((3, "trial 3 gives 0.5 times"), (1, "trial 1 is the baseline itself")):
        notes = api.get("/campaigns/first/exports", format="trainer", trial=trial)["notes"]
        assert notes[0].startswith(note)


def test_commands_say_what_the_winner_gains_over_the_baseline(command: Command) -> None:
    shown = command("campaign", "show", "first").output
    assert f"baseline      trial 1, COMPLETED, 800 tokens/s ±16.0%\n{'':14}{SLOW.key}\n" in shown
    assert f"gain          {GAIN}\n" in shown
    assert command("leaderboard", "first").output.endswith(f"{GAIN}\n")


def test_commands_mark_the_baseline_where_they_list_and_show_trials(command: Command) -> None:
    shown = command("trial", "show", "first/1").output
    assert "layout        n1-tp2-pp1" in shown
    assert ", the baseline\n" in shown
    for table, place in (
        (command("leaderboard", "first").output.partition("\n")[2], 1),
        (command("trial", "list", "first").output, 0),
    ):
        heading, _line, *rows = table.splitlines()
        assert "baseline" in heading
        assert [number for number, row in enumerate(rows) if " * " in row] == [place], table
    assert "baseline" not in command("trial", "list", "first", "--where", "tp=1").output


def test_a_baseline_outside_the_space_is_a_planned_trial_and_shown_with_the_reason_of_its_failure(
    api: Api, command: Command
) -> None:
    outside = {"strategy": "exhaustive", "budget": {}, "baseline": {"recompute": "full"}}
    created = api.submit(name="outside", **outside)
    assert created["baseline"]["outside_space"]
    assert created["progress"]["trials_planned"] == created["num_legal_layouts"] + 1
    api.store.trials.add(created["id"], Layout(num_microbatches=8, recompute="full"))
    worker = api.register()
    api.report(worker, api.lease(worker), failed("out_of_memory"))
    said = "trial 1, INFEASIBLE (out_of_memory) (outside of the space): rank 1 of 2: out_of_memory"
    assert f"baseline      {said}\n" in command("campaign", "show", "outside").output
    assert f"baseline: {said}\n" in command("leaderboard", "outside").output


def test_a_trial_shows_its_prediction(api: Api, command: Command) -> None:
    prediction = Prediction(
        step_time_s=0.5,
        log_step_time_sd=0.1,
        peak_memory_bytes=3 << 30,
        fit_probability=0.995,
        source="estimates",
    )
    campaign = api.submit(name="predicted")["id"]
    trial = api.store.trials.add(campaign, FAST, prediction=prediction)
    assert api.get(f"/trials/{trial.id}")["prediction"] == dataclasses.asdict(prediction)
    assert api.get("/trials/1")["prediction"] is None
    shown = command("trial", "show", str(trial.id)).output
    assert "predicted     0.5 s (±10.5%), 3 GiB, fits with 99.5%, by estimates alone\n" in shown
