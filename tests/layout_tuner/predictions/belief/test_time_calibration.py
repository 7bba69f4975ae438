from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from layout_tuner.predictions.belief.corrected_step_time import TimeCalibration
from layout_tuner.predictions.belief.known_measurements import Sample
from layout_tuner.predictions.belief.known_residuals import known_residual
from layout_tuner.predictions.belief.residual import relative_coordinates
from layout_tuner.predictions.belief.time_evidence import Origin
from layout_tuner.predictions.estimates.step_time import PRIOR, TERM_NAMES, step_time_s
from layout_tuner.predictions.estimates.trainer_kernels import kernels_of
from layout_tuner.search_spaces.clusters.cluster_presets import CLUSTER_PRESETS
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.models.model_presets import model_preset
from layout_tuner.search_spaces.models.model_shape import ModelShape
from tests.kit.layouts import filled_layouts

A100 = CLUSTER_PRESETS["a100-sxm"]
SMALL = replace(model_preset("gpt-1.3b"), name="small")
LARGE = replace(SMALL, name="large", num_layers=48, hidden_size=6144, ffn_hidden_size=24576)
LAYOUTS = filled_layouts(
    16,
    global_batch=256,
    fixed={"num_nodes": 2, "precision": "bf16"},
    tp=(1, 2, 4, 8),
    pp=(1, 2),
    micro_batch_size=(1, 2, 4, 8),
    zero_stage=(0, 1),
)
COLUMNS = LayoutColumns.of_each(LAYOUTS)


@dataclass(frozen=True, kw_only=True)
class Truth:
    """A machine that follows the formula with factors of its own."""

    factors: dict[str, float]
    noise: float = 0.0

    def samples(self, model: ModelShape, layouts: Sequence[Layout]) -> list[Sample]:
        rng = np.random.default_rng(0)
        times_s = self.step_times_s(model, layouts)
        times_s *= np.exp(rng.normal(0, self.noise, len(layouts)))
        return [
            Sample(model=model, cluster=A100, layout=layout, state="completed", step_time_s=time_s)
            for layout, time_s in zip(layouts, times_s.tolist(), strict=True)
        ]

    def step_times_s(self, model: ModelShape, layouts: Sequence[Layout]) -> NDArray[np.float64]:
        factors = PRIOR * np.array([self.factors.get(name, 1.0) for name in TERM_NAMES])
        columns, kernels = LayoutColumns.of_each(layouts), kernels_of("", A100)
        return step_time_s(columns, model, A100, factors, kernels)


SLOW_LINKS = Truth(factors={"tensor_inside": 2.5, "matrices": 1.2, "data_across": 2.0}, noise=0.01)
COLD = TimeCalibration.fit()


def errors(
    calibration: TimeCalibration, truth: Truth, model: ModelShape, **asks: Any
) -> np.ndarray:
    """Relative errors over all layouts."""
    predicted, _ = calibration.predict(COLUMNS, model, A100, **asks)
    return np.abs(np.exp(predicted) / truth.step_times_s(model, LAYOUTS) - 1)


def test_without_samples_the_estimate_is_the_formula_s() -> None:
    mean, deviation = COLD.predict(LAYOUTS[0], SMALL, A100)
    formula_s = step_time_s(LAYOUTS[0], SMALL, A100, kernels=kernels_of("", A100))
    assert np.exp(mean) == pytest.approx(formula_s)
    assert 0.1 < deviation[0] < 1.0
    failed = Sample(model=SMALL, cluster=A100, layout=LAYOUTS[0], state="infeasible")
    assert COLD.updated([failed], campaign="mine") is COLD


def test_factors_that_made_the_samples_are_found_again() -> None:
    calibration = TimeCalibration.fit(SLOW_LINKS.samples(SMALL, LAYOUTS))
    factors = calibration.factors(SMALL, A100, num_devices=16, campaign="elsewhere")
    found = dict(zip(TERM_NAMES, factors.mean[:-1] + factors.mean[-1], strict=True))
    # Attention and the kernels' starts go with the matrices in these layouts: the sum is sure.
    assert np.exp(found["matrices"]) == pytest.approx(1.2, rel=0.2)
    assert np.exp(found["tensor_inside"]) == pytest.approx(2.5, rel=0.2)
    assert np.all(np.diag(factors.covariance) > 0)


def test_ten_samples_predict_the_other_layouts_in_narrow_intervals() -> None:
    few = TimeCalibration.fit(SLOW_LINKS.samples(SMALL, LAYOUTS[::6]))
    assert errors(COLD, SLOW_LINKS, SMALL).mean() > 0.15
    assert errors(few, SLOW_LINKS, SMALL).mean() < 0.05
    mean, deviation = few.predict(COLUMNS, SMALL, A100)
    assert deviation[7] < 0.5 * COLD.predict(LAYOUTS[7], SMALL, A100)[1][0]
    off = (np.log(SLOW_LINKS.step_times_s(SMALL, LAYOUTS)) - mean) / deviation
    assert np.mean(np.abs(off) < 2) > 0.9


def test_samples_of_the_same_campaign_weigh_most_and_of_another_model_less() -> None:
    known = TimeCalibration.fit(SLOW_LINKS.samples(SMALL, LAYOUTS[::2]))
    cold = errors(COLD, SLOW_LINKS, LARGE).mean()
    elsewhere = errors(known, SLOW_LINKS, LARGE).mean()
    assert elsewhere < 0.6 * cold
    two = SLOW_LINKS.samples(LARGE, [LAYOUTS[0], LAYOUTS[-1]])
    own = errors(known.updated(two, campaign="mine"), SLOW_LINKS, LARGE, campaign="mine").mean()
    assert own < elsewhere
    known = TimeCalibration.fit(Truth(factors={}).samples(SMALL, LAYOUTS[::6]))
    slow = Truth(factors=dict.fromkeys(TERM_NAMES, 1.3))
    told = known.updated(slow.samples(SMALL, LAYOUTS[::6]), campaign="mine")
    here = errors(told, slow, SMALL, campaign="mine").mean()
    there = errors(told, slow, SMALL, campaign="another").mean()
    assert here < 0.7 * there


def test_one_slow_run_changes_the_calibration_little() -> None:
    samples = SLOW_LINKS.samples(SMALL, LAYOUTS[::3])
    sick = replace(samples[4], step_time_s=30.0 * (samples[4].step_time_s or 0.0))
    healthy = TimeCalibration.fit(samples)
    bent = TimeCalibration.fit([*samples[:4], sick, *samples[5:]])
    assert errors(bent, SLOW_LINKS, SMALL).mean() < errors(healthy, SLOW_LINKS, SMALL).mean() + 0.05


def test_telling_one_by_one_comes_to_the_same_as_telling_at_once() -> None:
    samples = SLOW_LINKS.samples(SMALL, LAYOUTS[::12])
    step_by_step = COLD
    for sample in samples:
        step_by_step = step_by_step.updated([sample], campaign="mine")
    at_once = COLD.updated(samples, campaign="mine")
    one, other = (
        each.predict(COLUMNS, SMALL, A100, campaign="mine")[0] for each in (step_by_step, at_once)
    )
    assert one == pytest.approx(other, abs=0.02)


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=12), st.integers(0, len(LAYOUTS) - 1))
@settings(max_examples=25)
def test_whatever_was_measured_factors_are_positive_and_predictions_finite(
    times_s: list[float], first: int
) -> None:
    layouts = [LAYOUTS[(first + 5 * i) % len(LAYOUTS)] for i in range(len(times_s))]
    samples = [
        Sample(model=SMALL, cluster=A100, layout=layout, state="completed", step_time_s=time_s)
        for layout, time_s in zip(layouts, times_s, strict=True)
    ]
    calibration = TimeCalibration.fit(samples)
    factors = calibration.factors(SMALL, A100, num_devices=16)
    mean, deviation = calibration.predict(LAYOUTS[first], SMALL, A100)
    assert np.all(np.exp(factors.mean) > 0)
    assert np.all(np.linalg.eigvalsh(factors.covariance) > -1e-9)
    assert np.isfinite(mean[0])
    assert deviation[0] > 0


def test_a_warning_lists_what_is_asked_beyond_the_measurements() -> None:
    known = TimeCalibration.fit(SLOW_LINKS.samples(SMALL, [x for x in LAYOUTS if x.tp <= 2]))
    assert known.outside(LAYOUTS[0], SMALL, A100) is None
    asked = replace(LAYOUTS[0], tp=8, pp=2, dp=1, recompute="full", num_microbatches=32)
    warning = known.outside(asked, LARGE, A100)
    assert "tp 8, measured 1 to 2" in warning
    assert "recompute full, measured none" in warning
    assert "hidden_size 6144, measured 2048" in warning
    elsewhere = known.outside(LAYOUTS[0], SMALL, CLUSTER_PRESETS["frontier"], software="megatron")
    assert "not calibrated for megatron on frontier" in elsewhere


Floats = NDArray[np.float64]

DEEPER = replace(SMALL, name="deeper", num_layers=48)


def wave(layouts: Sequence[Layout]) -> Floats:
    """An error of the closed form that no factor expresses, the same for jobs of all sizes."""
    points = relative_coordinates(LayoutColumns.of_each(layouts))
    return np.asarray(0.2 * np.sin(points @ np.linspace(0.5, 1.5, points.shape[1])))


def wavy(model: ModelShape, layouts: Sequence[Layout], *, software: str = "") -> list[Sample]:
    samples = Truth(factors={}).samples(model, layouts)
    return [
        replace(each, step_time_s=(each.step_time_s or 0.0) * np.exp(off), software=software)
        for each, off in zip(samples, wave(layouts).tolist(), strict=True)
    ]


SOUND = wavy(SMALL, LAYOUTS)


def expected(samples: list[Sample], model: ModelShape, *, software: str = "") -> Floats:
    origin = Origin(
        cluster=A100.name, software=software, model=model, num_devices=16, campaign="this"
    )
    return known_residual(TimeCalibration.fit(samples), origin, COLUMNS)


def scatter(values: Floats) -> float:
    return float(np.abs(values - np.median(values)).mean())


def test_an_error_of_the_form_is_expected_of_a_deeper_model_too() -> None:
    calibrated, _ = TimeCalibration.fit(SOUND).predict(COLUMNS, DEEPER, A100)
    truth = np.log([each.step_time_s or 0.0 for each in wavy(DEEPER, LAYOUTS)])
    off = truth - calibrated
    assert scatter(off - expected(SOUND, DEEPER)) < 0.7 * scatter(off)


def test_the_expected_residual_is_of_the_same_software_and_shrinks_with_the_parameters() -> None:
    doublings = np.log2(LARGE.num_parameters / SMALL.num_parameters)
    shrunk = expected(SOUND, SMALL) * np.exp(-doublings / 4.0)
    np.testing.assert_allclose(expected(SOUND, LARGE), shrunk)
    others = wavy(SMALL, LAYOUTS, software="another")
    assert not expected(others, SMALL).any()
    assert expected(others, SMALL, software="another").any()
    assert not expected([], SMALL).any()


def test_a_slowed_run_hardly_teaches_the_residual() -> None:
    slowed = [replace(SOUND[0], step_time_s=3.0 * (SOUND[0].step_time_s or 0.0)), *SOUND[1:]]
    moved = np.abs(expected(slowed, SMALL) - expected(SOUND, SMALL))
    assert moved[0] < 0.1  # its own layout is judged by the others: the run was 1.1 too slow
    assert moved[1:].max() < 0.01


def test_equal_divisions_of_larger_jobs_have_the_same_coordinates() -> None:
    layout = LAYOUTS[5]
    larger = replace(layout, num_nodes=4, dp=2 * layout.dp)  # twice the devices and the batch
    longer = replace(layout, num_microbatches=4 * layout.num_microbatches)
    split = replace(layout, tp=2 * layout.tp, dp=layout.dp // 2)
    points = relative_coordinates(LayoutColumns.of_each([layout, larger, longer, split]))
    np.testing.assert_allclose(points[1:3], points[[0, 0]])
    assert np.abs(points[3] - points[0]).max() == 1.0
