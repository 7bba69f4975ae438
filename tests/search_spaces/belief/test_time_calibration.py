from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from search_spaces.belief.known_measurements import Sample
from search_spaces.belief.time import TimeCalibration
from search_spaces.estimates.storage import score_traffic_of
from search_spaces.estimates.time import PRIOR, TERM_NAMES, step_time_s
from search_spaces.spec.cluster import Cluster
from search_spaces.spec.layout import Layout
from search_spaces.spec.model_shape import ModelShape
from search_spaces.spec.presets.clusters import CLUSTER_PRESETS
from tests.kit.layouts import filled_layouts

A100 = CLUSTER_PRESETS["a100-sxm"]
SMALL = ModelShape(
    name="small",
    family="gpt",
    num_layers=24,
    hidden_size=2048,
    ffn_hidden_size=8192,
    num_heads=16,
    num_kv_heads=16,
    seq_length=2048,
    vocab_size=51200,
    tied_embeddings=True,
)
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


@dataclass(frozen=True, kw_only=True)
class Truth:
    """A machine that follows the formula with factors of its own."""

    factors: dict[str, float]
    noise: float = 0.0
    seed: int = 0

    def samples(
        self, model: ModelShape, layouts: Iterable[Layout], *, cluster: Cluster = A100
    ) -> list[Sample]:
        rng = np.random.default_rng(self.seed)
        return [
            Sample(
                model=model,
                cluster=cluster,
                layout=layout,
                state="completed",
                step_time_s=self.step_time_s(model, layout)
                * float(np.exp(rng.normal(0, self.noise))),
            )
            for layout in layouts
        ]

    def step_time_s(self, model: ModelShape, layout: Layout) -> float:
        factors = PRIOR * np.array([self.factors.get(name, 1.0) for name in TERM_NAMES])
        return float(step_time_s(layout, model, A100, factors)[0])


SLOW_LINKS = Truth(factors={"tensor_inside": 2.5, "matrices": 1.2, "data_across": 2.0}, noise=0.01)


def errors(
    calibration: TimeCalibration, truth: Truth, model: ModelShape, **asks: Any
) -> np.ndarray:
    """Relative errors over all layouts."""
    predicted = [calibration.predict(layout, model, A100, **asks)[0][0] for layout in LAYOUTS]
    true = [truth.step_time_s(model, layout) for layout in LAYOUTS]
    return np.abs(np.exp(predicted) / np.array(true) - 1)


def test_without_samples_the_estimate_is_the_formula_s() -> None:
    mean, deviation = TimeCalibration.fit().predict(LAYOUTS[0], SMALL, A100)
    assert np.exp(mean) == pytest.approx(
        step_time_s(LAYOUTS[0], SMALL, A100, score_traffic=score_traffic_of("", A100))
    )
    assert 0.1 < deviation[0] < 1.0


def test_factors_that_made_the_samples_are_found_again() -> None:
    calibration = TimeCalibration.fit(SLOW_LINKS.samples(SMALL, LAYOUTS))
    factors = calibration.factors(SMALL, A100, num_devices=16, campaign="elsewhere")
    found = dict(zip(TERM_NAMES, factors.mean[:-1] + factors.mean[-1], strict=True))
    # Attention and the kernels' starts go with the matrices in these layouts: the sum is sure.
    assert np.exp(found["matrices"]) == pytest.approx(1.2, rel=0.2)
    assert np.exp(found["tensor_inside"]) == pytest.approx(2.5, rel=0.2)
    assert np.all(np.diag(factors.covariance) > 0)


def test_ten_samples_predict_the_other_layouts() -> None:
    cold = errors(TimeCalibration.fit(), SLOW_LINKS, SMALL)
    few = TimeCalibration.fit(SLOW_LINKS.samples(SMALL, LAYOUTS[::6]))
    warm = errors(few, SLOW_LINKS, SMALL)
    assert cold.mean() > 0.15
    assert warm.mean() < 0.05


def test_another_model_s_samples_are_worth_most_of_its_own() -> None:
    known = TimeCalibration.fit(SLOW_LINKS.samples(SMALL, LAYOUTS))
    cold = errors(TimeCalibration.fit(), SLOW_LINKS, LARGE).mean()
    elsewhere = errors(known, SLOW_LINKS, LARGE).mean()
    assert elsewhere < 0.6 * cold
    two = SLOW_LINKS.samples(LARGE, [LAYOUTS[0], LAYOUTS[-1]])
    own = errors(known.told(two, campaign="mine"), SLOW_LINKS, LARGE, campaign="mine").mean()
    assert own < elsewhere


def test_a_campaign_weighs_its_own_samples_most() -> None:
    known = TimeCalibration.fit(Truth(factors={}).samples(SMALL, LAYOUTS[::6]))
    slow = Truth(factors=dict.fromkeys(TERM_NAMES, 1.3))
    told = known.told(slow.samples(SMALL, LAYOUTS[::6]), campaign="mine")
    here = errors(told, slow, SMALL, campaign="mine").mean()
    there = errors(told, slow, SMALL, campaign="another").mean()
    assert here < 0.7 * there


def test_one_slow_run_changes_the_calibration_little() -> None:
    samples = SLOW_LINKS.samples(SMALL, LAYOUTS[::3])
    sick = replace(samples[4], step_time_s=30.0 * (samples[4].step_time_s or 0.0))
    healthy = TimeCalibration.fit(samples)
    bent = TimeCalibration.fit([*samples[:4], sick, *samples[5:]])
    assert errors(bent, SLOW_LINKS, SMALL).mean() < errors(healthy, SLOW_LINKS, SMALL).mean() + 0.05


def test_samples_narrow_the_spread() -> None:
    cold = TimeCalibration.fit().predict(LAYOUTS[7], SMALL, A100)[1][0]
    calibration = TimeCalibration.fit(SLOW_LINKS.samples(SMALL, LAYOUTS[::6]))
    assert calibration.predict(LAYOUTS[7], SMALL, A100)[1][0] < 0.5 * cold


def test_most_measurements_lie_within_two_deviations() -> None:
    calibration = TimeCalibration.fit(SLOW_LINKS.samples(SMALL, LAYOUTS[::6]))
    off = []
    for layout in LAYOUTS:
        mean, deviation = calibration.predict(layout, SMALL, A100)
        off.append((np.log(SLOW_LINKS.step_time_s(SMALL, layout)) - mean[0]) / deviation[0])
    assert np.mean(np.abs(off) < 2) > 0.9


def test_telling_one_by_one_comes_to_the_same_as_telling_at_once() -> None:
    samples = SLOW_LINKS.samples(SMALL, LAYOUTS[::12])
    step_by_step = TimeCalibration.fit()
    for sample in samples:
        step_by_step = step_by_step.told([sample], campaign="mine")
    at_once = TimeCalibration.fit().told(samples, campaign="mine")
    for layout in LAYOUTS[::7]:
        one = step_by_step.predict(layout, SMALL, A100, campaign="mine")[0]
        other = at_once.predict(layout, SMALL, A100, campaign="mine")[0]
        assert one == pytest.approx(other, abs=0.02)


def test_failed_samples_do_not_change_the_calibration() -> None:
    failed = Sample(model=SMALL, cluster=A100, layout=LAYOUTS[0], state="infeasible")
    known = TimeCalibration.fit()
    assert known.told([failed], campaign="mine") is known


@given(
    st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=12),
    st.integers(0, len(LAYOUTS) - 1),
)
@settings(max_examples=40, deadline=None)
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
    known = TimeCalibration.fit(
        SLOW_LINKS.samples(SMALL, [layout for layout in LAYOUTS if layout.tp <= 2])
    )
    assert known.outside(LAYOUTS[0], SMALL, A100) is None
    warning = known.outside(
        Layout(num_nodes=2, tp=8, pp=2, recompute="full", precision="bf16", num_microbatches=32),
        LARGE,
        A100,
    )
    assert warning is not None
    assert "tp 8, measured 1 to 2" in warning
    assert "recompute full, measured none" in warning
    assert "hidden_size 6144, measured 2048" in warning


def test_a_warning_says_where_nothing_was_measured() -> None:
    known = TimeCalibration.fit(SLOW_LINKS.samples(SMALL, LAYOUTS))
    warning = known.outside(LAYOUTS[0], SMALL, CLUSTER_PRESETS["frontier"], software="megatron")
    assert warning is not None
    assert "not calibrated for megatron on frontier" in warning
