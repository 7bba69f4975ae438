"""Simulated tables: whole, repeatable, and never taken for measured ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from search_spaces.estimates.time import step_time_s
from search_spaces.spec.space import SearchSpace
from search_spaces.tables import read_table, write_table
from workers.errors import ScenarioUnknownError
from workers.simulation.scenarios import SCENARIOS, Scenario, scenario, simulated_table


def small(name: str = "a100-1.3b", **knobs: object) -> Scenario:
    """A scenario cut down to some dozen layouts."""
    described = scenario(name)
    changes = {"vpp": 1, "micro_batch_size": [1, 4], "sequence_parallel": False, **knobs}
    space = SearchSpace.from_mapping(described.space.to_mapping() | changes)
    return replace(described, space=space)


@pytest.mark.parametrize(
    ("knob", "values"),
    [
        ("zero_stage", [2, 3]),
        ("cp", [2]),
        ("tp_columns", [2]),
        ("schedule", ["gpipe", "zero_bubble"]),
        ("rank_order", ["tp_cp_pp_dp"]),
    ],
)
def test_a_space_of_any_knob_has_a_table(knob: str, values: list[object]) -> None:
    rows = simulated_table(small(**{knob: values, "pp": [2, 4]}), 3).rows
    assert {getattr(row.layout, knob) for row in rows} == set(values)
    assert any(row.status == "completed" for row in rows)


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
