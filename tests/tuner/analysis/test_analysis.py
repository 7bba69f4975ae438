"""Importance of knobs, and the effect of one step away from the winner, where both are known."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from layout_tuner.predictions.estimates.step_time import step_time_s as estimated_step_time_s
from layout_tuner.protocol.outcome import Outcome
from layout_tuner.results_db.records import Analysis, CampaignRecord, KnobStepRead
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.campaigns.fidelity import fidelities
from layout_tuner.search_spaces.layouts.job_settings import JobSettings
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.spaces.job_set import JobSet
from layout_tuner.timing_mark import SHARED_CORES_VARIABLE, TIMING_VARIABLE, timing
from layout_tuner.tuner.analysis import importance
from layout_tuner.tuner.analysis.analysis import (
    Tried,
    analyse,
    calibrated_step_time,
    knob_steps,
)
from layout_tuner.tuner.analysis.importance import importances, knobs_of
from layout_tuner.tuner.driver import driver as driver_module
from tests.kit.postgres import upgraded
from tests.kit.store import TimelyStore, TurnableClock, completed, failed
from tests.tuner.factories import DrivenCampaign, FakeWorker, make_spec, run_campaign, submit


def speed(layout: Layout) -> float:
    """The micro-batch matters most, tensor parallelism less, the rest not at all."""
    return 4000.0 * layout.micro_batch_size / layout.tp**0.1


def judge(layout: Layout) -> Outcome:
    if layout.pp == 4:
        return failed("out_of_memory")
    return completed(layout, tokens_per_s=speed(layout) * layout.num_devices)


def analysed(store: Store, **changes: Any) -> tuple[CampaignRecord, Analysis]:
    campaign = run_campaign(store, make_spec(**changes), judge)
    analysis = store.reports.analysis(campaign.id)
    return campaign, analysis


class Exhausted(NamedTuple):
    """A campaign that has measured every layout."""

    store: Store
    campaign: CampaignRecord
    analysis: Analysis


@pytest.fixture(scope="module")
def exhausted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Exhausted]:
    data_dir = upgraded(tmp_path_factory.mktemp("exhausted") / "data")
    with closing(TimelyStore.open(data_dir, clock=TurnableClock())) as store:
        yield Exhausted(store, *analysed(store, strategy="exhaustive", budget={}))


def test_the_most_important_knob_moves_the_objective_most(exhausted: Exhausted) -> None:
    analysis = exhausted.analysis
    assert analysis.method.startswith("fANOVA")
    shares = analysis.importances
    assert next(iter(shares)) == "micro_batch_size"
    assert shares["micro_batch_size"] > 0.7 > shares["tp"] > shares["zero_stage"]
    assert sum(shares.values()) == pytest.approx(1.0)


def test_the_effect_of_a_step_away_from_the_winner_is_what_was_measured(
    exhausted: Exhausted,
) -> None:
    store, campaign, analysis = exhausted
    winner = store.trials.get(analysis.winner_id).layout
    assert (winner.tp, winner.micro_batch_size) == (1, 2)
    steps = {(step.knob, step.direction): step for step in analysis.steps}
    down = steps["micro_batch_size", "down"]
    assert (down.source, down.value, down.stepped_value) == ("measured", "2", "1")
    assert down.effect == pytest.approx(-0.5)
    assert down.is_apart is True
    assert down.also == ("num_microbatches",), "the batch is fixed"
    measured_by = store.trials.get(down.trial_id or 0)
    assert measured_by.layout_key == down.layout_key
    assert measured_by.campaign_id == campaign.id
    assert steps["tp", "up"].effect == pytest.approx(2**-0.1 - 1)


def test_no_step_leads_beyond_the_values_of_a_knob(exhausted: Exhausted) -> None:
    steps = {(step.knob, step.direction) for step in exhausted.analysis.steps}
    assert ("tp", "down") not in steps
    assert ("micro_batch_size", "up") not in steps


def test_a_step_into_what_does_not_fit_says_so(store: Store) -> None:
    space = {"global_batch_size": 16, "tp": 1, "pp": [2, 4], "micro_batch_size": [1, 2]}
    _, analysis = analysed(store, strategy="exhaustive", budget={}, space=space)
    (up,) = [step for step in analysis.steps if step.knob == "pp"]
    assert (up.direction, up.source) == ("up", "measured")
    assert (up.state, up.effect) == ("out_of_memory", None)


def test_a_step_into_what_failed_as_a_cheap_probe_says_so_until_one_runs(store: Store) -> None:
    space = {"global_batch_size": 256, "tp": 1, "pp": [1, 2], "micro_batch_size": 1}
    spec = make_spec(strategy="guided", space=space, budget={"node_hours": 1})
    campaign, legal = submit(store, spec), spec.legal_set()
    whole, other = sorted(map(legal.layout, range(len(legal))), key=lambda layout: layout.pp)
    (part, *_) = fidelities(other, spec.model, spec.cluster)
    store.trials.add(campaign.id, whole)
    failing = store.trials.add(campaign.id, other, fidelity=part)
    worker = FakeWorker(store, lambda ran: judge(ran) if ran.pp == 1 else failed("out_of_memory"))
    assert worker.run_one()
    assert worker.run_one()

    def step() -> tuple[str, str, int | None]:
        ranked = store.leaderboard.ranked_layouts(campaign.id, campaign.objective)
        analysis = analyse(campaign, ranked, store.trials.find(campaign.id), legal)
        (up,) = (step for step in analysis.steps if step.knob == "pp")
        return up.state, up.source, up.trial_id

    assert step() == ("out_of_memory", "measured", failing.id)
    store.trials.requeue(failing.id)
    worker.judge = judge
    assert worker.run_one()
    assert step() == ("completed", "predicted", None), "what ran in part is not measured"


def test_a_step_that_nobody_tried_is_predicted_and_marked_so(store: Store) -> None:
    _, analysis = analysed(store, strategy="random", budget={"trials": 3})
    predicted = [step for step in analysis.steps if step.source == "predicted"]
    assert predicted
    assert all(step.trial_id is None and step.is_apart is None for step in predicted)
    assert all(step.effect is not None for step in predicted if step.state == "completed")
    assert analysis.importances == {}, "three layouts say nothing about four knobs"
    assert analysis.method == ""


def test_predictions_follow_what_the_campaign_measured(store: Store) -> None:
    def tensor_parallelism_is_dear(layout: Layout) -> Outcome:
        slower = 5.0 if layout.tp > 1 else 1.0
        return completed(layout, tokens_per_s=speed(layout) * layout.num_devices / slower)

    spec = make_spec(budget={"trials": 14})
    campaign = run_campaign(store, spec, tensor_parallelism_is_dear)
    step_time_s = calibrated_step_time(
        spec, store.leaderboard.ranked_layouts(campaign.id, spec.objective)
    )
    plain, dear = Layout(dp=2, num_microbatches=8), Layout(tp=2, num_microbatches=16)

    def by_priors(layout: Layout) -> float:
        return float(estimated_step_time_s(layout, spec.model, spec.cluster)[0])

    believed = by_priors(dear) / by_priors(plain)
    assert step_time_s(dear) / step_time_s(plain) > 1.5 * believed


def test_a_campaign_without_a_measurement_completes_and_has_no_analysis(store: Store) -> None:
    spec = make_spec(budget={"trials": 3})
    campaign = run_campaign(store, spec, lambda _: failed("out_of_memory"))
    assert store.reports.analysis(campaign.id) is None
    assert campaign.state == "COMPLETED"
    assert "most common reason: out_of_memory (3 of 3)" in campaign.message


def test_a_campaign_that_cannot_be_analysed_ends_all_the_same(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: object) -> None:
        raise ArithmeticError("no forest grows here")

    monkeypatch.setattr(driver_module, "analyse", breaks)
    assert run_campaign(store, make_spec(budget={"trials": 3}), judge).state == "COMPLETED"


def test_a_campaign_is_analysed_now_and_then_while_it_runs(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_module, "ANALYSIS_INTERVAL_S", 0.0)
    campaign = DrivenCampaign(store, make_spec(budget={"trials": 20}), judge)
    campaign.until(lambda: store.reports.analysis(campaign.id) is not None)
    assert campaign.record.state == "RUNNING"
    first = store.reports.analysis(campaign.id)
    assert first.last_ended_seq >= driver_module.ENDINGS_AN_ANALYSIS


def test_the_imports_of_analyses_begin_once_when_trials_have_ended(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []
    monkeypatch.setenv(SHARED_CORES_VARIABLE, "1")
    monkeypatch.setattr(driver_module, "load", lambda: begun.append(num_ended()))
    monkeypatch.setattr(driver_module, "analyse", lambda *_: None)
    campaign = DrivenCampaign(store, make_spec(budget={"trials": 20}), judge)

    def num_ended() -> int:
        return sum(trial.ended_at is not None for trial in store.trials.find(campaign.id))

    campaign.until(lambda: campaign.record.state != "RUNNING")
    assert len(begun) == 1
    assert begun[0] >= driver_module.ENDINGS_AN_ANALYSIS


def test_the_imports_of_analyses_wait_for_ranks_that_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_of_this_test.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(importance, "_PACKAGES", ("only_of_this_test",))
    monkeypatch.setenv(TIMING_VARIABLE, str(tmp_path / "mark"))
    imported_before: list[bool] = []
    with ExitStack() as ranks:
        ranks.enter_context(timing())

        def sleep(_pause_s: float) -> None:
            imported_before.append("only_of_this_test" in sys.modules)
            ranks.close()

        monkeypatch.setattr("time.sleep", sleep)
        importance.load()
    assert imported_before == [False]
    assert sys.modules.pop("only_of_this_test")


def test_the_same_trials_have_the_same_importances_and_knobs_that_follow_have_none() -> None:
    legal = make_spec().legal_set()
    knobs = knobs_of(legal)
    assert set(knobs) == {"tp", "pp", "micro_batch_size", "zero_stage"}
    dice = random.Random(1)
    layouts = [legal.layout(index) for index in range(len(legal))]
    measured = {layout: speed(layout) * dice.uniform(0.9, 1.1) for layout in layouts}
    first, second = (importances(legal, knobs, measured, seed=3) for _ in range(2))
    assert first == second
    assert importances(legal, knobs, dict.fromkeys(layouts, 1.0), seed=3) == {}


class TestJobs:
    """The analysis of a campaign that searches job knobs."""

    SPEC = make_spec(
        space={
            "global_batch_size": 16,
            "tp": [1, 2],
            "dp": [1, 2],
            "micro_batch_size": [1, 2],
            "job": {
                "compile": {"search": [False, True], "kind": "switch", "default": False},
                "threads": {
                    "search": [2, 1, 4],
                    "kind": "count",
                    "values": [1, 2, 4],
                    "default": 1,
                    "when": "tp > 1",
                },
            },
        }
    )

    @classmethod
    def jobs(cls) -> JobSet:
        jobs = cls.SPEC.jobs(cls.SPEC.legal_set())
        assert isinstance(jobs, JobSet)
        return jobs

    def steps(self, winner: Layout, tried: dict[str, Tried]) -> dict[str, KnobStepRead]:
        jobs = self.jobs()
        found = knob_steps(
            self.SPEC, jobs, knobs_of(jobs), winner, 100.0, tried, lambda layout: 1.0 / layout.tp
        )
        return {f"{step.knob} {step.direction}": step for step in found}

    def test_a_value_of_a_job_knob_is_one_step(self) -> None:
        winner = next(
            each
            for each in map(self.jobs().layout, range(len(self.jobs())))
            if each.tp == 2 and each.job == JobSettings({"compile": True, "threads": 2})
        )
        other = replace(winner, job=JobSettings({"threads": 2}))
        measured = Tried(trial_id=7, state="completed", value=80.0, is_apart=True)
        steps = self.steps(winner, {other.key: measured})
        assert (steps["threads down"].value, steps["threads down"].stepped_value) == ("2", "1")
        assert steps["threads up"].stepped_value == "4"
        off = steps["compile down"]
        assert (off.value, off.stepped_value, off.also) == ("true", "false", ())
        assert (off.source, off.trial_id, off.effect) == ("measured", 7, pytest.approx(-0.2))
        # Without tensor parallelism the trainer has no threads: they follow.
        assert steps["tp down"].also == ("threads",)
        assert Layout.of_key(steps["tp down"].layout_key).job == JobSettings({"compile": True})

    def test_the_knob_that_moves_the_objective_most_is_the_most_important(self) -> None:
        jobs = self.jobs()
        measured = {
            job: 100.0 * (1.5 if job.job.get("compile") else 1.0) * (1.1 if job.tp > 1 else 1.0)
            for job in map(jobs.layout, range(len(jobs)))
        }
        found = importances(jobs, knobs_of(jobs), measured, seed=0)
        assert max(found, key=lambda name: found[name]) == "compile"
        assert found["compile"] > 0.6
        assert sum(found.values()) == pytest.approx(1.0)
