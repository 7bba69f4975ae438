"""The precision of a campaign that names none: it is set when the campaign is stored."""

from __future__ import annotations

from typing import Any

from tests.kit.api import CAMPAIGN, Api

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
