"""Many threads and processes use one database at once: no deadlock, and a legal history."""

from __future__ import annotations

import logging
import os
import random
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import pytest

from layout_tuner.protocol.worker_messages import BeatBody, NodeStatusBody, StatusBody
from layout_tuner.results_db.allocations import leases
from layout_tuner.results_db.errors import DatabaseUnavailableError, ResultsDbError
from layout_tuner.results_db.records import LeaseRecord
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.layouts.layout import Layout
from tests.kit.postgres import upgraded
from tests.kit.python_process import start_python
from tests.kit.store import (
    at_once,
    completed,
    failed,
    make_campaign,
    make_worker,
    post_outcome,
    send_beats,
    take_leases,
)
from tests.results_db.legal_history import violations, wrong_leaderboards

_LOG = logging.getLogger(__name__)

NUM_THREADS = 8
NUM_ACTIONS = 80
NUM_CAMPAIGNS = 3
MAX_TRIAL = 60
REASONS = ("crashed", "out_of_memory", "node_lost", "cancelled")


class Storm:
    """What the threads share: the database, and what they were told."""

    def __init__(self, stores: Sequence[Store], seed: int) -> None:
        self.stores = stores
        self.seed = seed
        self.campaigns = [make_campaign(stores[0], f"c{n}") for n in range(NUM_CAMPAIGNS)]
        self.leases: list[LeaseRecord] = []
        self.accepted: list[tuple[int, float]] = []


class Thread:
    """One that drives, works, uses and sweeps as its dice say."""

    def __init__(self, storm: Storm, number: int) -> None:
        self.storm = storm
        self.store = storm.stores[number % len(storm.stores)]
        self.name = f"w{number % 5}"
        self.dice = random.Random(storm.seed + number)
        self.session = make_worker(self.store, self.name).id

    def rage(self) -> None:
        store, dice = self.store, self.dice
        actions: list[tuple[int, Callable[[], object]]] = [
            (8, lambda: store.trials.add(self.campaign(), Layout(micro_batch_size=self.size()))),
            (3, lambda: store.trials.repeat(self.trial())),
            (10, self.lease),
            (8, self.beat),
            (14, self.complete),
            (8, self.fail),
            (3, self.register),
            (1, lambda: store.workers.drain(self.session)),
            (3, store.leases.expire),
            (1, store.leases.extend),
            (2, lambda: store.campaigns.pause(self.campaign())),
            (2, lambda: store.campaigns.resume(self.campaign())),
            (1, lambda: store.campaigns.cancel_pending(self.campaign(), "time is up")),
            (3, self.tell_status),
            (2, store.allocations.share_idle_time),
            (2, store.driver.move_clocks),
            (2, lambda: store.trials.cancel(self.trial())),
            (1, lambda: store.trials.requeue(self.trial())),
            (1, lambda: store.trials.measure_again(self.trial())),
            (1, self.replace_campaign),
            (3, self.read),
        ]
        weights, chosen = zip(*actions, strict=True)
        for action in dice.choices(chosen, weights, k=NUM_ACTIONS):
            try:
                action()
            except DatabaseUnavailableError:
                raise
            except ResultsDbError:
                continue

    def campaign(self) -> int:
        return self.dice.choice(self.storm.campaigns)

    def trial(self) -> int:
        return self.dice.randint(1, MAX_TRIAL)

    def size(self) -> int:
        return self.dice.randint(1, 24)

    def lease(self) -> None:
        self.storm.leases += take_leases(self.store, self.session, self.dice.randint(1, 4))

    def leases(self, number: int) -> list[LeaseRecord]:
        """Some that were taken by anybody."""
        return self.dice.choices(self.storm.leases, k=number) if self.storm.leases else []

    def beat(self) -> None:
        beats = {
            held.trial_id: BeatBody(
                trial_id=held.trial_id, attempt=held.attempt, iterations_done=1, held_s=1.0
            )
            for held in self.leases(4)
        }
        send_beats(self.store, self.session, list(beats.values()))

    def complete(self) -> None:
        for held in self.leases(1):
            # Kept twice by nobody: of a repeated report the first counts.
            rate = self.dice.uniform(500, 1500)
            outcome = completed(held.layout, tokens_per_s=rate)
            if post_outcome(self.store, held.trial_id, held.attempt, outcome).accepted:
                self.storm.accepted.append((held.trial_id, rate))

    def fail(self) -> None:
        for held in self.leases(1):
            outcome = failed(self.dice.choice(REASONS))
            post_outcome(self.store, held.trial_id, held.attempt, outcome)

    def register(self) -> None:
        self.session = make_worker(self.store, self.name).id

    def replace_campaign(self) -> None:
        """Cancels and deletes the last; another takes its place."""
        gone = self.storm.campaigns[-1]
        self.store.campaigns.cancel(gone)
        self.store.campaigns.delete(gone)
        self.storm.campaigns[-1] = make_campaign(self.store, f"{self.name}-{uuid.uuid4().hex}")

    def tell_status(self) -> None:
        states = [self.dice.choice(["idle", "quarantined"]) for _ in range(3)]
        told = enumerate(states)
        nodes = [NodeStatusBody(name=f"n{n}", state=state, reason="loud") for n, state in told]
        status = StatusBody(idle_node_s=self.dice.uniform(0, 99), nodes=nodes)
        send_beats(self.store, self.session, [], status=status)

    def read(self) -> None:
        campaign = self.campaign()
        for trial in self.store.trials.find(campaign)[-5:]:
            self.store.trials.detail(trial.id)
        self.store.leaderboard.ranked_layouts(campaign, "tokens_per_s")


@pytest.fixture
def seed() -> int:
    told = os.environ.get("LAYOUT_TUNER_STORM_SEED")
    seed = int(told) if told else random.SystemRandom().randrange(1 << 32)
    _LOG.warning("LAYOUT_TUNER_STORM_SEED=%d", seed)
    return seed


@pytest.fixture
def storm(database_url: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Storm]:
    monkeypatch.setattr(leases, "LEASE_S", 0.05)
    with ExitStack() as stack:
        stores = [stack.enter_context(closing(Store(database_url))) for _ in range(2)]
        yield Storm(stores, seed)


@pytest.mark.slow
def test_threads_at_once_never_deadlock_and_leave_a_legal_history(storm: Storm) -> None:
    at_once(*(Thread(storm, number).rage for number in range(NUM_THREADS)))
    store = storm.stores[0]
    assert violations(store) == []
    assert wrong_leaderboards(store) == []
    measured = {
        trial.id: trial.measurement.tokens_per_s
        for campaign in storm.campaigns
        for trial in store.trials.find(campaign)
        if trial.measurement is not None
    }
    assert measured, "nothing was ever measured: the storm did nothing"
    assert set(measured.items()) <= set(storm.accepted), "nothing else is there"
    there = {trial.id for c in storm.campaigns for trial in store.trials.find(c)}
    accepted = {trial for trial, _ in storm.accepted}
    assert accepted & there == set(measured), "what was accepted is there, unless it was deleted"


LEASE_EVERYTHING = """
import sys
from pathlib import Path
from layout_tuner.results_db.database.data_dir import DataDir
from layout_tuner.results_db.store import Store
from tests.kit.store import take_leases
store = Store(DataDir(Path(sys.argv[1])).database_url)
while leases := take_leases(store, sys.argv[2], 1):
    print(leases[0].trial_id, leases[0].attempt)
"""


def test_processes_that_lease_at_once_never_get_the_same_trial(tmp_path: Path) -> None:
    store = Store.open(upgraded(tmp_path))
    campaign = make_campaign(store)
    trials = [store.trials.add(campaign, Layout(micro_batch_size=n)).id for n in range(1, 31)]
    workers = [make_worker(store, f"w{n}").id for n in range(2)]
    processes = [start_python(LEASE_EVERYTHING, str(tmp_path), worker) for worker in workers]
    leased = [line for process in processes for line in process.communicate()[0].splitlines()]
    assert all(process.returncode == 0 for process in processes)
    assert sorted(leased) == sorted(f"{trial} 1" for trial in trials)
    store.close()


def test_threads_that_lease_report_and_write_at_once_lose_nothing(tmp_path: Path) -> None:
    with closing(Store.open(upgraded(tmp_path))) as store:
        campaign = make_campaign(store)
        wanted = 20
        ran: Counter[int] = Counter()

        def drive() -> None:
            for number in range(1, wanted + 1):
                store.trials.add(campaign, Layout(micro_batch_size=number))
                store.driver.move_clocks()

        def work(worker_id: str) -> None:
            while store.campaigns.count_trials(campaign)["COMPLETED"] < wanted:
                for lease in take_leases(store, worker_id, 1):
                    ran[lease.trial_id] += 1
                    assert post_outcome(store, lease.trial_id, lease.attempt, completed()).accepted

        workers = [make_worker(store, f"w{n}").id for n in range(3)]
        at_once(drive, *(partial(work, worker) for worker in workers))
        assert len(ran) == wanted
        assert set(ran.values()) == {1}
        places = [trial.ended_seq for trial in store.trials.ended_since(campaign, 0)]
        assert places == list(range(1, wanted + 1))
