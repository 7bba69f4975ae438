"""Which searches are open: bounds of layouts, turns of owners, and lack of memory."""

from __future__ import annotations

from typing import Any

import pytest

from layout_tuner.results_db.actor import Actor
from layout_tuner.results_db.models.tables import Campaign
from layout_tuner.results_db.store import Store
from layout_tuner.tuner.driver import background_work, campaign_search, open_searches
from layout_tuner.tuner.driver.driver import Driver
from layout_tuner.tuner.driver.open_limits import OpenLimits
from layout_tuner.tuner.driver.open_searches import SMALL_SEARCH
from tests.kit.store import TurnableClock, make_worker
from tests.tuner.factories import (
    FakeWorker,
    drive_until,
    ended,
    layouts_of,
    make_spec,
)

LARGE = SMALL_SEARCH + 1
ONE_LARGE = OpenLimits(of_owner=2 * LARGE - 1, in_all=2 * LARGE - 1)
"""Bounds for one large search of all owners."""


def submit(store: Store, name: str, *, owner: str = "a", size: int = LARGE, **changes: Any) -> int:
    """A campaign of so many layouts by its record; the search itself has 28."""
    spec = make_spec(name, knowledge="none", **changes)
    own = store.by(Actor(name=owner, role="submitter"))
    return own.campaigns.create(spec.to_mapping(), num_legal_layouts=size).id


def opened(store: Store, driver: Driver, ids: list[int]) -> list[int]:
    """The campaigns whose searches are open after a round."""
    assert driver.step()
    return [id_ for id_ in ids if driver._searches.get(id_) is not None]


@pytest.fixture
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every open search had its turn when the next round begins."""
    monkeypatch.setattr(open_searches, "LEAST_TURN_S", 0.0)
    monkeypatch.setattr(open_searches, "TURN_IN_OPENINGS", 0.0)


@pytest.fixture
def said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_searches, "SAID_AFTER_S", 0.0)


def test_a_large_search_is_opened_once_a_worker_could_run_it(store: Store) -> None:
    small, large = submit(store, "small", size=SMALL_SEARCH), submit(store, "large")
    driver = Driver(store)
    make_worker(store, "elsewhere", cluster="frontier")
    assert opened(store, driver, [small, large]) == [small]
    assert len(store.trials.find(small)) == 1
    assert store.trials.find(large) == []
    assert "opened once a worker could run its trials" in store.campaigns.get(large).waiting_because
    make_worker(store)
    assert opened(store, driver, [small, large]) == [small, large]
    assert len(store.trials.find(large)) == 2
    assert store.campaigns.get(large).waiting_because == ""


def test_a_search_that_had_trials_is_opened_without_a_worker_to_end(store: Store) -> None:
    large = submit(store, "large", budget={"trials": 2})
    worker = FakeWorker(store)
    driver = Driver(store)
    assert driver.step()
    while worker.run_one():
        pass
    store.workers.drain(worker.id)
    assert Driver(store).step()
    assert store.campaigns.get(large).state == "COMPLETED"


@pytest.mark.usefixtures("said_at_once")
def test_searches_beyond_the_bound_wait_with_a_reason_and_without_wall_time(
    store: Store, clock: TurnableClock
) -> None:
    ids = [submit(store, f"c{number}") for number in range(3)]
    make_worker(store)
    driver = Driver(store, limits=ONE_LARGE)
    assert opened(store, driver, ids) == ids[:1]
    assert driver.step()
    waits = [store.campaigns.get(id_).waiting_because for id_ in ids]
    assert waits[0] == ""
    assert all("its search of 50,001 layouts waits for its turn" in why for why in waits[1:])
    clock.forward(5)
    make_worker(store)
    store.driver.move_clocks()
    clock.forward(5)
    store.driver.move_clocks()
    assert [store.campaigns.get(id_).wall_time_s for id_ in ids] == [10, 0, 0]


@pytest.mark.usefixtures("short_turns")
def test_all_searches_that_wait_get_turns_and_propose_what_they_would_alone(store: Store) -> None:
    specs = {f"c{seed}": {"seed": seed, "budget": {"trials": 4}} for seed in range(4)}
    ids = [submit(store, name, owner=name[:1], **spec) for name, spec in specs.items()]
    worker, driver = FakeWorker(store), Driver(store, limits=ONE_LARGE)

    def step() -> None:
        assert len(opened(store, driver, ids)) <= 1

    drive_until(lambda: all(ended(store, store.campaigns.get(id_)) for id_ in ids), step, worker)
    in_turns = [layouts_of(store.trials.find(id_)) for id_ in ids]
    alone = []
    for name, spec in specs.items():
        campaign = store.campaigns.get(submit(store, f"{name}-alone", **spec))
        drive_until(lambda campaign=campaign: ended(store, campaign), Driver(store).step, worker)
        alone.append(layouts_of(store.trials.find(campaign.id)))
    assert in_turns == alone


@pytest.mark.usefixtures("short_turns")
def test_owners_take_turns_however_many_searches_each_has(store: Store) -> None:
    many = [submit(store, f"many{number}", owner="many") for number in range(4)]
    other = [submit(store, f"other{number}", owner="other") for number in range(2)]
    make_worker(store)
    driver = Driver(store, limits=ONE_LARGE)
    order = [opened(store, driver, [*many, *other]) for _ in range(4)]
    owners = ["many" if ids[0] in many else "other" for ids in order]
    assert owners == ["many", "other", "many", "other"]
    assert order[0] != order[2]


def test_the_bound_of_an_owner_leaves_room_for_others(store: Store) -> None:
    first, second = submit(store, "first"), submit(store, "second")
    other = submit(store, "other", owner="b")
    small = submit(store, "small", size=SMALL_SEARCH)
    make_worker(store)
    limits = OpenLimits(of_owner=2 * LARGE - 1, in_all=10 * LARGE)
    driver = Driver(store, limits=limits)
    ids = [first, second, other, small]
    assert opened(store, driver, ids) == [first, other, small]


def test_a_search_that_alone_exceeds_the_bound_runs_without_other_large_ones(
    store: Store,
) -> None:
    small, huge = submit(store, "small", size=100), submit(store, "huge", size=3 * LARGE)
    large = submit(store, "large")
    make_worker(store)
    driver = Driver(store, limits=ONE_LARGE)
    assert opened(store, driver, [small, huge, large]) == [small, huge]


def test_a_search_keeps_its_place_for_its_turn(store: Store) -> None:
    ids = [submit(store, f"c{number}") for number in range(2)]
    make_worker(store)
    driver = Driver(store, limits=ONE_LARGE)
    assert [opened(store, driver, ids) for _ in range(3)] == [ids[:1]] * 3


def test_a_campaign_whose_time_is_up_ends_while_its_search_waits(store: Store) -> None:
    ids = [submit(store, f"c{number}") for number in range(2)]
    FakeWorker(store)
    driver = Driver(store, limits=ONE_LARGE)
    assert opened(store, driver, ids) == ids[:1]
    with store._db.write() as session:
        session.get_one(Campaign, ids[1]).wall_time_s = 9.0
    store.campaigns.update(ids[1], budget={"trials": None, "wall_time_s": 1.0})
    assert opened(store, driver, ids) == ids[:1]
    assert "9 of 1 s of wall time spent" in store.campaigns.get(ids[1]).message


@pytest.mark.parametrize("where", ["opening", "proposal"])
def test_a_campaign_waits_and_goes_on_after_lack_of_memory(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    real, lacking = campaign_search.make_strategy, [True]

    def make(name: str, problem: Any, *, seed: int) -> Any:
        search = real(name, problem, seed=seed)
        if lacking[0] and seed == 7:
            if where == "opening":
                raise MemoryError
            monkeypatch.setattr(search, "ask", lack_memory)
        return search

    def lack_memory(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(campaign_search, "make_strategy", make)
    victim, other = submit(store, "victim", seed=7), submit(store, "other", owner="b")
    worker, driver = FakeWorker(store), Driver(store)
    drive_until(lambda: ended(store, store.campaigns.get(other)), driver.step, worker)
    waits = store.campaigns.get(victim)
    assert (waits.state, store.trials.find(victim)) == ("RUNNING", [])
    assert "too little memory" in waits.waiting_because
    assert caplog.text.count("too little memory for its search; trying again in 5 s") == 1
    lacking[0] = False
    monkeypatch.setattr(background_work.MemoryPause, "is_over", True)
    drive_until(lambda: ended(store, store.campaigns.get(victim)), driver.step, worker)
    assert store.campaigns.get(victim).state == "COMPLETED"


def test_each_pause_for_memory_is_longer_up_to_a_limit() -> None:
    pause = background_work.MemoryPause()
    assert pause.is_over
    said = [pause.begin("it").split("again in ")[1] for _ in range(8)]
    assert said == ["5 s", "10 s", "20 s", "40 s", "80 s", "160 s", "300 s", "300 s"]
    assert not pause.is_over
    pause.end()
    assert pause.begin("it").endswith("again in 5 s")
