"""A campaign's baseline over HTTP and in the terminal: refused, shown, marked, exported."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from click.testing import CliRunner

from api.cli import main
from api.client import Client
from search_spaces.estimates.prediction import Prediction
from search_spaces.spec.layout import Layout
from tests.api.local_api import TOKEN, Api
from tests.results_db.factories import failed

Run = Callable[..., str]

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


@pytest.fixture
def run(api: Api, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command against the service; returns what it prints."""

    def run_it(*arguments: str) -> str:
        client = Client("http://testserver", TOKEN, transport=api.http._transport)
        monkeypatch.setattr("api.commands.connection.connect", lambda *_: client)
        # Wide enough that no column of a table is left out.
        result = CliRunner().invoke(main, arguments, env={"COLUMNS": "220"})
        assert result.exit_code == 0, result.output
        return result.output

    return run_it


def test_an_illegal_one_is_refused_with_all_other_errors(api: Api) -> None:
    body = {
        "name": "first",
        "model": "tiny",
        "cluster": "local-cpu",
        "space": {"global_batch_size": 8},
        "baseline": {"tp": 3, "dp": 1},
        "strategy": "best",
        "budget": {"trials": 0},
    }
    told = api.post("/campaigns", body, status=422)
    fields = {error["field"]: error["message"] for error in told["errors"]}
    assert {"body.strategy", "body.budget.trials", "body.baseline"} <= fields.keys()
    assert "num_heads=4 is not divisible by tp=3" in told["detail"]
    assert api.get("/campaigns")["campaigns"] == []


def test_a_campaign_reads_with_its_baseline(measured: Api) -> None:
    read = measured.get("/campaigns/first")
    (listed,) = measured.get("/campaigns")["campaigns"]
    assert read["spec"]["baseline"] == SLOW.to_mapping()
    assert read["baseline"] == listed["baseline"]
    baseline = read["baseline"]
    assert baseline["layout"] == SLOW.to_mapping()
    assert (baseline["trial_number"], baseline["state"]) == (1, "COMPLETED")
    assert (baseline["value"], baseline["outside_space"]) == (pytest.approx(800.0), False)
    assert baseline["gain"] == {
        "ratio": pytest.approx(1.25),
        "ratio_low": pytest.approx(1.25),
        "ratio_high": pytest.approx(1.25),
        "trial_number": 2,
    }


def test_a_campaign_without_one_says_so(api: Api) -> None:
    assert api.submit()["baseline"] is None


def test_its_trials_and_rows_are_marked(measured: Api) -> None:
    rows = measured.get("/campaigns/first/leaderboard")["trials"]
    assert [(row["number"], row["is_baseline"]) for row in rows] == [
        (2, False),
        (1, True),
        (3, False),
    ]
    trials = measured.get("/campaigns/first/trials")["trials"]
    assert [trial["is_baseline"] for trial in trials] == [True, False, False]
    assert measured.get(f"/trials/{trials[0]['id']}")["is_baseline"]


def test_a_clone_keeps_it_and_may_name_another_or_none(measured: Api) -> None:
    kept = measured.post("/campaigns/first/clone", {"name": "kept"}, status=201)
    assert kept["baseline"]["layout"] == SLOW.to_mapping()
    assert kept["baseline"]["trial_number"] is None
    change = {"name": "other", "baseline": {"pp": 2}}
    other = measured.post("/campaigns/first/clone", change, status=201)
    assert other["baseline"]["layout"] == OTHER.to_mapping()
    none = measured.post("/campaigns/first/clone", {"name": "none", "baseline": None}, status=201)
    assert none["baseline"] is None


def test_one_outside_of_the_space_is_a_trial_more_than_the_space_has(api: Api) -> None:
    created = api.submit(strategy="exhaustive", budget={}, baseline={"recompute": "full"})
    assert created["baseline"]["outside_space"]
    assert created["progress"]["trials_planned"] == created["num_legal_layouts"] + 1


def test_its_probe_is_never_stopped_early(api: Api) -> None:
    created = api.submit(baseline=BASELINE)
    worker = api.register()
    api.complete(worker, "first", FAST, tokens_per_s=1024.0)
    api.store.add_trial(created["id"], SLOW)
    assert api.lease(worker)["request"]["stop_above_step_time_s"] is None
    api.store.add_trial(created["id"], OTHER)
    assert api.lease(worker)["request"]["stop_above_step_time_s"] is not None


def test_exports_say_what_the_layout_gains(measured: Api) -> None:
    said = "trial 2 gives 1.25 times (95 %: 1.25 to 1.25) the tokens/s of the baseline, trial 1"
    bundle = measured.get("/campaigns/first/exports", format="megatron-lm")
    assert said in bundle["notes"]
    script = bundle["files"][0]["content"]
    assert f"\n# {said}\n" in script
    worse = measured.get("/campaigns/first/exports", format="trainer", trial=3)
    assert "trial 3 gives 0.5 times" in worse["notes"][0]
    itself = measured.get("/campaigns/first/exports", format="trainer", trial=1)
    assert itself["notes"][0] == "trial 1 is the baseline itself"


def test_tables_are_as_without_a_baseline(measured: Api) -> None:
    table = measured.http.get("/v1/campaigns/first/leaderboard?format=csv").text
    assert "baseline" not in table


@pytest.mark.usefixtures("measured")
def test_show_and_leaderboard_say_what_the_winner_gains(run: Run) -> None:
    said = "trial 2 gives 1.25 times (95 %: 1.25 to 1.25) the tokens/s of the baseline, trial 1\n"
    shown = run("campaign", "show", "first")
    assert f"baseline      trial 1, COMPLETED, 800 tokens/s ±0.0%\n{'':14}{SLOW.key}\n" in shown
    assert f"gain          {said}" in shown
    ranked = run("leaderboard", "first")
    assert ranked.endswith(said)
    _title, heading, _line, *rows = ranked.splitlines()
    assert "baseline" in heading
    assert [number for number, row in enumerate(rows) if " * " in row] == [1], ranked
    assert "layout        n1-tp2-pp1" in run("trial", "show", "first/1")
    assert ", the baseline\n" in run("trial", "show", "first/1")


@pytest.mark.usefixtures("measured")
def test_a_list_of_trials_marks_it(run: Run) -> None:
    heading, _line, *rows = run("trial", "list", "first").splitlines()
    assert "baseline" in heading
    assert [number for number, row in enumerate(rows, 1) if " * " in row] == [1]
    assert "baseline" not in run("trial", "list", "first", "--where", "tp=1")


@pytest.mark.usefixtures("measured")
def test_a_leaderboard_without_the_baseline_has_no_column_for_it(run: Run) -> None:
    ranked = run("leaderboard", "first", "--where", "tp=1")
    assert "baseline" not in ranked.split("trial 2 gives")[0]


def test_one_that_failed_is_shown_with_its_reason(api: Api, run: Run) -> None:
    created = api.submit(baseline={"recompute": "full"})
    api.store.add_trial(created["id"], FOREIGN)
    worker = api.register()
    api.report(worker, api.lease(worker), failed("out_of_memory"))
    said = (
        "trial 1, INFEASIBLE (out_of_memory) (outside of the space): rank 1 of 2: out_of_memory\n"
    )
    assert f"baseline      {said}" in run("campaign", "show", "first")
    assert f"baseline: {said}" in run("leaderboard", "first")


@pytest.mark.usefixtures("measured")
def test_a_clone_names_it(run: Run) -> None:
    told = run("campaign", "clone", "first", "--set", "baseline={tp: 1, recompute: full}")
    assert f"baseline, measured first: {FOREIGN.key} (outside of the space)\n" in told


def test_a_trial_reads_with_what_was_predicted(measured: Api, run: Run) -> None:
    prediction = Prediction(
        step_time_s=0.5,
        log_step_time_sd=0.1,
        peak_memory_bytes=3 << 30,
        fit_probability=0.995,
        source="estimates",
    )
    created = measured.get("/campaigns/first")
    layout = Layout(tp=2, pp=2, num_microbatches=8)
    trial = measured.store.add_trial(created["id"], layout, prediction=prediction)
    assert measured.get(f"/trials/{trial.id}")["prediction"] == {
        "step_time_s": 0.5,
        "log_step_time_sd": 0.1,
        "peak_memory_bytes": 3 << 30,
        "fit_probability": 0.995,
        "source": "estimates",
    }
    assert measured.get("/trials/1")["prediction"] is None
    shown = run("trial", "show", str(trial.id))
    assert "predicted     0.5 s (±10.5%), 3 GiB, fits with 99.5%, by estimates alone\n" in shown
