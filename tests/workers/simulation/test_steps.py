"""A simulated step beyond the pipeline: gradient sums, stragglers, memory, devices and links."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from search_spaces.spec.layout import Layout
from search_spaces.spec.presets.clusters import CLUSTER_PRESETS
from search_spaces.spec.presets.models import model_preset
from workers.simulation.machine import GroupPlace, Machine
from workers.simulation.memory import peak_memory_bytes
from workers.simulation.pipeline import Schedule, Timeline, walk
from workers.simulation.steps import after_reduction, stage_slowness, step_times_s

MODEL = model_preset("gpt-1.3b")
CLUSTER = CLUSTER_PRESETS["a100-sxm"]


def make_machine(num_devices: int = 8, **changes: Any) -> Machine:
    """A machine of equal devices, without noise."""
    machine = Machine.draw(CLUSTER, num_devices, np.random.default_rng(0))
    return replace(machine, **({"slowness": np.ones(num_devices), "noise": 0.0} | changes))


def two_stages() -> Timeline:
    """Stage 0 backward last from 7 to 9, stage 1 from 5 to 7."""
    return walk(
        Schedule(pp=2, vpp=1, num_microbatches=2),
        forward_SN=np.ones((2, 1)),
        backward_SN=np.full((2, 1), 2.0),
        hop_RN=np.zeros((2, 1)),
    )


@pytest.mark.parametrize(
    ("sums_s", "overlaps", "interference", "ends_s"),
    [
        pytest.param((3.0, 4.0), False, 0.5, (9.0 + 3.0, 7.0 + 4.0), id="on-top-without-overlap"),
        # Four buckets of 0.25 s become ready every 0.5 s of the last pass: the last one is left.
        pytest.param((1.0, 1.0), True, 0.0, (9.25, 7.25), id="all-but-the-last-bucket-hides"),
        pytest.param((8.0, 8.0), True, 0.0, (15.5, 13.5), id="longer-ones-begin-with-a-quarter"),
        # Three buckets of 0.25 s run beside the pass.
        pytest.param((1.0, 1.0), True, 0.2, (9.4, 7.4), id="beside-a-pass-they-hold-it-up"),
    ],
)
def test_sums_of_gradients_overlap_the_last_pass_as_counted_by_hand(
    sums_s: tuple[float, float], overlaps: bool, interference: float, ends_s: tuple[float, float]
) -> None:
    options: dict[str, Any] = {"pp": 2, "overlaps": overlaps, "interference": interference}
    ends = after_reduction(two_stages(), np.array([sums_s]).T, **options)
    assert ends[:, 0].tolist() == pytest.approx(ends_s)


def test_one_slow_device_holds_up_the_whole_job() -> None:
    layouts = [Layout(tp=2, pp=2, dp=2, num_microbatches=8, precision="bf16")]
    slowness = np.ones(8)
    slowness[5] = 1.3
    even = step_times_s(layouts, MODEL, make_machine())
    slow = step_times_s(layouts, MODEL, make_machine(slowness=slowness))
    assert 1.1 < slow[0] / even[0] < 1.3


def test_the_slowest_pipeline_is_the_one_with_the_slowest_device() -> None:
    slowness = np.ones(8)
    slowness[[1, 6]] = 1.1, 1.4
    # Ranks: tp fastest, then dp, then pp. Device 6 is stage 1, replica 1, tp rank 0.
    layout = Layout(tp=2, pp=2, dp=2)
    assert stage_slowness(layout, make_machine(slowness=slowness)).tolist() == [1.0, 1.4]


def test_more_microbatches_in_a_pipeline_shrink_its_bubble() -> None:
    machine = make_machine()
    few, many = (
        Layout(pp=8, num_microbatches=m, micro_batch_size=64 // m, precision="bf16")
        for m in (8, 32)
    )
    seconds = step_times_s([few, many], MODEL, machine)
    assert seconds[1] < 0.8 * seconds[0]


def test_recomputation_costs_about_a_forward_pass_and_frees_most_of_the_activations() -> None:
    machine = make_machine()
    kept = Layout(dp=8, micro_batch_size=8, num_microbatches=4, precision="bf16")
    again = replace(kept, recompute="full")
    seconds = step_times_s([kept, again], MODEL, machine)
    assert 1.2 < seconds[1] / seconds[0] < 1.45
    peaks = [peak_memory_bytes(each, MODEL, machine, seed=0) for each in (kept, again)]
    assert peaks[1] < 0.75 * peaks[0]


def test_memory_grows_with_what_is_in_flight_and_shrinks_with_zero() -> None:
    machine = make_machine(fragmentation=0.0)
    # Few words: the logits of the last stage shall not be the peak.
    model = replace(MODEL, vocab_size=128)

    def peak(**knobs: Any) -> float:
        layout = Layout(precision="bf16", micro_batch_size=4, **knobs)
        return peak_memory_bytes(layout, model, machine, seed=0)

    one, full = peak(pp=4, num_microbatches=1), peak(pp=4, num_microbatches=4)
    assert peak(pp=4, num_microbatches=2) - one == pytest.approx((full - one) / 3, rel=0.01)
    assert peak(pp=4, num_microbatches=64) == full
    assert peak(dp=8, zero_stage=1) < peak(dp=8) - 8 * model.num_parameters


def test_products_of_an_unlucky_shape_leave_units_idle() -> None:
    device = replace(make_machine().device, num_units=108)

    def flops_per_s(tiles: int) -> float:
        rows, columns, inner = 128 * tiles, 128 * 9, 8192
        seconds = device.matmul_s(rows, columns, inner, precision="bf16")
        return 2.0 * rows * columns * inner / seconds

    # 12 times 9 tiles fill one wave; 13 times 9 take a second one for nine of them.
    assert flops_per_s(13) < 0.6 * flops_per_s(12)
    assert flops_per_s(24) == pytest.approx(flops_per_s(12), rel=0.05)


def test_groups_that_share_a_nodes_way_out_each_get_a_share_of_it() -> None:
    network = replace(make_machine().network, congestion=0.0, half_speed_bytes=1.0)
    size = 1e9
    whole_node = network.all_reduce_s(GroupPlace(size=16, stride=1), size)
    one_of_eight = network.all_reduce_s(GroupPlace(size=16, stride=8), size)
    assert one_of_eight > 4 * whole_node
    inside = network.all_reduce_s(GroupPlace(size=8, stride=1), size)
    assert inside < 0.9 * whole_node
    assert network.all_reduce_s(GroupPlace(size=1, stride=1), size) == 0.0
