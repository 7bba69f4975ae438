"""The precision of a campaign that names none: set when it is stored; fp32 where stored without."""

from __future__ import annotations

from typing import Any

from search_spaces.campaigns.campaign import CampaignSpec
from search_spaces.spec.layout import Layout
from tests.api.local_api import CAMPAIGN, Api
from tests.results_db.factories import make_worker

ON_GPUS: dict[str, Any] = {
    **CAMPAIGN,
    "name": "large",
    "model": "llama-70b",
    "cluster": "a100-sxm",
    "space": {"global_batch_size": 1024, "num_nodes": 64, "tp": 8, "pp": 8, "recompute": "full"},
}


def test_a_campaign_is_stored_with_the_precision_of_its_cluster(api: Api) -> None:
    created = api.post("/campaigns", ON_GPUS, 201)
    assert created["spec"]["space"]["precision"] == "bf16"
    assert api.get("/campaigns/large")["spec"]["space"]["precision"] == "bf16"
    assert api.post("/campaigns", CAMPAIGN, 201)["spec"]["space"]["precision"] == "fp32"


def test_a_campaign_that_was_stored_without_a_precision_keeps_fp32(api: Api) -> None:
    document = CampaignSpec.from_mapping(ON_GPUS).to_mapping()
    del document["space"]["precision"]
    stored = api.store.create_campaign(document, num_legal_layouts=1)
    clone = api.post("/campaigns/large/clone", {"name": "another"}, 201)
    assert clone["spec"]["space"]["precision"] == "fp32"
    layout = Layout(num_nodes=64, tp=8, pp=8, dp=8, num_microbatches=128, recompute="full")
    api.store.add_trial(stored.id, layout)
    worker = make_worker(api.store, cluster="a100-sxm", num_nodes=64, devices_per_node=8)
    (lease,) = api.post(f"/workers/{worker.id}/leases", {"max_trials": 1})["leases"]
    assert lease["request"]["layout"]["precision"] == "fp32"
