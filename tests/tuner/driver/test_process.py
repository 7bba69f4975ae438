"""The driver as a process: plans beside campaigns, and several drivers, of which one is active."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

from layout_tuner.cli.processes.driver import driver as driver_command
from layout_tuner.predictions.belief.plan import make_plan
from layout_tuner.results_db.actor import Actor
from layout_tuner.results_db.campaigns.plans import PlanOptions
from layout_tuner.results_db.errors import DatabaseUnavailableError
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec
from layout_tuner.timing_mark import LONGEST_WAIT_S, TIMING_VARIABLE, timing
from layout_tuner.tuner.driver import background_work
from layout_tuner.tuner.driver.driver import Driver
from layout_tuner.tuner.driver.process import HeldLease, Standby, StopRequest
from tests.kit.postgres import upgraded
from tests.kit.python_process import printed_by
from tests.kit.store import TimelyStore
from tests.kit.waiting import wait_until
from tests.tuner.factories import (
    FakeWorker,
    drive_until,
    ended,
    layouts_of,
    make_spec,
    submit,
    wait_for,
)

THREADS = """
import click
from layout_tuner.cli.processes.driver import driver
try:
    driver.main(["--data-dir", "/dev/null/nowhere"], standalone_mode=False)
except click.ClickException:
    import numpy, scipy.linalg, threadpoolctl
    print(sorted({each["num_threads"] for each in threadpoolctl.threadpool_info()}))
"""
IMPORTS = """
import sys
from layout_tuner.cli.processes.driver import driver
driver(["--help"], standalone_mode=False)
assert not {"sqlalchemy", "deephyper", "numpy"} & set(sys.modules)
import layout_tuner.tuner.driver.driver, layout_tuner.tuner.strategies.registry
assert not {"deephyper", "pandas", "optuna"} & set(sys.modules)
"""


def test_the_linear_algebra_of_a_driver_has_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others would spin on cores that probes may have."""
    monkeypatch.delenv("OPENBLAS_NUM_THREADS")
    assert printed_by(THREADS).strip() == "[1]"


def test_help_imports_no_database_and_a_driver_imports_strategies_only_when_they_are_used() -> None:
    assert "Drive the campaigns" in printed_by(IMPORTS)


def test_a_signal_ends_a_pause_of_any_length() -> None:
    request, main = StopRequest(), threading.get_ident()
    before = signal.signal(signal.SIGUSR1, request.note)
    try:
        threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGUSR1)).start()
        assert request.wait(3600.0)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_database_of_a_newer_version_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    data_dir = upgraded(tmp_path / "data")
    path = data_dir.database_url.removeprefix("sqlite:///")
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = 'f00d'")
    result = CliRunner().invoke(driver_command, ["--data-dir", str(data_dir.path)])
    assert result.exit_code == 1
    assert "revision f00d" in result.output
    assert "newer version of layout-tuner" in result.output
    assert result.output.count("\n") == 1
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT version_num FROM alembic_version").fetchone() == ("f00d",)


def requested(store: Store, spec: CampaignSpec) -> int:
    return store.plans.request(spec.to_mapping(), PlanOptions(top=3)).id


def made(store: Store, plan_id: int, driver: Driver) -> None:
    wait_until(
        "the driver has made it",
        lambda: driver.step() and store.plans.get(plan_id).state != "WAITING",
    )


def test_plans_and_campaigns_go_on_side_by_side(store: Store) -> None:
    driver, worker = Driver(store), FakeWorker(store)
    campaign = submit(store, make_spec("runs", budget={"trials": 2}))
    plans = [requested(store, make_spec(f"planned-{number}")) for number in range(2)]
    drive_until(lambda: ended(store, campaign), driver.step, worker)
    made(store, plans[-1], driver)
    assert [store.plans.get(plan).state for plan in plans] == ["DONE"] * 2


def test_owners_take_turns_with_plans_and_lack_of_memory_is_waited_for(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    owners = {
        requested(store.by(Actor(name=owner, role="submitter")), make_spec("planned")): owner
        for owner in ("many", "many", "many", "other", "other")
    }
    lacking = [MemoryError(), MemoryError()]
    real = store.plans.make

    def make(*asked: Any, **named: Any) -> Any:
        if lacking:
            raise lacking.pop()
        return real(*asked, **named)

    monkeypatch.setattr(store.plans, "make", make)
    monkeypatch.setattr(background_work, "FIRST_PAUSE_S", 0.01)
    driver, done = Driver(store), list[int]()

    def all_are_made() -> bool:
        assert driver.step()
        ended = [each for each in owners if store.plans.get(each).state != "WAITING"]
        done.extend(each for each in ended if each not in done)
        return len(done) == len(owners)

    wait_until("all plans are made", all_are_made)
    assert {store.plans.get(each).state for each in done} == {"DONE"}
    # Two tries in vain were turns too.
    assert [owners[each] for each in done] == ["many", "other", "many", "other", "many"]


def test_a_plan_is_made_though_no_campaign_runs_also_by_a_driver_that_takes_over(
    store: Store,
) -> None:
    spec = make_spec("planned")
    first, second = Driver(store), Driver(store)
    assert second.step(), "it looks, and finds nothing to do"
    plan = requested(store, spec)
    first.step()  # it begins, and never looks again
    assert store.plans.get(plan).state == "WAITING"
    made(store, plan, second)
    done = store.plans.get(plan)
    assert done.state == "DONE"
    assert [each["layout_key"] for each in done.answer["layouts"]] == [
        each.layout_key for each in make_plan(spec, top=3).layouts
    ]


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ({"space": {"global_batch_size": 7, "dp": 2, "precision": "fp32"}}, "none of the 1 comb"),
        ({"cluster": None}, "cluster: the field is missing"),
        ({"budget": 5}, "budget"),
    ],
)
def test_a_plan_that_cannot_be_made_says_why_and_stops_nothing(
    store: Store, broken: dict[str, object], said: str
) -> None:
    driver = Driver(store)
    spec = make_spec("planned")
    wrong = store.plans.request({**spec.to_mapping(), **broken}, PlanOptions()).id
    right = requested(store, spec)
    made(store, right, driver)
    failed = store.plans.get(wrong)
    assert failed.state == "FAILED"
    assert said in failed.problem
    assert store.plans.get(right).state == "DONE"


DEADLINE_S = 60.0


@pytest.fixture
def shared(database_url: str) -> Iterator[Store]:
    with closing(TimelyStore(database_url)) as shared:
        yield shared


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
                [sys.executable, "-m", "layout_tuner", "driver", *where],
                stderr=output,
                stdout=output,
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
    database_url: str, shared: Store, tmp_path: Path
) -> None:
    campaign = submit(shared, make_spec(strategy="random", budget={"trials": 18}))
    work = FakeWorker(shared).run_one

    def wait_for_completed(number: int) -> None:
        wait_for(lambda: shared.campaigns.count_trials(campaign.id)["COMPLETED"] >= number, work)

    with drivers(database_url, tmp_path, 2) as (first, second):
        wait_for_completed(4)
        stop_outside_of_transactions(first, database_url)
        wait_for(lambda: second.said("the active driver"), work)
        first.send(signal.SIGCONT)
        wait_for(lambda: first.said("another driver has taken over"))
        wait_for(lambda: first.said("standing by"))
        assert shared.driver.lease().pid == second.process.pid
        wait_for_completed(8)
        # And back again: the first is as good as new.
        second.send(signal.SIGKILL)
        wait_for(lambda: ended(shared, campaign), work)
        assert first.log.read_text().count("the active driver") == 2
        assert shared.driver.lease().pid == first.process.pid
    trials = shared.trials.find(campaign.id)
    assert [trial.state for trial in trials] == ["COMPLETED"] * 18
    assert len(set(layouts_of(trials))) == 18


def test_a_driver_waits_while_ranks_time_beside_it_until_two_trials_have_ended(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps its lease. After the second end a device may be free, and it proposes a trial."""
    monkeypatch.setenv(TIMING_VARIABLE, str(tmp_path / "timing"))
    with closing(Store(sqlite_url)) as shared, drivers(sqlite_url, tmp_path, 1):
        worker = FakeWorker(shared)
        campaign = submit(shared, make_spec())

        def number() -> int:
            return len(shared.trials.find(campaign.id))

        wait_for(lambda: number() == 2)
        with timing():
            began = time.monotonic()
            assert worker.run_one(), "the other trial waits"
            leases = {shared.driver.lease()}
            wait_for(lambda: leases.add(shared.driver.lease()) or len(leases) > 2)
            assert number() == 2 or time.monotonic() - began > LONGEST_WAIT_S
            assert len({lease.fence for lease in leases}) == 1
            wait_for(lambda: not worker.run_one())
            wait_for(lambda: number() > 2)


def test_a_driver_that_is_told_to_end_is_succeeded_at_once(
    database_url: str, shared: Store, tmp_path: Path
) -> None:
    with drivers(database_url, tmp_path, 2) as (first, second):
        first.send(signal.SIGTERM)
        assert first.process.wait(DEADLINE_S) == 0
        assert "driver stopped" in first.log.read_text()
        assert shared.driver.lease().released_at or shared.driver.lease().fence == 2
        wait_for(lambda: second.said("the active driver"))
        second.send(signal.SIGINT)
        assert second.process.wait(DEADLINE_S) == 0
    assert shared.driver.lease().released_at is not None


def test_a_lease_that_stands_still_is_taken_over_whatever_the_clock_says(
    shared: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shared.driver.acquire() is not None
    count = [100.0]
    monkeypatch.setattr("layout_tuner.tuner.driver.process.time.monotonic", lambda: count[0])
    standby = Standby(shared)
    monkeypatch.setattr("layout_tuner.tuner.driver.process.DRIVER_LEASE_S", 0.0)
    monkeypatch.setattr(
        "layout_tuner.results_db.campaigns.driver_lease.DRIVER_LEASE_S", 3600.0
    )  # the clock was set back
    assert standby.take_over() is None
    count[0] += 1
    lease = standby.take_over()
    assert (lease.fence, lease.pid) == (2, os.getpid())


def test_a_driver_keeps_its_lease_while_the_database_is_away(
    shared: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("layout_tuner.tuner.driver.process.RENEWAL_INTERVAL_S", 0.01)
    lease = shared.driver.acquire()
    real = shared.driver.renew
    away = iter([True] * 3)

    def renew(fence: int) -> None:
        if next(away, False):
            raise DatabaseUnavailableError("it is away")
        real(fence)

    monkeypatch.setattr(shared.driver, "renew", renew)
    with caplog.at_level("INFO", logger="layout_tuner.tuner"), HeldLease(shared, lease) as held:
        wait_for(lambda: shared.driver.lease().seen_at != lease.seen_at)
        assert held.is_held()
    assert "driver lease 1 is not renewed: it is away" in caplog.text
    assert shared.driver.lease().released_at is not None


def test_a_driver_whose_round_never_ends_is_succeeded(
    shared: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("layout_tuner.tuner.driver.process.RENEWAL_INTERVAL_S", 0.01)
    monkeypatch.setattr("layout_tuner.tuner.driver.process.STUCK_AFTER_S", 0.0)
    lease = shared.driver.acquire()
    with HeldLease(shared, lease) as held:
        wait_for(lambda: not held.is_held())
    # Not given back: the round may still be writing, until another takes over.
    assert shared.driver.lease().released_at is None
