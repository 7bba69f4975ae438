"""kill -9 in the middle of a campaign, then a start: it goes on, and nothing is lost or done twice."""

from typing import Any

import psutil
import pytest

from tests.e2e.conftest import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def assert_nothing_lost_or_twice(service: Any, before: list[dict[str, Any]]) -> None:
    """Trials that were completed before the kill are what they were; no layout ran twice."""
    trials = {trial["id"]: trial for trial in service.trials("e2e")}
    for trial in before:
        now = trials[trial["id"]]
        assert now["state"] == "COMPLETED"
        assert now["measurement"] == trial["measurement"]
        assert now["attempt"] == trial["attempt"]
    keys = [str(sorted(trial["layout"].items())) for trial in trials.values()]
    assert len(set(keys)) == len(keys)
    assert len([t for t in trials.values() if t["state"] == "COMPLETED"]) == 10, service.logs()


@pytest.mark.parametrize("victim", ["driver", "worker", "serve"])
def test_a_killed_process_is_started_again_and_the_campaign_goes_on(
    service: Any, victim: str
) -> None:
    service.submit()
    before = service.wait_for_completed("e2e", 3)
    killed = service.process(victim)
    descendants = killed.children(recursive=True)
    killed.kill()
    wait_until(
        "everything below the killed process is gone",
        lambda: not [p for p in descendants if p.is_running() and p.status() != "zombie"],
        40,
    )
    wait_until("it was started again", lambda: len(_named(service, victim)) == 1)
    if victim == "serve":
        wait_until("the service answers again", service.answers)
    assert service.wait_for_end("e2e")["reason"] == "budget"
    assert_nothing_lost_or_twice(service, before)


def test_a_killed_service_leaves_no_process_and_goes_on_when_started(service: Any) -> None:
    service.submit()
    before = service.wait_for_completed("e2e", 3)
    main = [service.up.pid, *(service.process(c).pid for c in ("serve", "driver", "worker"))]
    for pid in main:
        psutil.Process(pid).kill()
    service.up.wait()
    wait_until("no rank, and nothing else, is alive", lambda: not service.processes(), 40)
    service.start()
    assert service.wait_for_end("e2e")["reason"] == "budget"
    assert_nothing_lost_or_twice(service, before)


def _named(service: Any, command: str) -> list[psutil.Process]:
    return [p for p in service.processes() if p.cmdline()[1:4] == ["-m", "api.cli", command]]
