"""kill -9 in mid-probe, then a restart: the campaign goes on, nothing is lost or done twice."""

from __future__ import annotations

from typing import Any

import psutil
import pytest

from tests.e2e.conftest import Service
from tests.kit.waiting import wait_until
from tests.workers.process_checks import is_alive, kill

pytestmark = [pytest.mark.slow, pytest.mark.ranks, pytest.mark.timeout(600)]

NUM_TRIALS = 8
LONG_PROBES: dict[str, Any] = {
    "budget": {"trials": NUM_TRIALS},
    "stop": {"remeasure": 0},
    "probe": {"warmup": 2, "iterations": 40, "deadline": "90s"},
}


class MiddleOfAProbe:
    """What was there when a probe was under way: what is done, what runs, and its ranks."""

    def __init__(self, service: Service, *, known: set[int]) -> None:
        """Waits for a probe that is none of the known trials."""

        def running() -> tuple[dict[str, Any], list[psutil.Process]] | None:
            found = [t for t in service.trials("e2e", state="RUNNING") if t["id"] not in known]
            ranks = service.ranks()
            return (found[0], ranks) if found and ranks else None

        self.running, self.ranks = wait_until("a rank is at work", running)
        self.completed = service.trials("e2e", state="COMPLETED")

    def wait_until_ranks_are_gone(self) -> None:
        wait_until("they are gone", lambda: not any(is_alive(rank.pid) for rank in self.ranks), 10)


def kill_one(service: Service, victim: str) -> None:
    """Kills a process, and waits until another one has its place."""
    killed = service.process(victim)
    killed.kill()
    wait_until(
        f"{victim} was started again",
        lambda: [each for each in service.named(victim) if each.pid != killed.pid],
    )
    wait_until("the service answers", service.answers)


def kill_all(service: Service) -> None:
    """Kills every process but those of the ranks, which must end then, and starts the service."""
    main = [service.up.pid, *(service.process(c).pid for c in ("serve", "driver", "worker"))]
    kill([psutil.Process(pid) for pid in main])
    service.up.wait()
    wait_until("no rank, and nothing else, is alive", lambda: not service.processes(), 40)
    service.start()


def test_a_campaign_outlives_kills_of_each_process_and_of_all_at_once(service: Service) -> None:
    service.submit(**LONG_PROBES)
    service.wait_for_completed("e2e", 2)
    moments: dict[str, MiddleOfAProbe] = {}
    for victim in ("driver", "serve", "worker", "all"):
        known = {moment.running["id"] for moment in moments.values()}
        moments[victim] = MiddleOfAProbe(service, known=known)
        if victim == "all":
            kill_all(service)
        else:
            kill_one(service, victim)
        if victim in ("worker", "all"):
            moments[victim].wait_until_ranks_are_gone()
    assert service.wait_for_end("e2e")["reason"] == "budget", service.logs()

    trials = {trial["id"]: trial for trial in service.trials("e2e")}
    assert [trial["state"] for trial in trials.values()] == ["COMPLETED"] * NUM_TRIALS
    for victim, moment in moments.items():
        for trial in moment.completed:
            assert trials[trial["id"]] == trial, f"it was completed when {victim} was killed"
    lost = {victim: int(victim in ("worker", "all")) for victim in moments}
    for victim, moment in moments.items():
        attempts = trials[moment.running["id"]]["attempt"] - moment.running["attempt"]
        assert attempts == lost[victim], f"it ran when {victim} was killed"
    # With its worker, a trial may also lose the lease that it was given ahead of its turn.
    in_the_middle = {moment.running["id"] for moment in moments.values()}
    others = [trials[other]["attempt"] for other in set(trials) - in_the_middle]
    assert sum(others) - len(others) <= sum(lost.values())
