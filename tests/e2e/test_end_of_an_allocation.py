"""An allocation ends in mid-campaign: probes too long for it do not start; the next one goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.service.live_service import LiveService, wait_until
from tests.e2e.held_probes import PATIENCE_S, RANK_ENTRY, assert_nothing_left

pytestmark = [pytest.mark.slow, pytest.mark.ranks, pytest.mark.timeout(600)]

SPACE = {
    "tp": [1, 2],
    "pp": [1, 2],
    "dp": [1, 2],
    "micro_batch_size": [1, 2, 4, 8],
    "zero_stage": [0, 1],
    "recompute": ["none", "full"],
    "vpp": 1,
    "sequence_parallel": False,
    "global_batch_size": 16,
}
TIME_LEFT_S = 90


@pytest.mark.nightly
def test_a_campaign_outlives_its_allocation(tmp_path: Path) -> None:
    with LiveService(tmp_path) as service:
        probe = {"warmup": 2, "iterations": 2, "deadline": "10s"}
        campaign = service.submit(space=SPACE, strategy="exhaustive", budget={}, probe=probe)
        driver = service.driver()
        driver.start()

        def completed() -> int:
            return len(service.store.trials.find(campaign["id"], states=["COMPLETED"]))

        first = service.worker(
            "w1", rank_entry=RANK_ENTRY, options=["--time-left", str(TIME_LEFT_S)]
        )
        first.start()
        wait_until("it ends by itself", first.has_ended, TIME_LEFT_S + PATIENCE_S)
        assert first.stop() == 0, first.said()
        so_far = completed()
        assert so_far > 0, first.said()
        assert service.get(f"/campaigns/{campaign['id']}")["state"] == "RUNNING"
        running = service.store.trials.find(campaign["id"], states=["RUNNING"])
        assert running == [], "its leases were returned"

        second = service.worker("w2", rank_entry=RANK_ENTRY)
        second.start()
        wait_until("the next one goes on", lambda: completed() >= so_far + 3, PATIENCE_S)
        trials = service.store.trials.find(campaign["id"])
        assert [trial.lost_attempts for trial in trials] == [0] * len(trials)
        service.post(f"/campaigns/{campaign['id']}/cancel")
        assert driver.stop() == 0, driver.said()
        assert_nothing_left(service, second)
