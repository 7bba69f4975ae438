"""The driver against the real store, with a worker that answers at once, and what it predicts."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass

import pytest
from sqlalchemy import text

from layout_tuner.errors import SearchSpaceError, SpaceInvalidError
from layout_tuner.predictions.belief.plan import make_plan
from layout_tuner.predictions.estimates.prediction import Prediction
from layout_tuner.protocol.outcome import Outcome
from layout_tuner.results_db.records import PredictedTrial, TrialRecord
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec
from layout_tuner.search_spaces.layouts.job_settings import JobSettings
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.tuner.driver.campaign_search import CampaignSearch, observe
from layout_tuner.tuner.driver.driver import Driver
from layout_tuner.tuner.strategies.deephyper import DeepHyperProposer
from tests.kit.postgres import upgraded
from tests.kit.store import (
    TimelyStore,
    TurnableClock,
    completed,
    failed,
    make_worker,
    post_outcome,
    take_leases,
)
from tests.tuner.factories import (
    DrivenCampaign,
    FakeWorker,
    ended,
    layouts_of,
    make_spec,
    measured,
    run_campaign,
    submit,
)


@pytest.mark.parametrize(
    ("strategy", "budget", "reason", "trials", "said"),
    [
        ("random", 6, "budget", 6, "6 of 6 trials done (6 completed)"),
        ("deephyper", 12, "budget", 12, "12 of 12 trials done (12 completed)"),
        ("guided", 6, "budget", 6, "6 of 6 trials done (6 completed)"),
        ("exhaustive", 1000, "exhausted", 28, "all 28 legal layouts were tried (28 completed)"),
    ],
)
def test_a_campaign_runs_to_its_end_and_says_so(
    store: Store, strategy: str, budget: int, reason: str, trials: int, said: str
) -> None:
    campaign = DrivenCampaign(store, make_spec(strategy=strategy, budget={"trials": budget}))
    record = campaign.to_end()
    assert (record.state, record.reason, record.message) == ("COMPLETED", reason, said)
    assert [trial.state for trial in campaign.trials] == ["COMPLETED"] * trials
    assert len(set(layouts_of(campaign.trials))) == trials


def test_a_campaign_tries_each_layout_with_each_setting_of_its_job(store: Store) -> None:
    knob = {
        "search": [False, True],
        "kind": "switch",
        "default": False,
        "when": "tp > 1",
    }
    space = {"global_batch_size": 16, "tp": [1, 2], "micro_batch_size": [1, 2]}
    spec = make_spec(strategy="exhaustive", budget={}, space={**space, "job": {"overlap": knob}})

    def judge(layout: Layout) -> Outcome:
        faster = 1.5 if layout.job.get("overlap") else 1.0
        return completed(layout, tokens_per_s=100.0 * faster * layout.num_devices)

    campaign = DrivenCampaign(store, spec, judge)
    record = campaign.to_end()
    assert record.message == "all 6 legal jobs were tried (6 completed)"
    tried = layouts_of(campaign.trials)
    assert sorted((each.tp, each.job.get("overlap", False)) for each in tried) == [
        *[(1, False)] * 2,
        *[(2, False)] * 2,
        *[(2, True)] * 2,
    ]
    best, *_ = store.leaderboard.ranked_layouts(record.id, record.objective)
    assert best.trial.layout.job == JobSettings({"overlap": True})
    analysis = store.reports.analysis(record.id)
    assert analysis is not None
    step = next(each for each in analysis.steps if each.knob == "overlap")
    assert (step.direction, step.stepped_value, step.source) == ("down", "false", "measured")
    assert step.effect == pytest.approx(1 / 1.5 - 1)


def test_node_hours_end_a_campaign_once_what_runs_has_finished(store: Store) -> None:
    campaign = DrivenCampaign(
        store,
        make_spec(budget={"node_hours": 0.01}),
        lambda layout: completed(layout, duration_s=20.0),
    )
    other = FakeWorker(store, name="w2")
    campaign.step()
    (running,) = take_leases(store, other.id, 1)
    campaign.until(lambda: campaign.record.node_seconds >= 36.0)
    campaign.step()
    assert campaign.record.state == "RUNNING"
    assert campaign.count("PENDING") == 0
    post_outcome(store, running.trial_id, running.attempt, measured(running.layout))
    campaign.step()
    record = campaign.record
    assert (record.state, record.reason) == ("COMPLETED", "budget")
    assert "of 0.01 node-hours spent" in record.message
    assert store.trials.get(running.trial_id).state == "COMPLETED"


def test_wall_time_ends_a_campaign_once_a_worker_was_there_for_so_long(
    store: Store, clock: TurnableClock
) -> None:
    campaign = submit(store, make_spec(budget={"wall_time_s": 10}))
    for _ in range(4):
        Driver(store).step()
        clock.forward(12.0)
    assert not ended(store, campaign)
    assert store.campaigns.get(campaign.id).wall_time_s == 0
    make_worker(store)
    driver = Driver(store)
    driver.step()
    assert not ended(store, campaign)
    clock.forward(12.0)
    driver.step()
    record = store.campaigns.get(campaign.id)
    # It measured nothing, so it did not complete.
    assert (record.state, record.reason) == ("FAILED", "budget")
    assert record.message == "12 of 10 s of wall time spent; no trial was run"


@pytest.mark.parametrize(
    ("strategy", "dice_seed"),
    [("random", 1), ("guided", 2), pytest.param("deephyper", 1, marks=pytest.mark.slow)],
)
def test_a_driver_that_dies_at_any_turn_loses_and_repeats_nothing(
    store: Store, strategy: str, dice_seed: int
) -> None:
    spec = make_spec(strategy=strategy, budget={"trials": 12})
    campaign = DrivenCampaign(store, spec, mortality=0.7, dice_seed=dice_seed)
    campaign.workers.append(FakeWorker(store, name="w2"))
    campaign.to_end()
    assert len(campaign.drivers) > 3
    assert [trial.state for trial in campaign.trials] == ["COMPLETED"] * 12
    first = [trial for trial in campaign.trials if trial.repeat_of is None]
    assert len(set(layouts_of(first))) == len(first)
    # What guided doubts it measures again, and never a layout that is being measured.
    assert strategy == "guided" or len(first) == 12


def damage(store: Store, statement: str) -> None:
    """What no store of this version writes: a damaged file, or one of an earlier version."""
    with store._db.write() as session:
        session.execute(text("PRAGMA ignore_check_constraints = ON"))
        session.execute(text(statement))


def explode(*_: object) -> int:
    raise ZeroDivisionError("float division by zero")


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("description", "a lot"),
        ("trial", "zero_stage=7"),
        (
            "strategy",
            "strategy 'deephyper' failed to propose a layout: ZeroDivisionError: "
            "float division by zero",
        ),
    ],
)
def test_what_cannot_be_used_fails_its_campaign_and_no_other(
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    broken: str,
    said: str,
) -> None:
    spec = make_spec("broken", strategy="deephyper", budget={"trials": 12}).to_mapping()
    if broken == "description":
        spec["space"]["tp"] = "a lot"
    elif broken == "strategy":
        monkeypatch.setattr(DeepHyperProposer, "_ask_cbo", explode)
    campaign = store.campaigns.create(spec, num_legal_layouts=28)
    if broken == "trial":
        Driver(store).step()
        damage(store, "UPDATE trials SET zero_stage = 7")
    sound = DrivenCampaign(store, make_spec("sound", budget={"trials": 2}))
    with caplog.at_level(logging.INFO, logger="layout_tuner.tuner"):
        sound.to_end()
        sound.until(lambda: ended(store, campaign))
    record = store.campaigns.get(campaign.id)
    assert (record.state, record.reason) == ("FAILED", "error")
    assert said in record.message
    assert "\n" not in record.message
    assert sound.record.state == "COMPLETED"
    assert "Traceback" in caplog.text


def test_a_throughput_of_zero_teaches_the_search_nothing_and_the_campaign_goes_on(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    campaign = DrivenCampaign(store, make_spec(budget={"trials": 3}))
    campaign.turn()
    damage(store, "UPDATE measurements SET tokens_per_s_per_device = 0")
    assert campaign.to_end().state == "COMPLETED"
    assert "trial 1 teaches the search nothing: objective=0.0" in caplog.text


def test_a_repeat_that_fails_does_not_take_back_what_was_measured(store: Store) -> None:
    campaign = DrivenCampaign(store, make_spec(strategy="exhaustive", budget={"trials": 3}))
    campaign.turn()
    first = campaign.trials[0]
    store.trials.repeat(first.id)
    campaign.worker.judge = lambda layout: (
        failed("out_of_memory") if layout == first.layout else measured(layout)
    )
    record = campaign.to_end()
    assert [trial.reason for trial in campaign.repeats] == ["out_of_memory"]
    strategy = CampaignSearch.rebuild(record, campaign.trials)._strategy
    assert strategy._history.observations[0].state == "completed"


def test_a_trial_that_somebody_else_added_is_not_added_again(store: Store) -> None:
    spec = make_spec(strategy="exhaustive", budget={"trials": 4})
    campaign = DrivenCampaign(store, spec)
    campaign.step()
    store.trials.add(campaign.id, spec.legal_set().layout(2))
    campaign.to_end()
    assert len(campaign.trials) == len(set(layouts_of(campaign.trials))) == 4


@pytest.mark.parametrize(
    ("judge", "reason"),
    [
        (lambda _layout: failed("node_lost"), "node_lost"),
        (lambda _layout: failed("host_resource"), "host_resource"),
        (lambda layout: completed(layout, oversubscribed=True), None),
    ],
    ids=["lost nodes", "a resource of the host", "shared devices"],
)
def test_trials_that_lost_or_blame_their_node_or_shared_devices_teach_the_search_nothing(
    store: Store, judge: Callable[[Layout], Outcome], reason: str | None
) -> None:
    campaign = run_campaign(store, make_spec(budget={"trials": 2}), judge)
    trials = store.trials.find(campaign.id)
    assert [trial.reason for trial in trials] == [reason] * 2
    assert [observe(trial, "tokens_per_s") for trial in trials] == [None] * 2


def test_three_trials_that_lack_a_resource_of_their_hosts_pause_a_campaign_until_it_is_resumed(
    store: Store,
) -> None:
    said = "rank 0: it printed: x; the host ran out of locked memory: set `ulimit -l unlimited`"
    spec = make_spec(budget={"trials": 12})
    campaign = DrivenCampaign(
        store, spec, lambda _layout: failed("host_resource", node="n3", message=said)
    )
    for number in (3, 6):
        campaign.until(lambda: campaign.record.state == "PAUSED")
        campaign.turn(3)
        assert campaign.count("FAILED") == number, "no more trials start, and it counts anew"
        message = campaign.record.message
        assert message.startswith(
            "paused after 3 trials that failed because a host lacks a resource"
        )
        assert f"the last, trial {number} on n3: {said}; then requeue these" in message
        (event,) = store.events.newest(campaign.id, limit=1)
        assert (event.kind, event.data["reason"]) == ("campaign.paused", "host_resource")
        assert store.campaigns.resume(campaign.id).message == ""
    campaign.worker.judge = measured
    store.trials.requeue(campaign.trials[0].id)
    record = campaign.to_end()
    assert record.state == "COMPLETED"
    assert campaign.count("COMPLETED") == 6
    assert campaign.repeats[0].layout == campaign.trials[0].layout


def test_two_such_trials_and_other_failures_pause_no_campaign(store: Store) -> None:
    reasons = iter(["host_resource", "crashed", "host_resource", "out_of_memory", "crashed"])
    campaign = run_campaign(
        store, make_spec(budget={"trials": 5}), lambda _layout: failed(next(reasons))
    )
    assert (campaign.state, campaign.reason) == ("COMPLETED", "budget")


def test_a_driver_waits_for_a_database_that_is_away(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    campaign = submit(store, make_spec(budget={"trials": 2}))
    worker = FakeWorker(store)
    attempts = []

    def away() -> object:
        attempts.append(1)
        if len(attempts) == 3:
            monkeypatch.undo()
        raise OSError("the disk is away")

    monkeypatch.setattr(store.campaigns, "to_drive", away)
    pauses = []

    def wait(pause_s: float) -> bool:
        pauses.append(pause_s)
        worker.run_one()
        return ended(store, campaign)

    with caplog.at_level(logging.INFO, logger="layout_tuner.tuner"):
        Driver(store).run(wait)
    assert len(attempts) == 3
    assert pauses[1:4] == sorted(pauses[1:4])
    assert pauses[3] > pauses[1]
    assert store.campaigns.count_trials(campaign.id)["COMPLETED"] == 2


def test_a_round_reads_the_database_only_where_something_was_stored(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = 0
    campaigns = store.campaigns.to_drive

    def counted() -> object:
        nonlocal rounds
        rounds += 1
        return campaigns()

    monkeypatch.setattr(store.campaigns, "to_drive", counted)
    make_worker(store)
    campaign = submit(store, make_spec(strategy="random", budget={"trials": 5}))
    driver = Driver(store)
    for _ in range(3):
        driver.step()
    assert store.trials.find(campaign.id)
    before = rounds
    for _ in range(20):
        assert driver.step()
    assert rounds - before <= 1, "the driver's own last commit may count as a change"
    store.campaigns.update(campaign.id, notes="something was stored")
    driver.step()
    assert rounds - before <= 2


SETTINGS = {
    "strategy": "exhaustive",
    "budget": {},
    "stop": {"early": False, "remeasure": 0},
    "runs": 3,
}


def some_of_the_space(num: int) -> list[Layout]:
    legal = make_spec().legal_set()
    return [legal.layout(place) for place in range(0, len(legal), len(legal) // num)][:num]


def test_only_the_listed_layouts_are_measured_each_as_often_as_asked_in_turn(store: Store) -> None:
    first, broken, second = layouts = some_of_the_space(3)
    spec = make_spec(layouts=[each.to_mapping() for each in reversed(layouts)], **SETTINGS)
    assert CampaignSpec.from_mapping(spec.to_mapping()) == spec
    record = run_campaign(
        store, spec, lambda layout: failed() if layout == broken else completed(layout)
    )
    measured = [trial.layout for trial in store.trials.find(record.id)]
    assert measured == [first, broken, second, first, second, first, second]
    assert (record.state, record.reason, record.num_legal_layouts) == ("COMPLETED", "exhausted", 3)


def test_a_listed_layout_outside_of_the_space_is_refused() -> None:
    outside = Layout(tp=1, num_microbatches=7)
    with pytest.raises(SpaceInvalidError, match=r"layouts: .*mb7.* is not a legal layout"):
        make_spec(layouts=[outside.to_mapping()], **SETTINGS).legal_set()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"runs": 0}, "runs: 0 is not a whole number"),
        ({"layouts": "all"}, "layouts: 'all' is not a list of layouts"),
        ({"layouts": [{"tp": 0}]}, r"layouts\.0: .*tp=0"),
    ],
)
def test_wrong_lists_and_runs_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(SearchSpaceError, match=message):
        make_spec(**{**SETTINGS, **changes})


@dataclass(frozen=True, kw_only=True)
class GuidedCampaign:
    """A guided search that has ended; what it measured is far off the estimates."""

    campaign: DrivenCampaign
    at_first: CampaignSearch
    """The search before its first trial."""
    kept: list[PredictedTrial]

    @property
    def trials(self) -> list[TrialRecord]:
        return self.campaign.trials


@pytest.fixture(scope="module")
def guided(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GuidedCampaign]:
    with closing(
        TimelyStore.open(upgraded(tmp_path_factory.mktemp("guided")), clock=TurnableClock())
    ) as store:
        campaign = DrivenCampaign(store, make_spec(strategy="guided", budget={"trials": 5}))
        at_first = CampaignSearch.rebuild(campaign.record, [])
        campaign.to_end()
        kept = store.trials.predictions(campaign.id)
        yield GuidedCampaign(campaign=campaign, at_first=at_first, kept=kept)


def test_each_guided_trial_keeps_a_prediction(guided: GuidedCampaign) -> None:
    kept, store = guided.kept, guided.campaign.store
    assert [each.trial_id for each in kept] == [trial.id for trial in guided.trials]
    for each in kept:
        assert 0 < each.prediction.log_step_time_sd < 5
        assert store.trials.detail(each.trial_id).prediction == each.prediction


def test_a_kept_prediction_stands_beside_its_measurement(guided: GuidedCampaign) -> None:
    measured = [(each.measurement, each.layout_key) for each in guided.trials]
    assert [
        (each.step_time_s, each.peak_memory_bytes, each.layout_key) for each in guided.kept
    ] == [
        (measurement.step_time_s, measurement.peak_memory_bytes, key)
        for measurement, key in measured
    ]


def test_a_guided_search_says_what_its_predictions_rest_on(guided: GuidedCampaign) -> None:
    sources = [each.prediction.source for each in guided.kept]
    assert (sources[0], sources[-1]) == ("estimates", "calibrated")


def test_a_kept_prediction_is_of_its_moment(guided: GuidedCampaign) -> None:
    first = guided.trials[0]
    kept, expected = guided.kept[0].prediction, guided.at_first.predict(first.layout)
    assert kept.step_time_s == pytest.approx(expected.step_time_s)
    assert kept.peak_memory_bytes == pytest.approx(expected.peak_memory_bytes, abs=1)
    assert kept.fit_probability == pytest.approx(expected.fit_probability)


def test_a_later_guided_search_would_predict_otherwise(guided: GuidedCampaign) -> None:
    first = guided.trials[0]
    later = CampaignSearch.rebuild(guided.campaign.record, guided.trials).predict(first.layout)
    measured_s = first.measurement.step_time_s
    assert abs(math.log(later.step_time_s / measured_s)) < 0.1
    assert abs(math.log(guided.kept[0].prediction.step_time_s / measured_s)) > 0.5


@pytest.mark.parametrize("trainer", ["megatron-lm", "nanotron", "embedded"])
def test_a_search_predicts_for_the_campaigns_trainer_as_its_plan_does(
    store: Store, trainer: str
) -> None:
    spec = make_spec(strategy="guided", probe={"trainer": trainer})
    search = CampaignSearch.rebuild(submit(store, spec), [])
    plan = make_plan(search.spec, top=3)
    assert plan.trainer == trainer
    for each in plan.layouts:
        predicted = search.predict(each.layout)
        assert predicted is not None
        assert predicted.step_time_s == pytest.approx(each.predicted.step_time_s)
        assert predicted.peak_memory_bytes == pytest.approx(each.predicted.peak_memory_bytes, abs=1)


def test_repeats_baselines_unknown_to_the_search_and_random_proposals_have_no_prediction(
    store: Store,
) -> None:
    cases = {
        "inside": {"strategy": "guided", "baseline": {"tp": 4, "micro_batch_size": 2}},
        "outside": {"strategy": "guided", "baseline": {"recompute": "full"}},
        "random": {"strategy": "random"},
    }
    for name, changes in cases.items():
        campaign = DrivenCampaign(store, make_spec(name, **changes))
        campaign.turn()
        first = campaign.trials[0]
        assert first.is_baseline == ("baseline" in changes)
        assert (store.trials.detail(first.id).prediction is not None) == (name == "inside")
        assert store.trials.detail(store.trials.repeat(first.id).id).prediction is None
        store.campaigns.cancel(campaign.id)  # the next one has the worker for itself


def test_a_prediction_beyond_what_the_database_holds_is_cut() -> None:
    absurd = Prediction.of(
        log_step_time=1e4,
        log_step_time_sd=0.3,
        peak_memory_bytes=1e40,
        fit_probability=1.0 + 1e-12,
        source="estimates",
    )
    assert absurd.step_time_s < 1e300
    assert absurd.peak_memory_bytes < 1 << 63
    assert absurd.fit_probability == 1.0


def test_a_guided_campaign_of_several_objectives_starts_from_another_and_survives_a_restart(
    store: Store,
) -> None:
    run_campaign(store, make_spec("first", budget={"trials": 3}))
    spec = make_spec(
        "second",
        strategy="guided",
        objective=["tokens_per_s", "memory_headroom", "tokens_per_node_hour"],
        constraints={"memory_headroom": 0.05},
        stop={"remeasure": 0},
        budget={"trials": 4},
    )
    campaign = DrivenCampaign(store, spec)
    campaign.turn(2)
    told, known = campaign.trials, store.plans.known_trials(campaign.record)
    one, other = (CampaignSearch.rebuild(campaign.record, told, known).ask() for _ in range(2))
    assert one == other
    assert one is not None
    record = campaign.to_end()
    assert (record.state, record.reason) == ("COMPLETED", "budget"), record.message
    assert campaign.count() == 4
