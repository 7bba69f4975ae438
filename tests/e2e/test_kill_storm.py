"""kill -9 of api, driver and workers at random moments over a hundred campaigns: nothing lost, nothing twice.

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
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.live_service import LiveProcess, LiveService, wait_until
from results_db.records import ENDED_CAMPAIGN_STATES
from tests.e2e.fake_probe_worker import read_journal
from tests.results_db.legal_history import violations

_LOG = logging.getLogger(__name__)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_CAMPAIGNS = 100
NUM_TRIALS = 3
WORKERS = ("w1", "w2")
LEAST_KILLS = 5
"""Of each process; fewer would say little."""
LONGEST_CALM_S = 2.5
CALM_AT_START_S = 6.0
PATIENCE_S = 240.0

CAMPAIGN: dict[str, Any] = {
    "budget": {"trials": NUM_TRIALS},
    "space": {
        "global_batch_size": 8,
        "tp": [1, 2],
        "pp": [1, 2],
        "dp": [1, 2],
        "micro_batch_size": [1, 2],
    },
}


class Storm:
    """A service, its driver and two workers, and who kills them."""

    def __init__(self, service: LiveService, seed: int) -> None:
        self.service = service
        self.random = random.Random(seed)
        self.journals = {name: service.folder / f"journal-{name}" for name in WORKERS}
        self.workers = {name: self._worker(name) for name in WORKERS}
        self.driver = service.driver()
        self.processes: dict[str, LiveProcess] = {
            "serve": service.serve,
            "driver": self.driver,
            **self.workers,
        }
        self.kills: Counter[str] = Counter()

    def _worker(self, name: str) -> LiveProcess:
        where = ["--url", self.service.url, "--token-file", str(self.service.data.token_file)]
        spool = ["--spool-dir", str(self.spool(name)), "--journal", str(self.journals[name])]
        command = ["tests.e2e.fake_probe_worker", *where, "--name", name, *spool]
        return self.service.make(name, command)

    def spool(self, name: str) -> Path:
        return self.service.folder / f"spool-{name}"

    def start(self) -> None:
        for name in ("driver", *WORKERS):
            self.processes[name].start()

    def submit_all(self) -> None:
        """Submits each campaign until somebody says that it is there: the service may die meanwhile."""
        for number in range(NUM_CAMPAIGNS):
            self._submit({"name": f"storm-{number}", "seed": number, **CAMPAIGN})

    def _submit(self, changes: dict[str, Any]) -> None:
        def is_there() -> bool:
            try:
                self.service.submit(**changes)
            except httpx.HTTPStatusError as error:
                # An earlier try whose answer was lost with the service.
                return error.response.status_code == 409
            except httpx.TransportError:
                return False
            return True

        wait_until(f"{changes['name']} is submitted", is_there)

    def rage(self) -> None:
        """Kills one process after the other until every campaign has ended."""
        time.sleep(CALM_AT_START_S)
        while not self.has_ended():
            self.strike()
            time.sleep(self.random.uniform(0.0, LONGEST_CALM_S))

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
        campaigns = self.service.store.campaigns()
        return len(campaigns) == NUM_CAMPAIGNS and all(
            c.state in ENDED_CAMPAIGN_STATES for c in campaigns
        )


@pytest.fixture
def seed() -> int:
    told = os.environ.get("LAYOUT_TUNER_STORM_SEED")
    seed = int(told) if told else random.SystemRandom().randrange(1 << 32)
    _LOG.warning("LAYOUT_TUNER_STORM_SEED=%d", seed)
    return seed


@pytest.fixture
def storm(tmp_path: Path, seed: int) -> Iterator[Storm]:
    with LiveService(tmp_path) as service:
        yield Storm(service, seed)


def test_a_hundred_campaigns_outlive_kills_of_every_process(storm: Storm) -> None:
    storm.start()
    submitting = threading.Thread(target=storm.submit_all)
    submitting.start()
    storm.rage()
    submitting.join(PATIENCE_S)
    assert not submitting.is_alive()
    wait_until("every campaign has ended", storm.has_ended, PATIENCE_S)
    for name, process in storm.processes.items():
        if name != "serve":
            assert process.stop() == 0, process.said()
    _LOG.warning("kills: %s", dict(storm.kills))
    assert min(storm.kills[name] for name in storm.processes) >= LEAST_KILLS
    assert_campaigns_are_whole(storm)
    assert violations(storm.service.store) == []
    assert storm.service.store.wrong_standings() == []
    assert_every_outcome_is_there_once(storm)


def assert_campaigns_are_whole(storm: Storm) -> None:
    """Each is there once, ended as its budget says, and tried as many different layouts."""
    store = storm.service.store
    campaigns = store.campaigns()
    names = [f"storm-{number}" for number in range(NUM_CAMPAIGNS)]
    assert sorted(c.name for c in campaigns) == sorted(names)
    for campaign in campaigns:
        assert (campaign.state, campaign.reason) == ("COMPLETED", "budget"), campaign
        trials = store.trials(campaign.id)
        assert len(trials) == NUM_TRIALS, campaign.name
        firsts = [trial.layout_key for trial in trials if trial.repeat_of is None]
        assert len(firsts) == len(set(firsts))


def assert_every_outcome_is_there_once(storm: Storm) -> None:
    """What the service took is in the database, and nothing is there that nobody measured."""
    store = storm.service.store
    trials = [t for c in store.campaigns() for t in store.trials(c.id)]
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
