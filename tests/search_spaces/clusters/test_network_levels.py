"""The levels of a cluster's network: reading, checks, writing."""

from __future__ import annotations

import re
from typing import Any, Final

import pytest

from layout_tuner.errors import ClusterInvalidError
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.clusters.cluster_presets import (
    CLUSTER_PRESETS,
    resolve_cluster,
    with_speeds_of,
)
from layout_tuner.search_spaces.clusters.network_levels import NetworkLevel

NODE: Final = {"name": "node", "devices": 8}
PAIR: Final = {"name": "pair", "devices": 2, "bandwidth_bytes_per_s": 1e11, "latency_s": 2e-6}
FOUR: Final = [PAIR, NODE, {"name": "group", "devices": 1024}, {"name": "system"}]


def h100_with(levels: Any, **others: Any) -> Cluster:
    return resolve_cluster({"preset": "h100-sxm", "levels": levels, **others})[0]


def test_levels_survive_a_document() -> None:
    cluster = h100_with(FOUR)
    assert [level.devices for level in cluster.levels] == [2, 8, 1024, None]
    assert cluster.to_mapping()["levels"] == FOUR
    assert Cluster.from_mapping(cluster.to_mapping()) == cluster


def test_a_cluster_without_levels_has_no_new_word() -> None:
    cluster = CLUSTER_PRESETS["h100-sxm"]
    assert "levels" not in cluster.to_mapping()
    assert h100_with([]) == h100_with(None) == cluster


@pytest.mark.parametrize(
    ("levels", "message"),
    [
        ("node", "levels='node' is not a list of mappings"),
        ({"node": 8}, "is not a list of mappings"),
        ([3], "levels[0]: a level is 3, not a mapping"),
        ([{"devices": 8}], "the name '' is not a string of 1 to 64 characters"),
        ([NODE | {"latency": 1}], "unknown field of a level 'latency' (did you mean 'latency_s'?)"),
        ([NODE | {"name": ""}], "the name '' is not a string of 1 to 64 characters"),
        ([NODE | {"devices": "8"}], "devices='8' is not a whole number from 1"),
        ([NODE | {"latency_s": 11}], "latency_s=11 is not a number from 1e-15 to 10 s"),
        ([NODE | {"bandwidth_bytes_per_s": 1}], "bandwidth_bytes_per_s=1 is not a number from"),
        ([NODE, NODE | {"devices": 16}], "each name may be there once, not node, node"),
        ([{"name": "rack"}, NODE], "'rack' states no devices, which only the last level may"),
        ([NODE, {"name": "rack", "devices": 12}], "'rack' has 12 devices, which is no multiple"),
        ([NODE, {"name": "rack", "devices": 8}], "'rack' has 8 devices, which is no multiple"),
        ([PAIR, {"name": "system"}], "none has devices_per_node=8 devices (pair 2, system all)"),
        ([NODE] * 9, "there are more than 8"),
    ],
)
def test_impossible_levels_are_refused(levels: Any, message: str) -> None:
    with pytest.raises(ClusterInvalidError, match=re.escape(message)):
        h100_with(levels)


def test_an_object_that_is_no_level_is_refused() -> None:
    with pytest.raises(ClusterInvalidError, match="is not a tuple of NetworkLevel"):
        Cluster(
            name="a",
            device="b",
            num_nodes=1,
            devices_per_node=8,
            device_memory_bytes=1,
            levels=[NetworkLevel(name="node", devices=8)],  # type: ignore[arg-type]
        )


def test_levels_shrink_with_the_nodes() -> None:
    cluster = h100_with(FOUR)
    sizes = [level.devices for level in cluster.with_devices_per_node(4).levels]
    assert sizes == [2, 4, 512, None]
    assert [e.devices for e in cluster.with_devices_per_node(1).levels] == [1, 128, None]
    assert [e.devices for e in cluster.with_devices_per_node(3).levels] == [3, 384, None]
    assert cluster.with_devices_per_node(8) == cluster


def test_a_preset_with_other_nodes_has_their_levels() -> None:
    sizes = {2: [2, 36, None], 4: [4, 72, None], 64: []}
    for node, expected in sizes.items():
        cluster, _ = resolve_cluster({"preset": "gb200", "devices_per_node": node})
        assert [level.devices for level in cluster.levels] == expected
    with pytest.raises(ClusterInvalidError) as refused:
        resolve_cluster({"preset": "gb200", "devices_per_node": 0})
    assert len(refused.value.parts) == 1


def test_larger_nodes_have_no_levels() -> None:
    assert h100_with(FOUR).with_devices_per_node(64).levels == ()


def test_presets_have_the_levels_of_their_machines() -> None:
    words = {"frontier": "pair 2, node 8, group 1,024, system", "h200": ""}
    words |= dict.fromkeys(("gb200", "gb300"), "tray 4, domain 72, fabric")
    for name, said in words.items():
        assert CLUSTER_PRESETS[name].levels_in_words == said
    domains = {name: CLUSTER_PRESETS[name].domain_devices for name in words}
    assert domains == {"frontier": 8, "h200": 8, "gb200": 72, "gb300": 72}


def test_levels_take_what_they_do_not_state_from_the_short_form() -> None:
    cluster = h100_with([NODE, {"name": "rack", "devices": 64, "latency_s": 5e-6}])
    rates = [level.bandwidth_bytes_per_s for level in cluster.network]
    assert rates == [None, 50e9, 50e9]
    latencies = [cluster.intra_node_latency_s, 5e-6, cluster.inter_node_latency_s]
    assert [level.latency_s for level in cluster.network] == latencies
    assert [level.name for level in cluster.network] == ["node", "rack", "cluster"]


def test_a_largest_level_as_fast_as_a_node_is_a_domain() -> None:
    fast = {"name": "domain", "bandwidth_bytes_per_s": 360e9}
    cluster = h100_with([NODE, fast], num_nodes=4)
    assert cluster.domain_devices == 32
    assert [level.name for level in cluster.network] == ["node", "domain", "cluster"]
    slow = h100_with([NODE, fast | {"bandwidth_bytes_per_s": 179e9}], num_nodes=4)
    assert slow.domain_devices == 8
    assert [level.name for level in slow.network] == ["node", "domain"]


def test_a_level_of_no_known_machine_is_warned_of() -> None:
    rack = {"name": "rack", "devices": 64, "bandwidth_bytes_per_s": 1e6, "latency_s": 1.0}
    _, warning = resolve_cluster({"preset": "h100-sxm", "levels": [NODE, rack]})
    assert warning is not None
    assert "bandwidth_bytes_per_s=1000000.0 is not" in warning
    assert "latency_s=1.0 is not a number from 1e-08 to 0.1 s at level rack" in warning


def test_speeds_of_a_device_bring_its_levels_to_equal_nodes() -> None:
    alps = CLUSTER_PRESETS["alps"]
    trays = with_speeds_of(alps, "gb200")
    assert trays is not None
    assert trays.levels == CLUSTER_PRESETS["gb200"].levels
    eight = with_speeds_of(CLUSTER_PRESETS["h100-sxm"], "gb200")
    assert eight is not None
    assert eight.levels == ()
