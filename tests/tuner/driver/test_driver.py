"""The driver against the real store, with a worker that answers at once."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
from sqlalchemy import text

from results_db.store import Store
from search_spaces.campaigns.campaign import CampaignSpec
from search_spaces.errors import SearchSpaceError, SpaceInvalidError
from search_spaces.protocol.outcome import Outcome
from search_spaces.spec.layout import Layout
from tests.kit.store import TurnableClock, completed, failed, make_worker, post_outcome, take_leases
from tests.tuner.factories import (
    DrivenCampaign,
    FakeWorker,
    ended,
    layouts_of,
    make_spec,
    measured,
    out_of_memory,
    run_campaign,
    submit,
)
from tuner.driver.campaign_search import CampaignSearch, observe
from tuner.driver.driver import Driver
from tuner.strategies.deephyper import DeepHyperProposer


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


def test_a_paused_campaign_gets_nothing_new_until_it_is_resumed(store: Store) -> None:
    campaign = DrivenCampaign(store, make_spec(budget={"trials": 3}))
    campaign.turn()
    store.campaigns.pause(campaign.id)
    before = len(campaign.trials)
    campaign.turn(3)
    assert len(campaign.trials) == before
    store.campaigns.resume(campaign.id)
    campaign.to_end()
    assert campaign.count() == 3


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


def test_an_interrupted_search_goes_the_way_of_an_uninterrupted_one(store: Store) -> None:
    first, second = (
        DrivenCampaign(
            store, make_spec(name, strategy="deephyper", budget={"trials": 12}), mortality=mortality
        )
        for name, mortality in (("first", 0.0), ("second", 1.0))
    )
    first.workers = second.workers
    store.campaigns.pause(second.id)
    first.to_end()
    store.campaigns.resume(second.id)
    second.to_end()
    assert layouts_of(first.trials) == layouts_of(second.trials)


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
    with caplog.at_level(logging.INFO, logger="tuner"):
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
        out_of_memory(layout) if layout == first.layout else measured(layout)
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
        (lambda layout: completed(layout, oversubscribed=True), None),
    ],
    ids=["lost nodes", "shared devices"],
)
def test_trials_that_lost_their_node_or_shared_devices_teach_the_search_nothing(
    store: Store, judge: Callable[[Layout], Outcome], reason: str | None
) -> None:
    campaign = run_campaign(store, make_spec(budget={"trials": 2}), judge)
    trials = store.trials.find(campaign.id)
    assert [trial.reason for trial in trials] == [reason] * 2
    assert [observe(trial, "tokens_per_s") for trial in trials] == [None] * 2


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

    with caplog.at_level(logging.INFO, logger="tuner"):
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
