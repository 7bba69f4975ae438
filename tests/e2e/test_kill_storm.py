"""kill -9 of api, driver and workers at random moments: nothing is lost, nothing is done twice.

The storm runs over many campaigns, on SQLite and on a PostgreSQL that two services share; the
nightly storm has a hundred campaigns.

The moments follow from a seed, which is printed; `LAYOUT_TUNER_STORM_SEED` sets it.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.service.live_service import LiveProcess, LiveService, wait_until
from layout_tuner.results_db.records import ENDED_CAMPAIGN_STATES
from layout_tuner.results_db.store import Store
from tests.e2e.fake_probe_worker import read_journal
from tests.kit.campaigns import space_of
from tests.results_db.legal_history import violations, wrong_leaderboards

_LOG = logging.getLogger(__name__)

pytestmark = pytest.mark.timeout(600)

NUM_CAMPAIGNS = {"sqlite": 20, "postgresql": 20, "sqlite-long": 100}
NUM_TRIALS = 3
WORKERS = ("w1", "w2")
LEAST_KILLS = {"sqlite": 3, "postgresql": 3, "sqlite-long": 5}
"""Of each process; fewer would say little."""
LONGEST_CALM_S = 2.5
ABATED_CALM_S = 5.0
"""Longest calm once each process was killed often enough. Another driver takes over five seconds
after a kill: with a shorter calm, no driver would be active most of the time."""
HELD_BACK = 5
"""One campaign in so many is submitted only then: the storm is not over before it was one."""
PATIENCE_S = 240.0

CAMPAIGN: dict[str, Any] = {
    "budget": {"trials": NUM_TRIALS},
    "space": space_of(
        global_batch_size=8, tp=[1, 2], pp=[1, 2], dp=[1, 2], micro_batch_size=[1, 2]
    ),
}


class Storm:
    """Services on one database, a driver and two workers, and who kills them."""

    def __init__(
        self, *services: LiveService, seed: int, num_campaigns: int, least_kills: int = 0
    ) -> None:
        self.services = services
        self.service = service = services[0]
        self.num_campaigns = num_campaigns
        self._least_kills = least_kills
        self.random = random.Random(seed)
        self.journals = {name: service.folder / f"journal-{name}" for name in WORKERS}
        self.serves = {f"serve-{place}": each.serve for place, each in enumerate(services, 1)}
        self.processes: dict[str, LiveProcess] = {
            **self.serves,
            "driver": service.driver(),
            **{name: self._worker(name, place) for place, name in enumerate(WORKERS)},
        }
        self.kills: Counter[str] = Counter()

    def _worker(self, name: str, place: int) -> LiveProcess:
        service = self.services[place % len(self.services)]
        where = ["--url", service.url, "--token-file", str(service.data.token_file)]
        spool = ["--spool-dir", str(self.spool(name)), "--journal", str(self.journals[name])]
        command = ["tests.e2e.fake_probe_worker", *where, "--name", name, *spool]
        return self.service.make(name, command)

    def spool(self, name: str) -> Path:
        return self.service.folder / f"spool-{name}"

    def start(self) -> None:
        for name in ("driver", *WORKERS):
            self.processes[name].start()

    def submit_all(self) -> None:
        """Submits each campaign until the service confirms it: the service may die meanwhile."""
        for number in range(self.num_campaigns):
            if number == self.num_campaigns - self.num_campaigns // HELD_BACK:
                wait_until("each was killed so often", self.was_one, PATIENCE_S)
            service = self.services[number % len(self.services)]
            self._submit(service, {"name": f"storm-{number}", "seed": number, **CAMPAIGN})

    def _submit(self, service: LiveService, changes: dict[str, Any]) -> None:
        def is_there() -> bool:
            try:
                service.submit(**changes)
            except httpx.HTTPStatusError as error:
                # An earlier try whose answer was lost with the service.
                return error.response.status_code == 409
            except httpx.TransportError:
                return False
            return True

        wait_until(f"{changes['name']} is submitted", is_there)

    def rage(self) -> None:
        """Kills one process after the other until every campaign has ended."""
        wait_until("all of them are at work", self.is_at_work)
        while not self.has_ended():
            self.strike()
            longest_s = ABATED_CALM_S if self.was_one() else LONGEST_CALM_S
            time.sleep(self.random.uniform(0.0, longest_s))

    def is_at_work(self) -> bool:
        """Whether there was anything of each process that a kill could break off."""
        store = self.service.store
        return store.driver.lease().seen_at is not None and len(store.workers.find()) == len(
            WORKERS
        )

    def was_one(self) -> bool:
        """Whether each process was killed as often as it is to be at least."""
        return all(self.kills[name] >= self._least_kills for name in self.processes)

    def strike(self) -> None:
        fewest = min(self.kills[name] for name in self.processes)
        choice = [n for n in self.processes if self.kills[n] <= fewest + 2]
        victim = self.random.choice(choice)
        process = self.processes[victim]
        assert not process.has_ended(), f"{victim} ended by itself:\n{process.said()}"
        process.kill()
        process.start()
        self.kills[victim] += 1

    def has_ended(self) -> bool:
        campaigns = self.service.store.campaigns.find()
        return len(campaigns) == self.num_campaigns and all(
            c.state in ENDED_CAMPAIGN_STATES for c in campaigns
        )


@pytest.fixture
def seed() -> int:
    told = os.environ.get("LAYOUT_TUNER_STORM_SEED")
    seed = int(told) if told else random.SystemRandom().randrange(1 << 32)
    _LOG.warning("LAYOUT_TUNER_STORM_SEED=%d", seed)
    return seed


@contextmanager
def services_sharing(folder: Path, url: str, number: int) -> Iterator[list[LiveService]]:
    """Services on one PostgreSQL, which the environment names; the first one's store is on it."""
    with ExitStack() as stack:
        services = []
        for place in range(number):
            (folder / f"service-{place}").mkdir()
            services.append(stack.enter_context(LiveService(folder / f"service-{place}")))
        services[0].store.close()
        services[0].store = stack.enter_context(closing(Store(url)))
        yield services


@pytest.fixture(
    params=[
        pytest.param("sqlite", marks=pytest.mark.slow),
        pytest.param("postgresql", marks=pytest.mark.slow),
        pytest.param("sqlite-long", marks=pytest.mark.nightly),
    ]
)
def storm(
    tmp_path: Path, seed: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Storm]:
    kind = request.param
    number, least = NUM_CAMPAIGNS[kind], LEAST_KILLS[kind]
    if kind != "postgresql":
        with LiveService(tmp_path) as service:
            yield Storm(service, seed=seed, num_campaigns=number, least_kills=least)
        return
    url = request.getfixturevalue("postgres_url")
    monkeypatch.setenv("LAYOUT_TUNER_DATABASE_URL", url)
    with services_sharing(tmp_path, url, 2) as services:
        yield Storm(*services, seed=seed, num_campaigns=number, least_kills=least)


def test_many_campaigns_outlive_kills_of_every_process(storm: Storm) -> None:
    storm.start()
    submitting = threading.Thread(target=storm.submit_all)
    submitting.start()
    storm.rage()
    submitting.join(PATIENCE_S)
    assert not submitting.is_alive()
    wait_until("every campaign has ended", storm.has_ended, PATIENCE_S)
    for name, process in storm.processes.items():
        if name not in storm.serves:
            assert process.stop() == 0, process.said()
    _LOG.warning("kills: %s", dict(storm.kills))
    assert storm.was_one()
    assert_campaigns_are_whole(storm)
    assert violations(storm.service.store) == []
    assert wrong_leaderboards(storm.service.store) == []
    assert_every_outcome_is_there_once(storm)


def assert_campaigns_are_whole(storm: Storm) -> None:
    """Each is there once, ended as its budget says, and tried as many different layouts."""
    store = storm.service.store
    campaigns = store.campaigns.find()
    names = [f"storm-{number}" for number in range(storm.num_campaigns)]
    assert sorted(c.name for c in campaigns) == sorted(names)
    for campaign in campaigns:
        assert (campaign.state, campaign.reason) == ("COMPLETED", "budget"), campaign
        trials = store.trials.find(campaign.id)
        assert len(trials) == NUM_TRIALS, campaign.name
        firsts = [trial.layout_key for trial in trials if trial.repeat_of is None]
        assert len(firsts) == len(set(firsts))


def assert_every_outcome_is_there_once(storm: Storm) -> None:
    """What the service took is in the database, and nothing is there that nobody measured."""
    store = storm.service.store
    trials = [t for c in store.campaigns.find() for t in store.trials.find(c.id)]
    measured = {t.id: t.measurement.tokens_per_s for t in trials if t.measurement is not None}
    lines = [line for journal in storm.journals.values() for line in read_journal(journal)]
    made = Counter(line["rate"] for line in lines if line["what"] == "made")
    assert set(measured.values()) <= set(made), "something was measured that nobody made up"
    assert len(set(measured.values())) == len(measured), "one measurement counts for two trials"
    receipts = [line for line in lines if line["what"] == "receipt"]
    for line in receipts:
        if line["accepted"] and line["rate"] is not None:
            assert measured[line["trial"]] == line["rate"], line
    for name in WORKERS:
        left = list(storm.spool(name).rglob("*.json"))
        assert left == [], "an outcome was set aside, or left"
    # A probe whose outcome is nowhere ended with its worker, or came too late.
    nowhere = len(made) - len(measured)
    too_late = sum(not line["accepted"] for line in receipts)
    killed = sum(storm.kills[name] for name in WORKERS)
    assert nowhere <= killed * 8 + too_late
