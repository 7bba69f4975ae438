"""kill -9 in mid-probe, then a restart: the campaign goes on, nothing is lost or done twice."""

from __future__ import annotations

from typing import Any

import psutil
import pytest

from tests.e2e.conftest import Service
from tests.kit.waiting import wait_until
from tests.workers.process_checks import is_alive, kill

pytestmark = [pytest.mark.slow, pytest.mark.ranks, pytest.mark.timeout(600)]

NUM_TRIALS = 6
LONG_PROBES: dict[str, Any] = {
    "budget": {"trials": NUM_TRIALS},
    "probe": {"warmup": 2, "iterations": 40, "deadline": "90s"},
}


class MiddleOfAProbe:
    """What was there when a probe was under way: what is done, what runs, and its ranks."""

    def __init__(self, service: Service) -> None:
        service.submit(**LONG_PROBES)
        self.completed = service.wait_for_completed("e2e", 2)
        self.running, self.ranks = wait_until(
            "a rank is at work", lambda: _running_with_ranks(service)
        )


def _running_with_ranks(service: Service) -> tuple[dict[str, Any], list[psutil.Process]] | None:
    running = service.trials("e2e", state="RUNNING")
    ranks = service.ranks()
    return (running[0], ranks) if running and ranks else None


def assert_nothing_lost_or_twice(service: Service, before: MiddleOfAProbe, attempts: int) -> None:
    """Finished trials are what they were; the one in the middle took so many attempts."""
    trials = {trial["id"]: trial for trial in service.trials("e2e")}
    assert [trial["state"] for trial in trials.values()] == ["COMPLETED"] * NUM_TRIALS
    for trial in before.completed:
        assert trials[trial["id"]] == trial
    assert trials[before.running["id"]]["attempt"] == attempts
    others = [trials[other]["attempt"] for other in set(trials) - {before.running["id"]}]
    # With its worker, a trial may also lose the lease that it was given ahead of its turn.
    leased_ahead = attempts - 1
    assert others.count(1) >= len(others) - leased_ahead
    assert set(others) <= {1, attempts}


@pytest.mark.parametrize(
    ("victim", "attempts"),
    [("driver", 1), ("serve", 1), ("worker", 2)],
)
def test_a_killed_process_is_started_again_and_the_campaign_goes_on(
    service: Service, victim: str, attempts: int
) -> None:
    before = MiddleOfAProbe(service)
    killed = service.process(victim)
    killed.kill()
    if victim == "worker":
        wait_until("its ranks are gone", lambda: not _alive(before.ranks), 10)
    wait_until("it was started again", lambda: {*service.named(victim)} - {killed})
    wait_until("the service answers", service.answers)
    assert service.wait_for_end("e2e")["reason"] == "budget", service.logs()
    assert_nothing_lost_or_twice(service, before, attempts)


def test_a_killed_service_leaves_no_process_and_goes_on_when_started(service: Service) -> None:
    before = MiddleOfAProbe(service)
    main = [service.up.pid, *(service.process(c).pid for c in ("serve", "driver", "worker"))]
    kill([psutil.Process(pid) for pid in main])
    service.up.wait()
    wait_until("no rank, and nothing else, is alive", lambda: not service.processes(), 40)
    assert not _alive(before.ranks)
    service.start()
    assert service.wait_for_end("e2e")["reason"] == "budget", service.logs()
    assert_nothing_lost_or_twice(service, before, attempts=2)


def _alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [process for process in processes if is_alive(process.pid)]
