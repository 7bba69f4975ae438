"""What measurements teach about the layouts that were not measured."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from layout_tuner.predictions.belief.corrected_step_time import TimeCalibration
from layout_tuner.predictions.belief.residual import ResidualKernel, knob_coordinates, similarity
from layout_tuner.predictions.belief.slow_runs import (
    MEAN_EXCESS,
    SLOW_SHARE,
    run_weights,
    sound_probability,
)
from layout_tuner.predictions.belief.step_belief import MeasuredParts, StepBelief, StepModel, joined
from layout_tuner.predictions.estimates.step_time import PRIOR, TERM_NAMES, time_terms
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.tuner.strategies.predictions import factors_prior
from tests.tuner.search_problems import make_problem
from tests.tuner.strategies.test_strategies import make_layouts

Floats = NDArray[np.float64]


PROBLEM = make_problem(make_layouts(devices=32, micro_batch_sizes=(1, 2, 4)))
COLUMNS = PROBLEM.layouts.columns()
PRIOR_OF_FACTORS = factors_prior(PROBLEM, TimeCalibration())
EVERY = np.arange(len(PROBLEM.layouts))


def make_model(columns: LayoutColumns) -> StepModel:
    terms = time_terms(columns, PROBLEM.model, PROBLEM.cluster)
    points = knob_coordinates(columns)
    return StepModel(terms=terms, points=points, residual=np.zeros(len(points)))


MODEL = make_model(COLUMNS)
HALVED = make_model(replace(COLUMNS, num_microbatches=np.maximum(COLUMNS.num_microbatches // 2, 1)))
"""The closed form of all layouts with half of their micro-batches."""


def believe(truth_s: Floats, rows: NDArray[np.int64]) -> StepBelief:
    return StepBelief(MODEL, PRIOR_OF_FACTORS, rows, np.log(truth_s[rows]))


def errors(belief: StepBelief, truth_s: Floats) -> Floats:
    """Errors of the prediction: the logarithm of measured over predicted, less its median."""
    off = np.log(truth_s) - belief.marginals(EVERY)[0]
    return np.abs(off - np.median(off))


def some_rows(count: int) -> NDArray[np.int64]:
    return np.random.default_rng(3).choice(len(PROBLEM.layouts), count, replace=False)


def test_predictions_agree_with_measurements_and_without_any_with_the_closed_form() -> None:
    belief = believe(np.ones(len(EVERY)), np.empty(0, dtype=np.int64))
    np.testing.assert_allclose(np.exp(belief.marginals(EVERY)[0]), MODEL.terms.step_time_s(PRIOR))
    truth_s = MODEL.terms.step_time_s() * 1.7
    rows = some_rows(12)
    belief = believe(truth_s, rows)
    mean, deviation = belief.marginals(rows)
    np.testing.assert_allclose(mean, np.log(truth_s[rows]), atol=0.05)
    _, elsewhere = belief.marginals(np.setdiff1d(EVERY, rows))
    assert deviation.mean() < elsewhere.mean()


def test_one_slow_tensor_parallel_layout_makes_all_of_them_slower() -> None:
    factors = PRIOR.copy()
    factors[TERM_NAMES.index("tensor_inside")] *= 4.0
    truth_s = MODEL.terms.step_time_s(factors)
    heavy = np.flatnonzero(COLUMNS.tp == 8)
    light = np.flatnonzero(COLUMNS.tp == 1)
    before = believe(truth_s, light[:1])
    after = believe(truth_s, np.array([light[0], heavy[0]]))
    assert COLUMNS.pp[heavy[-1]] != COLUMNS.pp[heavy[0]]
    asked = np.array([heavy[-1], light[-1]])
    moved_heavy, moved_light = after.marginals(asked)[0] - before.marginals(asked)[0]
    assert moved_heavy > 0.08
    assert moved_heavy > 1.5 * abs(moved_light)


def test_a_wrong_form_is_learnt_by_the_residual() -> None:
    points = knob_coordinates(COLUMNS)
    wave = 0.3 * np.sin(points @ np.linspace(0.3, 0.8, points.shape[1]))
    truth_s = MODEL.terms.step_time_s() * np.exp(wave)
    measured = some_rows(40)
    unseen = np.setdiff1d(EVERY, measured)
    before = errors(believe(truth_s, measured[:0]), truth_s)[unseen].mean()
    after = errors(believe(truth_s, measured), truth_s)[unseen].mean()
    assert after < 0.5 * before


def test_draws_scatter_about_the_mean_as_widely_as_is_believed() -> None:
    belief = believe(MODEL.terms.step_time_s(), some_rows(10))
    rows = EVERY[::7]
    draws = belief.draws(rows, 2000, np.random.default_rng(0))
    mean, deviation = belief.marginals(rows)
    np.testing.assert_allclose(draws.mean(axis=0), mean, atol=0.15)
    assert (draws.std(axis=0) <= 1.3 * deviation + 0.02).all()
    assert (draws.std(axis=0) > 0).all()


def test_one_wild_measurement_does_not_break_the_fit() -> None:
    truth_s = MODEL.terms.step_time_s()
    rows = some_rows(15)
    told_s = truth_s.copy()
    told_s[rows[4]] *= 40.0
    mean, _ = believe(told_s, rows).marginals(EVERY)
    off = np.abs(np.log(truth_s) - mean)
    assert np.median(off) < 0.3
    assert np.delete(off[rows], 4).max() < 0.1, "the other measurements are still believed"


def test_similarity_is_one_at_distance_zero_and_decreases() -> None:
    points = np.array([[0.0, 0.0], [1.0, 0.0], [9.0, 0.0]])
    alike = similarity(points, points, 2.0)
    np.testing.assert_allclose(np.diagonal(alike), 1.0)
    assert 1.0 > alike[0, 1] > 0.5 > alike[0, 2]
    kernel = ResidualKernel(amplitude=0.5, length=2.0, noise=0.1)
    np.testing.assert_allclose(np.diagonal(kernel.of_measured(points, np.ones(3))), 0.26)


def in_part(rows: NDArray[np.int64]) -> MeasuredParts:
    """Cheap probes of some layouts: off by 2 % each, and by 5 % all alike."""
    model = replace(MODEL.rows(rows), terms=HALVED.rows(rows).terms)
    return MeasuredParts(model=model, errors=np.diag(np.full(len(rows), 0.02**2)) + 0.05**2)


def test_a_part_of_a_layout_tells_its_whole_step() -> None:
    factors = PRIOR * np.exp(np.random.default_rng(5).normal(0.0, 0.3, len(PRIOR)))
    rows = some_rows(12)
    log_part, log_whole = (
        np.log(each.terms.step_time_s(factors))[rows] for each in (HALVED, MODEL)
    )
    mean, spread = StepBelief(MODEL, PRIOR_OF_FACTORS, rows, log_part, in_part(rows)).marginals(
        rows
    )
    assert np.abs(log_whole - mean).max() < 0.08
    assert spread.max() < 0.12


def test_what_all_parts_have_in_common_is_learnt_from_one_whole_layout() -> None:
    rows = some_rows(12)
    log_part, log_whole = (np.log(each.terms.step_time_s(PRIOR))[rows] for each in (HALVED, MODEL))
    log_whole = log_whole + 0.1
    parts = in_part(rows)
    before = StepBelief(MODEL, PRIOR_OF_FACTORS, rows, log_part, parts)
    errors = np.pad(parts.errors, ((1, 0), (1, 0)))
    both = MeasuredParts(model=joined([MODEL.rows(rows[:1]), parts.model]), errors=errors)
    after = StepBelief(
        MODEL, PRIOR_OF_FACTORS, np.r_[rows[:1], rows], np.r_[log_whole[:1], log_part], both
    )
    missed_before, missed_after = (
        np.abs(belief.marginals(rows[1:])[0] - log_whole[1:]).mean() for belief in (before, after)
    )
    assert missed_after < 0.7 * missed_before


def test_the_probability_is_that_of_the_mixture() -> None:
    """Counted in a sample of the mixture itself."""
    rng = np.random.default_rng(0)
    count = 1_000_000
    is_slow = rng.random(count) < SLOW_SHARE
    off = np.where(is_slow, rng.exponential(MEAN_EXCESS, count), rng.normal(0.0, 0.1, count))
    for low, high in ((0.02, 0.04), (0.15, 0.17), (0.24, 0.26)):
        counted = 1.0 - is_slow[(off > low) & (off < high)].mean()
        stated = float(sound_probability(np.array([(low + high) / 2]), 0.1)[0])
        assert stated == pytest.approx(counted, abs=0.02)


def test_a_far_slower_run_hardly_counts_and_a_faster_one_was_not_slowed_down() -> None:
    assert sound_probability(np.array([-9.0, -0.1]), 0.1).tolist() == [1.0, 1.0]
    weights = run_weights(np.array([-9.0, -0.1]), 0.1)
    assert weights[0] < 0.01 < 0.9 < weights[1], "but it may be an outlier of another kind"
    with np.errstate(all="raise", under="ignore"):
        weights = run_weights(np.array([0.0, 0.2, 1.0, 50.0, 1e6]), np.full(5, 0.02))
    assert np.all(np.diff(weights) <= 0)
    assert weights[0] > 0.9
    assert 0.0 < weights[-1] <= weights[2] < 1e-3
