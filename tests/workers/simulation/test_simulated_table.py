"""Simulated tables: whole and repeatable; the stress landscape is as hard as it says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from layout_tuner.predictions.estimates.step_time import step_time_s, time_terms
from layout_tuner.search_spaces.layouts.layout import LAYOUT_FIELDS
from layout_tuner.search_spaces.spaces.search_space import SearchSpace
from layout_tuner.search_spaces.tables import read_table, write_table
from layout_tuner.workers.errors import ScenarioUnknownError
from layout_tuner.workers.simulation.machine import STRESS, Machine
from layout_tuner.workers.simulation.scenarios import SCENARIOS, Scenario, scenario, simulated_table
from layout_tuner.workers.simulation.stress import (
    DISTORTION,
    MEMORY_ERROR,
    distortion,
    memory_error,
    smooth_field,
)


def small(name: str = "a100-1.3b", **knobs: object) -> Scenario:
    """A scenario cut down to some dozen layouts."""
    described = scenario(name)
    changes = {"vpp": 1, "micro_batch_size": [1, 4], "sequence_parallel": False, **knobs}
    space = SearchSpace.from_mapping(described.space.to_mapping() | changes)
    return replace(described, space=space)


@pytest.mark.parametrize("name", ["a100-1.3b", "stress-22b"])
def test_equal_seeds_give_equal_tables_and_others_do_not(name: str) -> None:
    few = small(name, pp=[1, 4])
    table = simulated_table(few, 3)
    assert table == simulated_table(few, 3)
    assert table != simulated_table(few, 4)


def test_a_table_holds_every_legal_layout_and_reads_back_as_it_was_written() -> None:
    described = small()
    table = simulated_table(described, 5)
    assert [cell.key.source for cell in table.cells] == ["simulated a100-1.3b, seed 5"]
    assert "simulated" in table.notes[0]
    assert len(table.rows) == len(described.legal_set()) > 20
    read = read_table(write_table(table))
    for found, written in zip(read.rows, table.rows, strict=True):
        assert (found.layout, found.status) == (written.layout, written.status)
        assert found.peak_memory_bytes == written.peak_memory_bytes
    assert [cell.key.source for cell in read.cells] == [cell.key.source for cell in table.cells]


def test_layouts_over_the_memory_fail_and_the_times_of_the_others_are_not_the_estimates() -> None:
    """Another generator than the closed form: close enough to be a cluster, too far to be it."""
    described = small("h100-8b", vpp=[1, 2])
    legal = described.legal_set()
    rows = simulated_table(described, 1).rows
    assert {row.status for row in rows} == {"completed", "out_of_memory"}
    peaks = [row.peak_memory_bytes for row in rows if row.peak_memory_bytes is not None]
    assert max(peaks) <= described.cluster.device_memory_bytes
    estimates = step_time_s(legal.columns(), described.model, described.cluster)
    times = np.array([row.step_time_s or np.nan for row in rows])
    off = np.log(times / estimates)[~np.isnan(times)]
    assert 0.05 < np.std(off) < 0.5


def test_an_unknown_scenario_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ScenarioUnknownError, match="unknown scenario 'stress'"):
        simulated_table("stress", 0)
    assert set(SCENARIOS) >= {"stress-22b", "frontier-22b"}


def test_a_step_of_the_large_job_takes_minutes_and_most_layouts_do_not_fit() -> None:
    (cell,) = simulated_table(small("frontier-175b"), 0).cells
    steps = [row.step_time_s for row in cell.merged if row.step_time_s is not None]
    # At the peak of 128 devices (191.5 TFLOP/s) with full recomputation no step could be shorter.
    tokens = 1280 * 2048
    least_s = tokens * cell.model.hardware_flops_per_token("full") / (128 * 191.5e12)
    assert 60 < least_s < min(steps) < 10 * least_s
    assert len(steps) < len(cell.merged) / 2
    assert {row.layout.num_microbatches for row in cell.merged if row.layout.dp == 2} >= {640}


SCENARIO = scenario("stress-22b")
COLUMNS = SCENARIO.legal_set().columns()


@pytest.mark.slow
def test_most_layouts_fail_and_almost_none_of_the_rest_is_good() -> None:
    assert 6000 < len(SCENARIO.legal_set()) < 7000
    # The half with ZeRO 1 is as hard, and takes less time.
    space = SearchSpace.from_mapping(SCENARIO.space.to_mapping() | {"zero_stage": 1})
    rows = simulated_table(replace(SCENARIO, space=space), 0).rows
    times = np.array([row.step_time_s for row in rows if row.step_time_s is not None])
    near = int(np.sum(times <= times.min() / 0.95))
    assert 0.4 < 1 - len(times) / len(rows) < 0.9
    # Random search draws (n + 1) / (near + 1) rows on average until it meets a near one.
    assert (len(rows) + 1) / (near + 1) > 100


def test_every_constant_of_a_stressed_machine_is_far_off() -> None:
    usual = Machine.of(SCENARIO.cluster)
    for seed in range(5):
        stressed = usual.stressed(np.random.default_rng(seed))
        for off in (
            stressed.device.attention_share / usual.device.attention_share,
            stressed.device.bytes_per_s / usual.device.bytes_per_s,
            stressed.collectives.speed,
            stressed.collectives.near_speed,
            stressed.host_s / usual.host_s,
        ):
            assert STRESS[0] <= abs(off - 1) <= STRESS[1]


def test_no_weighting_of_the_estimates_terms_expresses_the_distortion() -> None:
    seconds = time_terms(COLUMNS, SCENARIO.model, SCENARIO.cluster).seconds
    terms = seconds[:, seconds.max(axis=0) > 0]
    for seed in range(3):
        truth = terms.sum(axis=1) * distortion(COLUMNS, np.random.default_rng(seed))
        # Relative errors of the best weighting that there is, even with negative weights.
        scaled = terms / truth[:, None]
        fitted = scaled @ np.linalg.lstsq(scaled, np.ones(len(truth)), rcond=None)[0]
        assert np.std(fitted) > 0.4 * DISTORTION


def test_memory_is_off_one_way_or_the_other() -> None:
    drawn = [memory_error(np.random.default_rng(seed)) for seed in range(8)]
    assert all(MEMORY_ERROR[0] <= abs(each - 1) <= MEMORY_ERROR[1] for each in drawn)
    assert min(drawn) < 1 < max(drawn)


def test_the_distortion_is_standardised_and_neighbours_have_nearly_the_same() -> None:
    field = smooth_field(COLUMNS, np.random.default_rng(3))
    assert np.mean(field) == pytest.approx(0, abs=1e-9)
    assert np.std(field) == pytest.approx(1)
    knobs = np.stack([getattr(COLUMNS, name) for name in LAYOUT_FIELDS], axis=1)
    one_step = np.abs(np.diff(knobs, axis=0)).sum(axis=1) == 1
    assert one_step.sum() > 1000
    assert np.std(np.diff(field)[one_step]) < 0.5
