"""The driver against the real store, with a worker that answers at once."""

from __future__ import annotations

import logging
import random
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from results_db.database.data_dir import DataDir
from results_db.store import Store
from search_spaces.protocol.outcome import Outcome
from search_spaces.spec.layout import Layout
from tests.kit.store import TurnableClock, completed, failed, post_outcome, take_leases
from tests.tuner.factories import (
    FakeWorker,
    drive_until,
    ended,
    layouts_of,
    make_spec,
    measured,
    out_of_memory,
    submit,
)
from tuner.driver.campaign_search import CampaignSearch, observe
from tuner.driver.driver import Driver


@pytest.mark.parametrize("strategy", ["random", "deephyper", "guided", "exhaustive"])
def test_a_campaign_runs_to_its_budget_and_says_so(store: Store, strategy: str) -> None:
    campaign = submit(store, make_spec(strategy=strategy, budget={"trials": 12}))
    drive_until(lambda: ended(store, campaign), Driver(store).step, FakeWorker(store))
    record = store.campaigns.get(campaign.id)
    trials = store.trials.find(campaign.id)
    assert (record.state, record.reason) == ("COMPLETED", "budget")
    assert record.message == "12 of 12 trials done (12 completed)"
    assert [trial.state for trial in trials] == ["COMPLETED"] * 12
    assert len(set(layouts_of(trials))) == 12


@pytest.mark.parametrize("strategy", ["random", "deephyper", "guided", "exhaustive"])
def test_a_campaign_ends_when_every_legal_layout_was_tried(store: Store, strategy: str) -> None:
    campaign = submit(store, make_spec(strategy=strategy, budget={"trials": 1000}))
    drive_until(lambda: ended(store, campaign), Driver(store).step, FakeWorker(store))
    record = store.campaigns.get(campaign.id)
    num_legal = campaign.num_legal_layouts
    assert (record.state, record.reason) == ("COMPLETED", "exhausted")
    assert record.message.startswith(f"all {num_legal} legal layouts were tried")
    assert len(set(layouts_of(store.trials.find(campaign.id)))) == num_legal


def test_the_objective_of_the_campaign_is_what_the_search_maximises(store: Store) -> None:
    spec = make_spec(strategy="deephyper", budget={"trials": 18})
    campaign = submit(store, spec)
    drive_until(lambda: ended(store, campaign), Driver(store).step, FakeWorker(store))
    values = [
        trial.measurement.tokens_per_s_per_device
        for trial in store.trials.find(campaign.id)
        if trial.measurement is not None
    ]
    legal = spec.legal_set()
    best = max(1000.0 / (legal.layout(i).tp + legal.layout(i).pp) for i in range(len(legal)))
    assert max(values) == pytest.approx(best)


def test_a_campaign_without_any_completed_trial_names_the_common_reason(store: Store) -> None:
    campaign = submit(store, make_spec(strategy="deephyper", budget={"trials": 5}))
    reasons = iter(["out_of_memory", "crashed", "out_of_memory", "timeout", "out_of_memory"])

    def judge(_layout: Layout) -> Outcome:
        return failed(next(reasons))

    drive_until(lambda: ended(store, campaign), Driver(store).step, FakeWorker(store, judge))
    record = store.campaigns.get(campaign.id)
    assert (record.state, record.reason) == ("COMPLETED", "budget")
    assert record.message == (
        "5 of 5 trials done; no trial completed; most common reason: out_of_memory (3 of 5)"
    )


def test_node_hours_end_a_campaign_once_what_runs_has_finished(store: Store) -> None:
    campaign = submit(store, make_spec(budget={"node_hours": 0.01}))
    slow = FakeWorker(store, lambda layout: completed(layout, duration_s=20.0))
    other = FakeWorker(store, name="w2")
    driver = Driver(store)
    driver.step()
    (running,) = take_leases(store, other.id, 1)
    drive_until(lambda: store.campaigns.get(campaign.id).node_seconds >= 36.0, driver.step, slow)
    driver.step()
    assert store.campaigns.get(campaign.id).state == "RUNNING"
    assert store.campaigns.count_trials(campaign.id)["PENDING"] == 0
    post_outcome(store, running.trial_id, running.attempt, measured(running.layout))
    driver.step()
    record = store.campaigns.get(campaign.id)
    assert (record.state, record.reason) == ("COMPLETED", "budget")
    assert "of 0.01 node-hours spent" in record.message
    assert store.trials.get(running.trial_id).state == "COMPLETED"


def test_wall_time_ends_a_campaign_that_no_worker_serves(
    store: Store, clock: TurnableClock
) -> None:
    campaign = submit(store, make_spec(budget={"wall_time_s": 10}))
    driver = Driver(store)
    driver.step()
    assert not ended(store, campaign)
    clock.forward(12.0)
    driver.step()
    record = store.campaigns.get(campaign.id)
    assert (record.state, record.reason) == ("COMPLETED", "budget")
    assert record.message == "12 of 10 s of wall time spent; no trial was run"


def test_a_paused_campaign_gets_nothing_new_until_it_is_resumed(store: Store) -> None:
    campaign = submit(store, make_spec())
    driver, worker = Driver(store), FakeWorker(store)
    driver.step()
    worker.run_one()
    store.campaigns.pause(campaign.id)
    before = len(store.trials.find(campaign.id))
    for _ in range(5):
        driver.step()
        worker.run_one()
    assert len(store.trials.find(campaign.id)) == before
    store.campaigns.resume(campaign.id)
    drive_until(lambda: ended(store, campaign), driver.step, worker)
    assert store.campaigns.count_trials(campaign.id)["COMPLETED"] == 6


def test_a_cancelled_campaign_is_left_alone(store: Store) -> None:
    campaign = submit(store, make_spec())
    driver, worker = Driver(store), FakeWorker(store)
    driver.step()
    worker.run_one()
    store.campaigns.cancel(campaign.id)
    before = store.campaigns.count_trials(campaign.id)
    for _ in range(3):
        assert driver.step()
        worker.run_one()
    assert store.campaigns.get(campaign.id).state == "CANCELLED"
    assert store.campaigns.count_trials(campaign.id) == before


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", ["random", "deephyper", "guided"])
@pytest.mark.parametrize("dice_seed", [1, 2])
def test_a_driver_that_dies_at_any_turn_loses_and_repeats_nothing(
    store: Store, strategy: str, dice_seed: int
) -> None:
    spec = make_spec(strategy=strategy, budget={"trials": 15})
    campaign = submit(store, spec)
    dice = random.Random(dice_seed)
    drivers = [Driver(store)]

    def step_or_die() -> None:
        if dice.random() < 0.4:
            drivers.append(Driver(store))
        drivers[-1].step()

    workers = [FakeWorker(store, name="w1"), FakeWorker(store, name="w2")]
    drive_until(lambda: ended(store, campaign), step_or_die, *workers)
    trials = store.trials.find(campaign.id)
    assert len(drivers) > 3
    assert [trial.state for trial in trials] == ["COMPLETED"] * 15
    first = [trial for trial in trials if trial.repeat_of is None]
    assert len(set(layouts_of(first))) == len(first)
    # What guided doubts it measures again, and never a layout that is being measured.
    assert strategy == "guided" or len(first) == 15


@pytest.mark.parametrize("strategy", ["random", "deephyper"])
def test_an_interrupted_search_goes_the_way_of_an_uninterrupted_one(
    store: Store, strategy: str
) -> None:
    first, second = (
        submit(store, make_spec(name, strategy=strategy, budget={"trials": 10}))
        for name in ("first", "second")
    )
    worker = FakeWorker(store)
    driver = Driver(store)
    store.campaigns.pause(second.id)
    drive_until(lambda: ended(store, first), driver.step, worker)
    store.campaigns.resume(second.id)
    drive_until(lambda: ended(store, second), lambda: Driver(store).step(), worker)
    one, two = (layouts_of(store.trials.find(campaign.id)) for campaign in (first, second))
    assert one == two


def test_a_broken_description_fails_its_campaign_and_no_other(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    spec = make_spec("broken").to_mapping()
    spec["space"]["tp"] = "a lot"
    broken = store.campaigns.create(spec, num_legal_layouts=24)
    sound = submit(store, make_spec("sound"))
    with caplog.at_level(logging.INFO, logger="tuner"):
        drive_until(lambda: ended(store, sound), Driver(store).step, FakeWorker(store))
    record = store.campaigns.get(broken.id)
    assert (record.state, record.reason) == ("FAILED", "error")
    assert "tp" in record.message
    assert "a lot" in record.message
    assert "\n" not in record.message
    assert store.campaigns.get(sound.id).state == "COMPLETED"
    assert "Traceback" in caplog.text


def test_a_trial_that_cannot_be_read_back_fails_its_campaign_and_no_other(
    store: Store, tmp_path: Path
) -> None:
    damaged = submit(store, make_spec("damaged"))
    Driver(store).step()
    path = DataDir(tmp_path / "data").database_url.removeprefix("sqlite:///")
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("PRAGMA ignore_check_constraints = ON")  # as a damaged file is
        connection.execute("UPDATE trials SET zero_stage = 7")
    sound = submit(store, make_spec("sound"))
    drive_until(lambda: ended(store, sound), Driver(store).step, FakeWorker(store))
    assert store.campaigns.get(damaged.id).state == "FAILED"
    assert "zero_stage=7" in store.campaigns.get(damaged.id).message
    assert store.campaigns.get(sound.id).state == "COMPLETED"


def test_a_measurement_of_nothing_teaches_nothing_and_stops_nothing(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    campaign = submit(store, make_spec(budget={"trials": 3}))
    driver, worker = Driver(store), FakeWorker(store)
    driver.step()
    worker.run_one()
    path = DataDir(tmp_path / "data").database_url.removeprefix("sqlite:///")
    with closing(sqlite3.connect(path)) as connection, connection:
        # The store takes no such measurement; an earlier version might have.
        connection.execute("PRAGMA ignore_check_constraints = ON")
        connection.execute("UPDATE measurements SET tokens_per_s_per_device = 0")
    drive_until(lambda: ended(store, campaign), driver.step, worker)
    assert store.campaigns.get(campaign.id).state == "COMPLETED"
    assert "trial 1 teaches the search nothing: objective=0.0" in caplog.text


def test_a_strategy_that_raises_fails_its_campaign_and_no_other(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tuner.strategies.deephyper import DeepHyperProposer

    def explode(*_: object) -> int:
        raise ZeroDivisionError("float division by zero")

    monkeypatch.setattr(DeepHyperProposer, "_ask_cbo", explode)
    raising = submit(store, make_spec("raising", strategy="deephyper", budget={"trials": 12}))
    sound = submit(store, make_spec("sound"))
    drive_until(
        lambda: ended(store, sound) and ended(store, raising),
        Driver(store).step,
        FakeWorker(store),
    )
    record = store.campaigns.get(raising.id)
    assert (record.state, record.reason) == ("FAILED", "error")
    assert record.message == (
        "strategy 'deephyper' failed to propose a layout: ZeroDivisionError: float division by zero"
    )
    assert store.campaigns.get(sound.id).state == "COMPLETED"


def test_a_deliberate_repeat_counts_and_does_not_confuse_the_search(store: Store) -> None:
    campaign = submit(store, make_spec())
    driver, worker = Driver(store), FakeWorker(store)
    driver.step()
    worker.run_one()
    (first, *_) = store.trials.find(campaign.id)
    store.trials.repeat(first.id)
    drive_until(lambda: ended(store, campaign), driver.step, worker)
    trials = store.trials.find(campaign.id)
    assert len(trials) == 6
    assert sum(trial.layout == first.layout for trial in trials) == 2


@pytest.mark.parametrize("reason", ["crashed", "out_of_memory"])
def test_a_repeat_that_fails_does_not_take_back_what_was_measured(
    store: Store, reason: str
) -> None:
    campaign = submit(store, make_spec(strategy="exhaustive", budget={"trials": 4}))
    driver, worker = Driver(store), FakeWorker(store)
    driver.step()
    worker.run_one()
    (first, *_) = store.trials.find(campaign.id)
    store.trials.repeat(first.id)
    worker.judge = lambda layout: failed(reason) if layout == first.layout else measured(layout)
    drive_until(lambda: ended(store, campaign), driver.step, worker)
    trials = store.trials.find(campaign.id)
    assert [trial.reason for trial in trials if trial.repeat_of] == [reason]
    strategy = CampaignSearch.rebuild(campaign, trials)._strategy
    assert strategy._history.observations[0].state == "completed"


def test_a_trial_that_somebody_else_added_is_not_added_again(store: Store) -> None:
    campaign = submit(store, make_spec(strategy="exhaustive"))
    driver, worker = Driver(store), FakeWorker(store)
    driver.step()
    store.trials.add(campaign.id, make_spec().legal_set().layout(2))
    drive_until(lambda: ended(store, campaign), driver.step, worker)
    trials = store.trials.find(campaign.id)
    assert len(trials) == len(set(layouts_of(trials))) == 6


def test_a_layout_whose_workers_were_lost_is_not_held_to_be_a_bad_one(store: Store) -> None:
    campaign = submit(store, make_spec(budget={"trials": 2}))
    worker = FakeWorker(store, lambda _layout: failed("node_lost"))
    drive_until(lambda: ended(store, campaign), Driver(store).step, worker)
    lost = store.trials.find(campaign.id)[0]
    assert (lost.state, lost.reason) == ("FAILED", "node_lost")
    assert observe(lost, "tokens_per_s") is None


def test_oversubscribed_measurements_teach_nothing(store: Store) -> None:
    campaign = submit(store, make_spec(strategy="deephyper", budget={"trials": 9}))
    worker = FakeWorker(store, lambda layout: completed(layout, oversubscribed=True))
    drive_until(lambda: ended(store, campaign), Driver(store).step, worker)
    assert store.campaigns.count_trials(campaign.id)["COMPLETED"] == 9


def test_a_database_that_is_away_is_waited_for(
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

    with caplog.at_level(logging.INFO, logger="tuner"):
        Driver(store).run(wait)
    assert len(attempts) == 3
    assert pauses[1:4] == sorted(pauses[1:4])
    assert pauses[3] > pauses[1]
    assert store.campaigns.count_trials(campaign.id)["COMPLETED"] == 2


def test_out_of_memory_everywhere_is_survived(store: Store) -> None:
    campaign = submit(store, make_spec(strategy="deephyper", budget={"trials": 100}))
    worker = FakeWorker(store, out_of_memory)
    drive_until(lambda: ended(store, campaign), Driver(store).step, worker)
    record = store.campaigns.get(campaign.id)
    assert (record.state, record.reason) == ("COMPLETED", "exhausted")
    assert "most common reason: out_of_memory" in record.message
