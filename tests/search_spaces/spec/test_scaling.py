"""A layout on more nodes keeps its global batch, or is refused with the numbers."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from search_spaces.errors import LayoutInvalidError
from search_spaces.spec.cluster import Cluster
from search_spaces.spec.layout import Layout
from search_spaces.spec.presets.clusters import CLUSTER_PRESETS
from search_spaces.spec.presets.models import model_preset
from search_spaces.spec.scaling import scaled

MODEL = model_preset("gpt-22b")
FRONTIER = CLUSTER_PRESETS["frontier"]
"""8 devices a node."""


def on(layout: Layout, num_nodes: int, cluster: Cluster = FRONTIER) -> Layout:
    return scaled(layout, num_nodes, model=MODEL, cluster=cluster)


def make_layout(**changes: object) -> Layout:
    """Two nodes and a global batch of 2 * 2 * 16 = 64 sequences."""
    fields = {"num_nodes": 2, "tp": 4, "pp": 2, "dp": 2, "micro_batch_size": 2}
    fields |= {"num_microbatches": 16, "zero_stage": 1}
    return Layout.from_mapping({**fields, "precision": "bf16"} | changes)


def test_more_nodes_are_more_replicas_that_accumulate_less() -> None:
    measured = make_layout()
    larger = on(measured, 8)
    assert (larger.num_nodes, larger.dp, larger.num_microbatches) == (8, 8, 4)
    assert larger.global_batch_size == measured.global_batch_size == 64
    assert larger.num_devices == 8 * 8
    assert replace(larger, num_nodes=2, dp=2, num_microbatches=16) == measured
    assert on(measured, 2) == measured
    half_as_many_again = on(make_layout(dp=2, micro_batch_size=1, num_microbatches=24), 3)
    assert (half_as_many_again.dp, half_as_many_again.num_microbatches) == (3, 16)
    described_smaller = replace(FRONTIER, num_nodes=2)
    assert on(measured, 4, described_smaller).num_nodes == 4, "it is taken as large enough"


@pytest.mark.parametrize(
    ("changes", "num_nodes", "why"),
    [
        ({}, 1, "num_nodes=1 is fewer than the 2 of the layout"),
        (
            {"dp": 1, "pp": 4, "num_microbatches": 32, "zero_stage": 0},
            3,
            "dp*num_nodes=1*3=3 is not divisible by the layout's num_nodes=2",
        ),
        ({}, 6, "global_batch_size=64 is not divisible by dp*micro_batch_size=6*2=12"),
        (
            {"vpp": 2, "num_microbatches": 4},
            8,
            "num_microbatches=1 is not divisible by pp=2, which the interleaved schedule of vpp=2",
        ),
        (
            {"micro_batch_size": 1, "num_microbatches": 12, "zero_replicas": 2},
            3,
            "dp=3 is not divisible by zero_replicas=2",
        ),
        (
            {"num_nodes": 1, "dp": 1, "pp": 1, "zero_stage": 0},
            2,
            "tp*pp*dp=4*1*2=8 does not fill num_nodes*devices_per_node=2*8=16",
        ),
    ],
)
def test_indivisible_layouts_are_refused_with_the_numbers(
    changes: dict[str, object], num_nodes: int, why: str
) -> None:
    with pytest.raises(LayoutInvalidError, match=re.escape(why)):
        on(make_layout(**changes), num_nodes)
