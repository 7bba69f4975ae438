"""A real worker runs cheap probes, and then a layout in full; and a probe that others disturb."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.service.live_service import LiveService, wait_until
from layout_tuner.predictions.statistics.disturbance import DISTURBED_SHARE
from layout_tuner.results_db.records import TrialRecord
from layout_tuner.tuner.driver.driver import Driver
from tests.e2e.conftest import Service
from tests.kit.campaigns import space_of
from tests.tuner.driver.test_cheap_probes import NUM_CHEAP, PartFirst
from tests.tuner.driver.test_cheap_probes import proposers as proposers
from tests.workers.busy_cores import busy

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(200)]

SPACE = space_of(global_batch_size=64, dp=[1, 2], micro_batch_size=[1, 2])


@pytest.mark.slow
def test_outcomes_of_parts_are_those_of_what_ran_and_a_whole_layout_is_ranked(
    tmp_path: Path, proposers: list[PartFirst]
) -> None:
    budget = {"node_hours": 1.0, "trials": NUM_CHEAP + 1}
    with LiveService(tmp_path) as service:
        created = service.submit(
            strategy="guided", budget=budget, space=SPACE, stop={"remeasure": 0}
        )
        service.worker().start()
        store, driver = service.store, Driver(service.store)

        def has_ended() -> bool:
            driver.step()
            return store.campaigns.get(created["id"]).ended_at is not None

        wait_until("the campaign has ended", has_ended, 150.0)
        campaign, trials = store.campaigns.get(created["id"]), store.trials.find(created["id"])
        assert len(proposers) == 1
        assert [trial.state for trial in trials] == ["COMPLETED"] * (NUM_CHEAP + 1), trials
        sequence = campaign.spec["model"]["seq_length"]
        for trial in trials:
            measured = trial.measurement
            assert measured.tokens_per_step == trial.layout.global_batch_size * sequence
            assert trial.cost.iterations > 0 < trial.cost.start
        *parts, whole = trials
        for part in parts:
            assert (part.layout.num_microbatches, part.num_layers) == (8, 2)
            assert part.layout.global_batch_size < part.full_layout.global_batch_size == 64
        assert whole.layout in [part.full_layout for part in parts]
        assert whole.layout.global_batch_size == 64
        (first,) = store.leaderboard.ranked_layouts(campaign.id, campaign.objective)
        assert first.trial.id == whole.id
        # Half of the layers have less to keep, and an untrained model's loss is about the same.
        losses = [store.trials.detail(each.id).iterations[0].loss for each in (parts[0], whole)]
        assert losses[0] == pytest.approx(losses[1], rel=0.1)
        of_whole = parts[[part.full_layout for part in parts].index(whole.layout)]
        assert _peak(of_whole) < _peak(whole)


def _peak(trial: TrialRecord) -> int:
    return trial.measurement.peak_memory_bytes


@pytest.mark.nightly
def test_a_probe_beside_busy_processes_is_marked_on_the_leaderboard(service: Service) -> None:
    """The fast suite has both halves of the way: the ranks in tests/workers/trainer, and the pages
    in tests/api/routes/test_disturbed_trials.py.
    """
    with busy(os.sched_getaffinity(0), 2):
        campaign = service.submit(budget={"trials": 1}, stop={"remeasure": 0})["id"]
        (trial,) = service.wait_for_completed(campaign, 1)
    assert trial["measurement"]["others_share"] > DISTURBED_SHARE
    root = str(service.http.base_url).removesuffix("/v1/")
    page = service.http.get(f"{root}/campaigns/e2e", headers={"Accept": "text/html"})
    assert '<span class="mark">disturbed</span>' in page.text
    shown = service.run("trial", "show", "e2e/1").stdout
    assert "of a device's time, disturbed" in shown
