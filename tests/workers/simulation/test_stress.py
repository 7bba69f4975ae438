"""The stress landscape: as hard as it says, and out of the estimates' reach."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from search_spaces.estimates.time import time_terms
from search_spaces.spec.layout import LAYOUT_FIELDS
from search_spaces.spec.space import SearchSpace
from workers.simulation.machine import STRESS, Machine
from workers.simulation.scenarios import scenario, simulated_table
from workers.simulation.stress import (
    DISTORTION,
    MEMORY_ERROR,
    distortion,
    memory_error,
    smooth_field,
)

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
