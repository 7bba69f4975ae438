"""Seconds of simulated collectives on networks of levels."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import pytest

from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.clusters.cluster_presets import CLUSTER_PRESETS, resolve_cluster
from layout_tuner.search_spaces.clusters.network_levels import NetworkLevel
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_presets import model_preset
from layout_tuner.workers.simulation.collectives import Collectives
from layout_tuner.workers.simulation.fabrics import fabric
from layout_tuner.workers.simulation.machine import Machine
from layout_tuner.workers.simulation.placement import Placement
from layout_tuner.workers.simulation.steps import steps

GB200: Final = CLUSTER_PRESETS["gb200"]
FRONTIER: Final = CLUSTER_PRESETS["frontier"]
TAPERED: Final = replace(
    FRONTIER,
    levels=(*FRONTIER.levels[:-1], NetworkLevel(name="system", bandwidth_bytes_per_s=2.85e9)),
)
MIXTURE: Final = model_preset("qwen3-30b-a3b")
SIZE: Final = 1e10


def step_s(layout: Layout, cluster: Cluster) -> float:
    return steps([layout], MIXTURE, Machine.of(cluster))[0].step_s


def test_a_domain_is_simulated_as_a_node_of_its_devices() -> None:
    knobs = {"dp": 128, "ep": 64, "num_microbatches": 4, "precision": "bf16"}
    whole = resolve_cluster({"preset": "gb200", "devices_per_node": 64, "name": "racks"})[0]
    trays = step_s(Layout(num_nodes=32, **knobs), GB200)
    assert trays == pytest.approx(step_s(Layout(num_nodes=2, **knobs), whole), rel=1e-9)
    assert trays < step_s(Layout(num_nodes=32, **knobs), replace(GB200, levels=()))


def test_an_exchange_over_domains_has_the_cards_of_the_devices_there() -> None:
    place = Placement.on(Layout(num_nodes=32, dp=128, ep=128), GB200).place("ep")
    network = replace(fabric(GB200), start_s=0.0)
    latency_s = network.far_gather.latencies_s[0]
    expected = 64 * (SIZE / 128) / 50e9 + latency_s
    assert Collectives(fabric=network).exchange_s(place, SIZE) == pytest.approx(expected)


def test_messages_between_groups_of_a_dragonfly_take_their_share() -> None:
    one, between = Collectives(fabric=fabric(TAPERED)), fabric(TAPERED).outer[0].bytes_per_s
    assert between / (one.fabric.far_gather.bytes_per_s / 8) == pytest.approx(0.57)
    near, far = (one.hop_s(1, levels=levels, size_bytes=SIZE) for levels in (1, 2))
    assert far - near == pytest.approx(
        SIZE / between - 4 * SIZE / one.fabric.far_gather.bytes_per_s
    )
    layout = Layout(num_nodes=384, tp=8, pp=128, dp=3, rank_order="tp_cp_pp_dp")
    place = Placement.on(layout, TAPERED).place("data")
    assert one.bandwidth(place, one.fabric.far_gather) == pytest.approx(between)


def test_slower_levels_add_their_latency_to_each_step_between_units() -> None:
    pair, node, group, system = FRONTIER.levels
    far = replace(FRONTIER, levels=(pair, node, group, replace(system, latency_s=34e-6)))
    place = Placement.on(Layout(num_nodes=384, tp=8, dp=384), far).place("data")
    slow, usual = (Collectives(fabric=fabric(each)) for each in (far, FRONTIER))
    assert slow.gather_s(place, SIZE) - usual.gather_s(place, SIZE) == pytest.approx(2 * 20e-6)
    later = [each.hop_s(1, levels=2, size_bytes=8.0) for each in (slow, usual)]
    assert later[0] - later[1] == pytest.approx(20e-6)


def test_ranks_of_different_packages_have_the_rate_between_packages() -> None:
    placement = Placement.on(Layout(num_nodes=1, tp=2, tp_columns=4), FRONTIER)
    one = Collectives(fabric=fabric(FRONTIER))
    assert one.bandwidth(placement.place("tp"), one.fabric.near_gather) == 50e9
    assert one.bandwidth(placement.place("tp_columns"), one.fabric.near_gather) == 52e9


def test_an_exchange_between_groups_takes_the_slowest_level() -> None:
    pair, node, group, system = TAPERED.levels
    far = replace(TAPERED, levels=(pair, node, group, replace(system, latency_s=34e-6)))
    place = Placement.on(Layout(num_nodes=384, tp=8, dp=384), TAPERED).place("data")
    slow, usual = (Collectives(fabric=fabric(each)) for each in (far, TAPERED))
    between, steps_s = usual.fabric.outer[0].bytes_per_s, usual.fabric.far_gather.latencies_s[0]
    # 256 of 384 ranks are in other groups; 383 messages leave the node.
    expected = usual.fabric.start_s + 256 * (SIZE / 384) / between + 383 * steps_s
    assert usual.exchange_s(place, SIZE) == pytest.approx(expected)
    assert slow.exchange_s(place, SIZE) - usual.exchange_s(place, SIZE) == pytest.approx(2 * 20e-6)


def test_steps_inside_a_domain_have_its_latency() -> None:
    tray, domain, fabric_level = GB200.levels
    slow = replace(GB200, levels=(tray, replace(domain, latency_s=13.4e-6), fabric_level))
    place = Placement.on(Layout(num_nodes=16, dp=64), GB200).place("data")
    later, usual = (
        Collectives(fabric=fabric(each)).gather_s(place, SIZE) for each in (slow, GB200)
    )
    assert later - usual == pytest.approx(63 * 10e-6)


def test_layouts_of_other_places_in_domains_share_no_blocks() -> None:
    machine = Machine.of(GB200)
    both = [Layout(num_nodes=32 * dp, tp=4, cp=32, dp=dp, sequence_parallel=True) for dp in (1, 9)]
    alone = [steps([each], MIXTURE, machine)[0] for each in both]
    assert [each.parts_s for each in steps(both, MIXTURE, machine)] == [e.parts_s for e in alone]
    assert alone[0].parts_s["cp_s"] != alone[1].parts_s["cp_s"]
