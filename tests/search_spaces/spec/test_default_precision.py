from __future__ import annotations

from typing import Any

import pytest

from search_spaces.campaigns.campaign import CampaignSpec
from search_spaces.spec.presets.clusters import CLUSTER_PRESETS, resolve_cluster
from search_spaces.spec.presets.spaces import SPACE_PRESETS
from search_spaces.spec.rules import violations
from tests.kit.campaigns import spec_of

CPU: dict[str, Any] = {"num_nodes": 1, "devices_per_node": 2, "device_memory_bytes": 8 << 30}
GPU: dict[str, Any] = {**CPU, "name": "ours", "device": "a device"}


def read(cluster: Any, space: Any) -> CampaignSpec:
    return spec_of(model="gpt-125m", cluster=cluster, space=space, strategy="exhaustive")


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
    spec = read(cluster, {"global_batch_size": 64})
    assert spec.space.values("precision") == (expected,)
    assert spec.to_mapping()["space"]["precision"] == expected
    assert spec.cluster.default_precision == expected
    legal = spec.legal_set()
    assert {legal.layout(place).precision for place in range(len(legal))} == {expected}
    assert not violations(legal.layout(0), spec.model, spec.cluster)


def test_a_stated_precision_stays() -> None:
    stated = read("frontier", {"global_batch_size": 64, "precision": ["fp32", "fp16"]})
    assert stated.space.values("precision") == ("fp32", "fp16")


@pytest.mark.parametrize("name", SPACE_PRESETS)
def test_a_preset_of_a_space_keeps_its_own_precision(name: str) -> None:
    spec = read("frontier", name)
    assert spec.space.values("precision") == SPACE_PRESETS[name].values("precision")
    changed = read("frontier", {"preset": name, "global_batch_size": 640})
    assert changed.space.values("precision") == SPACE_PRESETS[name].values("precision")


def test_a_stored_campaign_reads_back_as_it_was() -> None:
    spec = read(resolve_cluster("h100-sxm")[0].to_mapping(), {"global_batch_size": 64, "tp": [1]})
    assert CampaignSpec.from_mapping(spec.to_mapping()) == spec
