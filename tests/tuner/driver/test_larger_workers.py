"""The driver when layouts need more nodes than any worker has."""

from __future__ import annotations

from results_db.store import Store
from search_spaces.campaigns.campaign import CampaignSpec
from tests.tuner.factories import DrivenCampaign, make_spec, submit
from tuner.driver.driver import Driver
from tuner.driver.open_trial_target import MAX_TOO_LARGE


def wide_spec(**changes: object) -> CampaignSpec:
    """Most of its legal layouts need two nodes; the fake workers have one."""
    cluster = {
        "name": "local-cpu",
        "device": "CPU core",
        "num_nodes": 2,
        "devices_per_node": 8,
        "device_memory_bytes": 4 << 30,
    }
    space = {
        "global_batch_size": 16,
        "num_nodes": [1, 2],
        "tp": [1, 2, 4],
        "pp": [1, 2, 4],
        "micro_batch_size": [1, 2],
        "zero_stage": [0, 1],
    }
    return make_spec(**{"cluster": cluster, "space": space, **changes})


def test_trials_too_large_for_every_worker_do_not_keep_the_smaller_ones_from_being_tried(
    store: Store,
) -> None:
    campaign = DrivenCampaign(store, wide_spec(budget={"trials": 60}))
    campaign.until(lambda: store.workers.count_too_large(campaign.id) > 2)
    campaign.until_completed(campaign.count() + 2)
    assert campaign.record.state == "RUNNING"
    assert store.workers.count_too_large(campaign.id) <= MAX_TOO_LARGE + 2


def test_without_any_worker_no_trial_counts_as_too_large(store: Store) -> None:
    campaign = submit(store, wide_spec())
    driver = Driver(store)
    for _ in range(5):
        driver.step()
    assert store.campaigns.count_trials(campaign.id)["PENDING"] == 1
