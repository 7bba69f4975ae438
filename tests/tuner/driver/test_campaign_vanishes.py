"""A campaign that is cancelled and deleted in the middle of the driver's round just ends."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import cast

import pytest

from results_db.database.data_dir import DataDir
from results_db.errors import CampaignNotFoundError
from results_db.store import Store
from tests.kit.postgres import upgraded
from tests.results_db.intercepted_store import InterceptedStore
from tests.tuner.factories import FakeWorker, drive_until, make_spec, submit
from tuner.driver.campaign_opening import BackgroundOpening
from tuner.driver.driver import Driver

MOST_CALLS = 60
PATIENCE_S = 60.0


class VanishingStore(InterceptedStore):
    """A store of which a campaign is deleted just before a certain call."""

    def __init__(self, store: Store, campaign_id: int, before_call: int) -> None:
        super().__init__(store, self._delete_in_time)
        self._campaign_id, self._before_call = campaign_id, before_call
        self.num_calls = 0
        self._lock = threading.Lock()

    def _delete_in_time(self, _call: str) -> None:
        with self._lock:  # searches that are opened beside the rounds call it from threads
            self.num_calls += 1
            if self.num_calls == self._before_call:
                if self._store.campaigns.get(self._campaign_id).state == "RUNNING":
                    self._store.campaigns.cancel(self._campaign_id)
                self._store.campaigns.delete(self._campaign_id)


def new(_store: Store, _victim: int) -> None:
    """Nothing was done for it yet."""


def half_done(store: Store, victim: int, num_done: int = 5) -> None:
    driver = Driver(store)
    drive_until(
        lambda: store.campaigns.count_trials(victim)["COMPLETED"] >= num_done,
        driver.step,
        FakeWorker(store),
    )
    driver.close()


def nearly_done(store: Store, victim: int) -> None:
    """All is measured; what may be best is measured again next, and then the campaign ends."""
    half_done(store, victim, num_done=8)


def over_time(store: Store, victim: int) -> None:
    half_done(store, victim)
    store.campaigns.update(victim, budget={"trials": None, "wall_time_s": 1e-9})


def broken(store: Store, victim: int) -> None:
    from sqlalchemy import text

    statement = "UPDATE campaigns SET spec = json_remove(spec, '$.model') WHERE id = :id"
    with store._db.write() as session:
        session.execute(text(statement), {"id": victim})


@pytest.fixture
def each_call(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], Iterator[tuple[Store, int, int]]]:
    """Stores in which two campaigns are as a preparation left them, with the number of a call."""
    monkeypatch.setattr("tuner.driver.driver.ANALYSIS_INTERVAL_S", -1.0)
    monkeypatch.setattr("tuner.driver.driver.ENDINGS_AN_ANALYSIS", 1)
    template = upgraded(tmp_path / "template")
    with closing(Store.open(template)) as store:
        victim = submit(
            store,
            make_spec(
                "victim", budget={"trials": 8}, stop={"remeasure": 2, "converged_within": 0.01}
            ),
        )
        submit(store, make_spec("bystander"))
        request.param(store, victim.id)

    def stores() -> Iterator[tuple[Store, int, int]]:
        for before_call in range(1, MOST_CALLS):
            copy = DataDir(tmp_path / f"copy-{before_call}")
            copy.create()
            shutil.copy(template.path / "results.sqlite3", copy.path)
            with closing(Store(copy.database_url)) as store:
                yield store, victim.id, before_call

    return stores


def step_until_opened(driver: Driver) -> list[bool]:
    """Two rounds: the searches that the first one opens on threads are there in the second one."""
    rounds = [driver.step()]
    for thread in threading.enumerate():
        if thread.name == "opening":
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
    return [*rounds, driver.step()]


@pytest.mark.parametrize(
    ("each_call", "opening"),
    [
        (new, None),
        pytest.param(half_done, BackgroundOpening, marks=pytest.mark.slow),
        pytest.param(nearly_done, None, marks=pytest.mark.slow),
        pytest.param(over_time, None, marks=pytest.mark.slow),
        pytest.param(broken, None, marks=pytest.mark.slow),
    ],
    indirect=["each_call"],
    ids=lambda value: getattr(value, "__name__", "at_once"),
)
def test_a_campaign_that_is_deleted_before_any_step_of_a_round_has_ended(
    each_call: Callable[[], Iterator[tuple[Store, int, int]]],
    opening: type[BackgroundOpening] | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    was_last = False
    for store, campaign_id, before_call in each_call():
        vanishing = VanishingStore(store, campaign_id, before_call)
        driver = Driver(cast("Store", vanishing), opening=opening and opening())
        caplog.clear()
        rounds = step_until_opened(driver) if opening else [driver.step()]
        was_last = vanishing.num_calls < before_call
        if was_last:
            break
        rounds.append(driver.step())
        said = {record.getMessage() for record in caplog.records if record.levelno > logging.INFO}
        said -= {"campaign 'victim' is broken"}  # it was, before it was deleted
        assert (set(rounds), said) == ({True}, set()), f"before call {before_call}"
        with pytest.raises(CampaignNotFoundError):
            store.campaigns.get(campaign_id)
        assert store.trials.find(store.campaigns.by_name("bystander").id), "the other one goes on"
    assert was_last
