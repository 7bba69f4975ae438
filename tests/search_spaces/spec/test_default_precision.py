from __future__ import annotations

from typing import Any

import pytest

from search_spaces.campaigns.campaign import CampaignSpec
from search_spaces.spec.presets.clusters import CLUSTER_PRESETS
from search_spaces.spec.presets.spaces import SPACE_PRESETS
from search_spaces.spec.rules import violations
from tests.kit.campaigns import spec_of

CPU: dict[str, Any] = {"num_nodes": 1, "devices_per_node": 2, "device_memory_bytes": 8 << 30}
GPU: dict[str, Any] = {**CPU, "name": "ours", "device": "a device"}


def read(cluster: Any, space: Any) -> CampaignSpec:
    return spec_of(model="gpt-125m", cluster=cluster, space=space, strategy="exhaustive")


BATCH = {"global_batch_size": 64}


@pytest.mark.parametrize(
    ("cluster", "expected"),
    [
        *((name, "bf16") for name in CLUSTER_PRESETS),
        ("local-cpu", "fp32"),
        ({"preset": "local-cpu", "peak_flops_per_s": {"fp32": 1e11, "bf16": 1e12}}, "fp32"),
        ({"preset": "local-cpu", "peak_flops_per_s": {"bf16": 1e12}}, "bf16"),
        ({**GPU, "peak_flops_per_s": {"fp32": 15.7e12, "fp16": 125e12}}, "fp16"),
        ({**GPU, "peak_flops_per_s": {"fp32": 9e12}}, "fp32"),
        (GPU, "fp32"),
    ],
    ids=str,
)
def test_a_campaign_without_a_precision_takes_the_one_that_its_cluster_is_used_with(
    cluster: Any, expected: str
) -> None:
    spec = read(cluster, BATCH)
    assert spec.to_mapping()["space"]["precision"] == expected
    assert spec.space.values("precision") == (spec.cluster.default_precision,) == (expected,)
    layout = spec.legal_set().layout(0)
    assert layout.precision == expected
    assert not violations(layout, spec.model, spec.cluster)
    assert CampaignSpec.from_mapping(spec.to_mapping()) == spec


def test_a_stated_precision_stays_and_so_does_that_of_a_preset_of_a_space() -> None:
    stated = read("frontier", {**BATCH, "precision": ["fp32", "fp16"]})
    assert stated.space.values("precision") == ("fp32", "fp16")
    for name, preset in SPACE_PRESETS.items():
        for space in (name, {"preset": name, "global_batch_size": 640}):
            found = read("frontier", space).space.values("precision")
            assert found == preset.values("precision"), name
