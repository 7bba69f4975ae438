"""A search that takes long to open delays no other campaign: their rounds go on meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from results_db.records import CampaignRecord
from results_db.store import Store
from tests.tuner.factories import FakeWorker, ended, layouts_of, make_spec, submit, wait_for
from tuner.driver import driver as driver_module
from tuner.driver.campaign_opening import MAX_OPENINGS, BackgroundOpening
from tuner.driver.campaign_search import CampaignSearch
from tuner.driver.driver import Driver

PATIENCE_S = 60.0


class Gate(threading.Event):
    """Set by the test; until then the search of the campaign "huge" is not opened."""

    num_openings = 0
    """How often its opening has begun."""


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate()

    class GatedSearch(CampaignSearch):
        @classmethod
        def rebuild(cls, campaign: CampaignRecord, *told: Any) -> CampaignSearch:
            if campaign.name == "huge":
                gate.num_openings += 1
                assert gate.wait(PATIENCE_S)
            return CampaignSearch.rebuild(campaign, *told)

    monkeypatch.setattr(driver_module, "CampaignSearch", GatedSearch)
    yield gate
    gate.set()


def submit_both(store: Store) -> tuple[CampaignRecord, CampaignRecord]:
    """The campaign whose search is not opened yet, and a small one."""
    huge, small = (submit(store, make_spec(n, budget={"trials": 2})) for n in ("huge", "small"))
    return huge, small


def test_a_small_campaign_runs_to_its_end_while_a_huge_one_is_opened(
    store: Store, gate: Gate
) -> None:
    huge, small = submit_both(store)
    driver = Driver(store, opening=BackgroundOpening())
    drive_until_ended(store, small, driver)
    assert store.trials.find(huge.id) == []
    assert store.campaigns.get(huge.id).state == "RUNNING"
    gate.set()
    drive_until_ended(store, huge, driver)


def test_a_search_that_is_opened_beside_proposes_what_it_would_have_proposed_at_once(
    store: Store,
) -> None:
    proposed = []
    for name, opening in (("beside", BackgroundOpening()), ("at-once", None)):
        campaign = submit(store, make_spec(name, seed=7, knowledge="none", budget={"trials": 4}))
        drive_until_ended(store, campaign, Driver(store, opening=opening))
        proposed.append(layouts_of(store.trials.find(campaign.id)))
    assert proposed[0] == proposed[1]


@pytest.mark.parametrize("how", ["paused", "cancelled", "deleted"])
def test_a_campaign_that_no_longer_runs_when_its_search_is_there_gets_no_trials(
    store: Store, gate: Gate, how: str
) -> None:
    huge, small = submit_both(store)
    driver = Driver(store, opening=BackgroundOpening())
    assert driver.step()
    if how == "paused":
        store.campaigns.pause(huge.id)
    else:
        store.campaigns.cancel(huge.id)
    if how == "deleted":
        store.campaigns.delete(huge.id)
    gate.set()
    drive_until_ended(store, small, driver)
    assert store.trials.find(huge.id) == []
    if how == "paused":
        store.campaigns.resume(huge.id)
        drive_until_ended(store, huge, driver)
        assert gate.num_openings == 2  # the first one knew nothing that came meanwhile


def test_a_search_that_cannot_be_opened_breaks_its_campaign_alone(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ArithmeticError("no such strategy")

    monkeypatch.setattr("tuner.driver.campaign_search.make_strategy", refuse)
    broken = submit(store, make_spec("broken"))
    driver = Driver(store, opening=BackgroundOpening())
    wait_for(lambda: ended(store, broken), driver.step)
    record = store.campaigns.get(broken.id)
    assert (record.state, record.reason) == ("FAILED", "error")
    assert "ArithmeticError: no such strategy" in str(record.message)


def test_an_opening_that_fails_has_not_worked_until_it_does(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failing = threading.Event()
    failing.set()
    known_trials = store.plans.known_trials

    def fail_or_answer(campaign: CampaignRecord) -> Any:
        if failing.is_set():
            raise KeyError("what no round expects")
        return known_trials(campaign)

    monkeypatch.setattr(store.plans, "known_trials", fail_or_answer)
    campaign = submit(store, make_spec("unlucky"))
    driver = Driver(store, opening=BackgroundOpening())
    wait_for(lambda: "this round failed" in caplog.text, driver.step)
    assert [driver.step() for _ in range(20)] == [False] * 20
    assert not [line for line in caplog.messages if "works again" in line]
    failing.clear()
    wait_for(lambda: bool(store.trials.find(campaign.id)), driver.step)


def test_forgotten_openings_keep_their_places_until_their_threads_end() -> None:
    gate, begun = threading.Event(), []

    def open_search() -> CampaignSearch:
        begun.append(threading.current_thread())
        assert gate.wait(PATIENCE_S)
        raise KeyError

    opening = BackgroundOpening()
    for campaign_id in range(3 * MAX_OPENINGS):
        assert opening.take(campaign_id, open_search) is None
        opening.keep_only(set())
    gate.set()
    for thread in begun:
        thread.join(PATIENCE_S)
    assert len(begun) == MAX_OPENINGS
    assert opening.take(99, open_search) is None
    wait_for(lambda: len(begun) > MAX_OPENINGS)


def test_an_opening_that_never_ends_fails_its_campaign_and_leaves_its_place(
    store: Store, gate: Gate
) -> None:
    huge = submit(store, make_spec("huge"))
    driver = Driver(store, opening=BackgroundOpening(stuck_after_s=0.05))
    wait_for(lambda: ended(store, huge), driver.step)
    record = store.campaigns.get(huge.id)
    assert (record.state, record.reason) == ("FAILED", "error")
    assert "its search was not opened within 0.05 s" in str(record.message)


def drive_until_ended(store: Store, campaign: CampaignRecord, driver: Driver) -> None:
    worker = FakeWorker(store)

    def turn() -> None:
        assert driver.step()
        worker.run_one()

    wait_for(lambda: ended(store, campaign), turn)
