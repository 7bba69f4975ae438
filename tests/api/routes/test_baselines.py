"""A campaign's baseline over HTTP and in the terminal: refused, shown, marked, exported."""

from __future__ import annotations

import math

import pytest

from search_spaces.estimates.prediction import Prediction
from search_spaces.spec.layout import Layout
from search_spaces.statistics.run_spread import RunSpread
from tests.kit.api import Api, Command
from tests.kit.store import failed

BASELINE = {"tp": 2}
SLOW = Layout(tp=2, num_microbatches=8)
FAST = Layout(num_microbatches=8)
OTHER = Layout(pp=2, num_microbatches=8)
FOREIGN = Layout(num_microbatches=8, recompute="full")


@pytest.fixture
def measured(api: Api) -> Api:
    """The winner gives 1.25 times what the baseline does."""
    api.submit(baseline=BASELINE)
    worker = api.register()
    for layout, speed in ((SLOW, 800.0), (FAST, 1000.0), (OTHER, 400.0)):
        api.complete(worker, "first", layout, tokens_per_s=speed)
    return api


def test_a_campaign_its_trials_and_its_leaderboard_show_the_baseline(measured: Api) -> None:
    read = measured.get("/campaigns/first")
    (listed,) = measured.get("/campaigns")["campaigns"]
    assert read["spec"]["baseline"] == SLOW.to_mapping()
    assert read["baseline"] == listed["baseline"]
    baseline = read["baseline"]
    assert baseline["layout"] == SLOW.to_mapping(every_knob=True)
    assert (baseline["trial_number"], baseline["state"]) == (1, "COMPLETED")
    assert (baseline["value"], baseline["outside_space"]) == (pytest.approx(800.0), False)
    assert baseline["gain"] == {
        "ratio": pytest.approx(1.25),
        # Nothing was repeated: both have the assumed spread of runs.
        "ratio_low": pytest.approx(1.25 / math.exp(math.sqrt(2) * RunSpread.prior().reach)),
        "ratio_high": pytest.approx(1.25 * math.exp(math.sqrt(2) * RunSpread.prior().reach)),
        "trial_number": 2,
    }

    rows = measured.get("/campaigns/first/leaderboard")["trials"]
    assert [(row["number"], row["is_baseline"]) for row in rows] == [
        (2, False),
        (1, True),
        (3, False),
    ]
    trials = measured.get("/campaigns/first/trials")["trials"]
    assert [trial["is_baseline"] for trial in trials] == [True, False, False]
    assert measured.get(f"/trials/{trials[0]['id']}")["is_baseline"]


def test_a_clone_keeps_changes_or_drops_the_baseline(measured: Api) -> None:
    kept = measured.post("/campaigns/first/clone", {"name": "kept"}, status=201)
    assert kept["baseline"]["layout"] == SLOW.to_mapping(every_knob=True)
    assert kept["baseline"]["trial_number"] is None
    change = {"name": "other", "baseline": {"pp": 2}}
    other = measured.post("/campaigns/first/clone", change, status=201)
    assert other["baseline"]["layout"] == OTHER.to_mapping(every_knob=True)
    none = measured.post("/campaigns/first/clone", {"name": "none", "baseline": None}, status=201)
    assert none["baseline"] is None


def test_a_baseline_outside_the_space_adds_a_planned_trial(api: Api) -> None:
    created = api.submit(strategy="exhaustive", budget={}, baseline={"recompute": "full"})
    assert created["baseline"]["outside_space"]
    assert created["progress"]["trials_planned"] == created["num_legal_layouts"] + 1


def test_the_probe_of_the_baseline_is_never_stopped_early(api: Api) -> None:
    created = api.submit(baseline=BASELINE)
    worker = api.register()
    api.complete(worker, "first", FAST, tokens_per_s=1024.0)
    api.store.trials.add(created["id"], SLOW)
    assert api.lease(worker)["request"]["stop_above_step_time_s"] is None
    api.store.trials.add(created["id"], OTHER)
    assert api.lease(worker)["request"]["stop_above_step_time_s"] is not None


def test_exports_say_what_the_layout_gains(measured: Api) -> None:
    said = "trial 2 gives 1.25 times (95 %: 1.014 to 1.541) the tokens/s of the baseline, trial 1"
    bundle = measured.get("/campaigns/first/exports", format="megatron-lm")
    assert said in bundle["notes"]
    script = bundle["files"][0]["content"]
    assert f"\n# {said}\n" in script
    worse = measured.get("/campaigns/first/exports", format="trainer", trial=3)
    assert "trial 3 gives 0.5 times" in worse["notes"][0]
    itself = measured.get("/campaigns/first/exports", format="trainer", trial=1)
    assert itself["notes"][0] == "trial 1 is the baseline itself"


@pytest.mark.usefixtures("measured")
def test_commands_say_what_the_winner_gains_and_mark_the_baseline(command: Command) -> None:
    said = "trial 2 gives 1.25 times (95 %: 1.014 to 1.541) the tokens/s of the baseline, trial 1\n"
    shown = command("campaign", "show", "first").output
    assert f"baseline      trial 1, COMPLETED, 800 tokens/s ±16.0%\n{'':14}{SLOW.key}\n" in shown
    assert f"gain          {said}" in shown
    ranked = command("leaderboard", "first").output
    assert ranked.endswith(said)
    _title, heading, _line, *rows = ranked.splitlines()
    assert "baseline" in heading
    assert [number for number, row in enumerate(rows) if " * " in row] == [1], ranked
    assert "layout        n1-tp2-pp1" in command("trial", "show", "first/1").output
    assert ", the baseline\n" in command("trial", "show", "first/1").output

    heading, _line, *rows = command("trial", "list", "first").output.splitlines()
    assert "baseline" in heading
    assert [number for number, row in enumerate(rows, 1) if " * " in row] == [1]
    assert "baseline" not in command("trial", "list", "first", "--where", "tp=1").output


def test_a_failed_baseline_is_shown_with_its_reason(api: Api, command: Command) -> None:
    created = api.submit(baseline={"recompute": "full"})
    api.store.trials.add(created["id"], FOREIGN)
    worker = api.register()
    api.report(worker, api.lease(worker), failed("out_of_memory"))
    said = (
        "trial 1, INFEASIBLE (out_of_memory) (outside of the space): rank 1 of 2: out_of_memory\n"
    )
    assert f"baseline      {said}" in command("campaign", "show", "first").output
    assert f"baseline: {said}" in command("leaderboard", "first").output


def test_a_trial_shows_its_prediction(measured: Api, command: Command) -> None:
    prediction = Prediction(
        step_time_s=0.5,
        log_step_time_sd=0.1,
        peak_memory_bytes=3 << 30,
        fit_probability=0.995,
        source="estimates",
    )
    created = measured.get("/campaigns/first")
    layout = Layout(tp=2, pp=2, num_microbatches=8)
    trial = measured.store.trials.add(created["id"], layout, prediction=prediction)
    assert measured.get(f"/trials/{trial.id}")["prediction"] == {
        "step_time_s": 0.5,
        "log_step_time_sd": 0.1,
        "peak_memory_bytes": 3 << 30,
        "fit_probability": 0.995,
        "source": "estimates",
    }
    assert measured.get("/trials/1")["prediction"] is None
    shown = command("trial", "show", str(trial.id)).output
    assert "predicted     0.5 s (±10.5%), 3 GiB, fits with 99.5%, by estimates alone\n" in shown
