"""Several drivers as processes: one is active; another takes over when it is killed or stopped."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import psutil
import pytest

from results_db.errors import DatabaseUnavailableError
from results_db.store import Store
from tests.kit.store import TimelyStore
from tests.tuner.factories import FakeWorker, ended, layouts_of, make_spec, submit, wait_for
from tuner.driver.process import HeldLease, Standby

DEADLINE_S = 60.0


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    with closing(TimelyStore(database_url)) as store:
        yield store


class DriverProcess:
    """`layout-tuner driver` on a database, with what it says in a file."""

    def __init__(self, database_url: str, log: Path) -> None:
        self.log = log
        where = (
            ["--data-dir", str(Path(database_url.removeprefix("sqlite:///")).parent)]
            if database_url.startswith("sqlite")
            else ["--data-dir", str(log.parent / "data"), "--database", database_url]
        )
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tuner", *where], stderr=output, stdout=output
            )

    def said(self, words: str) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        return words in self.log.read_text()

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


@contextmanager
def drivers(database_url: str, folder: Path, count: int) -> Iterator[list[DriverProcess]]:
    """So many drivers; the first is the active one."""
    with ExitStack() as stack:
        started: list[DriverProcess] = []
        for number in range(count):
            driver = DriverProcess(database_url, folder / f"driver-{number}.log")
            stack.callback(driver.process.wait, DEADLINE_S)
            stack.callback(driver.process.kill)
            words = "the active driver" if number == 0 else "standing by"
            wait_for(lambda driver=driver, words=words: driver.said(words))
            started.append(driver)
        yield started


def stop_outside_of_transactions(driver: DriverProcess, database_url: str) -> None:
    """Stops a driver while it holds no lock: SQLite's would be held until it goes on."""

    def stopped() -> bool:
        driver.send(signal.SIGSTOP)
        wait_for(lambda: psutil.Process(driver.process.pid).status() == psutil.STATUS_STOPPED)
        if is_lock_free(database_url):
            return True
        driver.send(signal.SIGCONT)
        return False

    wait_for(stopped)


def is_lock_free(database_url: str) -> bool:
    path = database_url.removeprefix("sqlite:///")
    if path == database_url:
        return True  # PostgreSQL ends a transaction that is idle for too long.
    with closing(sqlite3.connect(path, timeout=2.0)) as connection:
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return False
        connection.rollback()
    return True


@pytest.mark.slow
@pytest.mark.sqlite_is_enough
def test_a_standby_driver_takes_over_from_one_that_stands_still_and_from_one_that_is_killed(
    database_url: str, store: Store, tmp_path: Path
) -> None:
    campaign = submit(store, make_spec(strategy="random", budget={"trials": 18}))
    work = FakeWorker(store).run_one

    def wait_for_completed(number: int) -> None:
        wait_for(lambda: store.campaigns.count_trials(campaign.id)["COMPLETED"] >= number, work)

    with drivers(database_url, tmp_path, 2) as (first, second):
        wait_for_completed(4)
        stop_outside_of_transactions(first, database_url)
        wait_for(lambda: second.said("the active driver"), work)
        first.send(signal.SIGCONT)
        wait_for(lambda: first.said("another driver has taken over"))
        wait_for(lambda: first.said("standing by"))
        assert store.driver.lease().pid == second.process.pid
        wait_for_completed(8)
        # And back again: the first is as good as new.
        second.send(signal.SIGKILL)
        wait_for(lambda: ended(store, campaign), work)
        assert first.log.read_text().count("the active driver") == 2
        assert store.driver.lease().pid == first.process.pid
    trials = store.trials.find(campaign.id)
    assert [trial.state for trial in trials] == ["COMPLETED"] * 18
    assert len(set(layouts_of(trials))) == 18


@pytest.mark.sampled(2)
def test_a_driver_that_is_told_to_end_is_succeeded_at_once(
    database_url: str, store: Store, tmp_path: Path
) -> None:
    with drivers(database_url, tmp_path, 2) as (first, second):
        first.send(signal.SIGTERM)
        assert first.process.wait(DEADLINE_S) == 0
        assert "driver stopped" in first.log.read_text()
        assert store.driver.lease().released_at or store.driver.lease().fence == 2
        wait_for(lambda: second.said("the active driver"))
        second.send(signal.SIGINT)
        assert second.process.wait(DEADLINE_S) == 0
    assert store.driver.lease().released_at is not None


def test_a_lease_that_stands_still_is_taken_over_whatever_the_clock_says(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert store.driver.acquire() is not None
    count = [100.0]
    monkeypatch.setattr("tuner.driver.process.time.monotonic", lambda: count[0])
    standby = Standby(store)
    monkeypatch.setattr("tuner.driver.process.DRIVER_LEASE_S", 0.0)
    monkeypatch.setattr(
        "results_db.campaigns.driver_lease.DRIVER_LEASE_S", 3600.0
    )  # the clock was set back
    assert standby.take_over() is None
    count[0] += 1
    lease = standby.take_over()
    assert (lease.fence, lease.pid) == (2, os.getpid())


def test_a_driver_keeps_its_lease_while_the_database_is_away(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tuner.driver.process.RENEWAL_INTERVAL_S", 0.01)
    lease = store.driver.acquire()
    real = store.driver.renew
    away = iter([True] * 3)

    def renew(fence: int) -> None:
        if next(away, False):
            raise DatabaseUnavailableError("it is away")
        real(fence)

    monkeypatch.setattr(store.driver, "renew", renew)
    with caplog.at_level("INFO", logger="tuner"), HeldLease(store, lease) as held:
        wait_for(lambda: store.driver.lease().seen_at != lease.seen_at)
        assert held.is_held()
    assert "driver lease 1 is not renewed: it is away" in caplog.text
    assert store.driver.lease().released_at is not None


def test_a_driver_whose_round_never_ends_is_succeeded(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuner.driver.process.RENEWAL_INTERVAL_S", 0.01)
    monkeypatch.setattr("tuner.driver.process.STUCK_AFTER_S", 0.0)
    lease = store.driver.acquire()
    with HeldLease(store, lease) as held:
        wait_for(lambda: not held.is_held())
    # Not given back: the round may still be writing, until another takes over.
    assert store.driver.lease().released_at is None
