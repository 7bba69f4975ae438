"""Groups of ranks on networks of levels, against counting the ranks of every unit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np
import pytest

from layout_tuner.array_types import Floats
from layout_tuner.predictions.estimates.links import (
    CARDS_EXPONENT,
    GroupLinks,
    Links,
    level_links,
    traffic_by_level,
)
from layout_tuner.predictions.estimates.step_time import TERM_NAMES, time_terms
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.clusters.cluster_presets import CLUSTER_PRESETS, resolve_cluster
from layout_tuner.search_spaces.clusters.level_units import level_units
from layout_tuner.search_spaces.clusters.network_levels import NetworkLevel
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.models.model_presets import model_preset
from layout_tuner.workers.simulation.placement import Axis, Placement

GB200: Final = replace(CLUSTER_PRESETS["gb200"], num_nodes=288)
FRONTIER: Final = CLUSTER_PRESETS["frontier"]
TAPERED: Final = replace(
    FRONTIER,
    levels=(*FRONTIER.levels[:-1], NetworkLevel(name="system", bandwidth_bytes_per_s=2.85e9)),
)
H100: Final = CLUSTER_PRESETS["h100-sxm"]
MIXTURE: Final = model_preset("qwen3-30b-a3b")
DENSE: Final = model_preset("gpt-22b")


def on_trays(**knobs: Any) -> Layout:
    layout = Layout(**knobs)
    return replace(layout, num_nodes=max(layout.num_devices // 4, 1))


LAYOUTS: Final = [
    on_trays(tp=4, dp=32, ep=64),
    on_trays(tp=2, cp=2, pp=4, dp=16, ep=16, etp=2),
    on_trays(tp=8, pp=2, dp=9),
    on_trays(dp=256, ep=128),
    on_trays(tp=2, pp=4, dp=32, ep=2, rank_order="tp_cp_pp_dp"),
]


def links_of(layout: Layout, cluster: Cluster) -> Links:
    columns = LayoutColumns.of_each([layout])
    return Links(columns, cluster, level_links(cluster, columns))


def seconds(layouts: list[Layout], cluster: Cluster) -> Floats:
    terms = time_terms(LayoutColumns.of_each(layouts), MIXTURE, cluster)
    return np.asarray(terms.seconds, dtype=np.float64)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.key)
def test_groups_are_placed_as_their_ranks_are(layout: Layout) -> None:
    links, placement = links_of(layout, GB200), Placement.on(layout, GB200)
    axes: dict[Axis, GroupLinks] = {"tp": links.tensor, "cp": links.context, "data": links.data}
    axes |= {"ep": links.expert, "edp": links.expert_data}
    for axis, found in axes.items():
        if found.ranks[0] == 1:
            continue
        for level, here, inside in found.beyond:
            units = placement.groups(axis) // int(np.max(level.unit))
            counts = [np.unique(group, return_counts=True)[1] for group in units]
            assert bool(inside[0]) == all(len(each) == 1 for each in counts), axis
            assert int(here[0]) == max(int(each.max()) for each in counts), axis


@pytest.mark.parametrize(
    ("layout", "devices"),
    [
        (on_trays(dp=128, ep=64), 64),
        (on_trays(dp=72), 72),
        (on_trays(dp=1152, ep=64), 64),
        (on_trays(tp=8, dp=144), 72),
        (on_trays(tp=8, dp=16), 64),
        (on_trays(tp=4, dp=4), 16),
    ],
)
def test_a_job_has_as_many_devices_in_each_domain(layout: Layout, devices: int) -> None:
    tray, domain = level_units(GB200, LayoutColumns.of_each([layout]))
    assert tray == 4
    assert np.ravel(domain).tolist() == [devices]


def test_levels_that_say_what_the_short_form_says_change_nothing() -> None:
    two = (NetworkLevel(name="node", devices=8), NetworkLevel(name="all"))
    layouts = [replace(each, num_nodes=each.num_devices // 8) for each in LAYOUTS]
    assert np.array_equal(seconds(layouts, replace(H100, levels=two)), seconds(layouts, H100))


def test_a_domain_counts_as_a_node_of_all_its_devices() -> None:
    as_node = resolve_cluster({"preset": "gb200", "devices_per_node": 64, "name": "racks"})[0]
    assert as_node.levels == ()
    layouts = [LAYOUTS[0], LAYOUTS[1], on_trays(tp=4, dp=2, ep=8)]
    assert seconds(layouts, GB200) == pytest.approx(seconds(layouts, as_node), rel=1e-12)


def test_a_group_has_the_slowest_level_that_it_spans() -> None:
    data = links_of(on_trays(dp=256), GB200).data
    assert data.near_bytes_per_s.tolist() == [720e9]
    assert float(data.bytes_per_s[0]) == pytest.approx(min(720e9, 50e9 * 64**CARDS_EXPONENT))
    assert data.latency_s.tolist() == [GB200.inter_node_latency_s]
    # Each of 256 devices is alone in a domain: with 64 ranks of tp between neighbours.
    alone = links_of(on_trays(tp=64, dp=4), GB200).data
    assert alone.bytes_per_s.tolist() == [50e9]


def test_a_rank_alone_on_its_node_is_not_bound_by_the_node() -> None:
    slow = {2: 1e11, 4: 720e9}
    trays = replace(GB200, intra_node_bandwidth_bytes_per_s=slow)
    alone = links_of(on_trays(tp=4, dp=16), trays).data
    assert alone.bytes_per_s.tolist() == [720e9]
    assert links_of(on_trays(tp=2, dp=32), trays).data.bytes_per_s.tolist() == [1e11]


def test_a_slower_domain_is_a_level_of_the_network() -> None:
    tray, domain, fabric = GB200.levels
    slow = replace(GB200, levels=(tray, replace(domain, bandwidth_bytes_per_s=1e11), fabric))
    assert slow.domain_devices == 4
    experts = links_of(on_trays(dp=64, ep=64), slow).expert
    assert not experts.inside.any()
    assert int(experts.here[0]) == 4
    sent, ranks = np.array([1e9]), np.array([64.0])
    assert experts.across_s(sent, ranks).tolist() == [1e9 * 60 / 1e11]
    wide = links_of(on_trays(dp=128, ep=128), slow).expert
    far = max(1e9 * 124 / 1e11, 1e9 * 64 / 50e9)
    assert wide.across_s(sent, np.array([128.0])).tolist() == [far]


def test_ranks_in_different_packages_take_their_level() -> None:
    layout = Layout(num_nodes=2, tp=2, tp_columns=4, dp=2)
    assert links_of(layout, FRONTIER).tensor.bytes_per_s.tolist() == [50e9]
    neighbours = links_of(Layout(num_nodes=2, tp=2, dp=8), FRONTIER).tensor
    assert neighbours.bytes_per_s.tolist() == [129e9]


def test_a_ring_over_groups_of_a_dragonfly_is_not_slowed() -> None:
    # 384 nodes of 8 are 3 groups; one device of each node: 128 in a group share what leaves it.
    wide = links_of(Layout(num_nodes=384, tp=8, dp=384), TAPERED).data
    assert wide.bytes_per_s.tolist() == [5e9]
    # One rank in each group: the rate of a device between groups.
    few = links_of(Layout(num_nodes=384, tp=8, pp=128, dp=3, rank_order="tp_cp_pp_dp"), TAPERED)
    assert few.data.bytes_per_s.tolist() == [2.85e9]


def test_the_mean_latency_counts_the_steps_that_leave_each_level() -> None:
    tray, domain, fabric = GB200.levels
    levels = (tray, replace(domain, latency_s=5e-6), fabric)
    data = links_of(on_trays(dp=128), replace(GB200, levels=levels)).data
    # 127 steps: 31 of them leave a tray, and one of these a domain.
    expected = (96 * 3.4e-6 + 30 * 5e-6 + 14e-6) / 127
    assert data.mean_latency_s(replace(GB200, levels=levels))[0] == pytest.approx(expected)


def test_a_pipeline_has_the_level_that_holds_all_of_it() -> None:
    rates = {2: 720e9, 16: 720e9, 64: 50e9}
    for pp, rate in rates.items():
        links = links_of(on_trays(tp=2, pp=pp), GB200)
        assert links.pipeline_bytes_per_s.tolist() == [rate]
        assert links.pipeline_inside.tolist() == [rate == 720e9]


def test_a_layout_is_estimated_among_others_as_alone() -> None:
    layouts = [
        on_trays(dp=dp, pp=pp, ep=ep) for dp in (128, 256, 384) for pp in (1, 3) for ep in (64, 128)
    ]
    together = seconds(layouts, GB200)
    for layout, row in zip(layouts, together, strict=True):
        assert seconds([layout], GB200)[0] == pytest.approx(row, rel=1e-12), layout.key
    across = together[:, TERM_NAMES.index("exchange_across")]
    assert (across[1::2] > 0).all()
    assert (across[::2] == 0).all()


def test_each_kind_of_traffic_has_a_level() -> None:
    layout = on_trays(tp=4, pp=4, dp=16, ep=64)
    expected = {"tray": ("tp",), "domain": ("ep", "dp"), "fabric": ("pp",)}
    assert traffic_by_level(layout, GB200) == expected
    assert traffic_by_level(Layout(), GB200) == dict.fromkeys(expected, ())
    columns = Layout(num_nodes=2, tp=2, tp_columns=2, pp=4)
    packages = {"pair": ("tp_columns",), "node": ("tp",), "group": ("pp",), "system": ()}
    assert traffic_by_level(columns, FRONTIER) == packages
