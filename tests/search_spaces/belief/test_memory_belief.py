from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from search_spaces.belief.known_measurements import Sample
from search_spaces.belief.peaks.memory import MemoryBelief, StagePeak
from search_spaces.estimates.memory import memory_terms, peak_memory_bytes, stage_memory
from search_spaces.estimates.storage import MEGATRON_LIKE
from search_spaces.spec.layout import Layout
from search_spaces.spec.layout_columns import LayoutColumns
from search_spaces.spec.presets.clusters import CLUSTER_PRESETS
from search_spaces.spec.presets.models import model_preset
from tests.kit.layouts import filled_layouts

GIB = 1 << 30
MODEL = model_preset("llama-8b")
CLUSTER = replace(CLUSTER_PRESETS["h100-sxm"], device_memory_bytes=80 * GIB)
OTHERS = "another trainer"
LAYOUTS = filled_layouts(
    16,
    fixed={"num_nodes": 2, "num_microbatches": 8, "precision": "bf16"},
    tp=(1, 2, 4),
    pp=(1, 2, 4),
    micro_batch_size=(1, 2),
    zero_stage=(0, 1),
    recompute=("selective", "full"),
)
"""72 layouts; some of them take several times what a device has."""

NEW = MemoryBelief.prior(CLUSTER, software=OTHERS)
COLUMNS = LayoutColumns.of_each(LAYOUTS)
ESTIMATES = peak_memory_bytes(COLUMNS, MODEL, MEGATRON_LIKE)


def sample(layout: Layout, peak_bytes: float | None = None, **changes: Any) -> Sample:
    values: dict[str, Any] = {"state": "completed", "software": OTHERS, **changes}
    return Sample(
        model=MODEL,
        cluster=CLUSTER,
        layout=layout,
        step_time_s=1.0 if values["state"] == "completed" else None,
        peak_memory_bytes=None if peak_bytes is None else int(peak_bytes),
        **values,
    )


def outcomes(truth: Any, step: int = 1) -> list[Sample]:
    """What runs of every `step`-th layout would say whose true peaks are those."""
    return [
        sample(layout, peak) if peak < 76 * GIB else sample(layout, state="infeasible")
        for layout, peak in zip(LAYOUTS[::step], truth[::step], strict=True)
    ]


def errors(belief: MemoryBelief, truth: Any) -> Any:
    return np.abs(belief.peak_bytes(COLUMNS, MODEL)[0] / truth - 1.0)


def nearest(gib: float) -> Layout:
    """The layout whose estimate is nearest to that."""
    return LAYOUTS[int(np.argmin(np.abs(ESTIMATES - gib * GIB)))]


def moved(told: Sample, belief: MemoryBelief = NEW) -> float:
    """By what factor a sample moves its own layout's peak."""
    after, before = (
        some.peak_bytes(told.layout, MODEL)[0] for some in (belief.told([told]), belief)
    )
    return float((after / before).item())


def test_a_factor_on_all_of_memory_or_on_one_term_is_found() -> None:
    for factor in (0.7, 1.0, 1.4):
        belief = NEW.told(outcomes(factor * ESTIMATES, step=6))
        assert np.median(errors(belief, factor * ESTIMATES)) < 0.05, factor
    terms = memory_terms(COLUMNS, MODEL, MEGATRON_LIKE).num_bytes
    of_terms = np.array([1.0, 1.0, 1.5, 1.0, 1.0, 1.0])
    truth = (terms * of_terms[:, None]).sum(axis=1).max(axis=0)
    assert errors(NEW.told(outcomes(truth)), truth).max() < 0.05
    assert errors(NEW, truth).max() > 0.2


def test_an_outcome_moves_the_peak_of_its_layout() -> None:
    for gib, state, low, high in (
        (70, "infeasible", 1.02, 10),  # running out of memory raises the peak
        (80, "completed", 0.1, 0.98),  # running lowers it
        (1000, "infeasible", 0.99, 1.01),  # what was expected changes nothing
        (10, "completed", 0.99, 1.01),
        (72, "failed", 1.01, 10),  # an unexplained failure counts only where memory was short
        (20, "failed", 0.999, 1.001),
    ):
        assert low < moved(sample(nearest(gib), state=state)) < high, (gib, state)
    # The embedded trainer says when memory runs out, so that a failure is another thing.
    own = MemoryBelief.prior(CLUSTER)
    assert moved(sample(nearest(80), state="failed", software=""), own) == 1.0
    assert moved(sample(nearest(80), state="infeasible", software=""), own) > 1.0


def test_the_probability_of_fitting_is_one_and_grows_with_the_memory() -> None:
    sizes = (8, 16, 40, 80, 200, 1000)
    for belief in (NEW, NEW.told(outcomes(ESTIMATES, step=7))):
        fits = np.array([belief.fits(COLUMNS, MODEL, gib * GIB) for gib in sizes])
        assert np.all(np.diff(fits, axis=0) >= 0)
        assert np.all((fits >= 0) & (fits <= 1))
        assert fits[0].min() < 0.01
        assert fits[-1].max() > 0.99
    fits = NEW.fits(COLUMNS, MODEL, 80 * GIB)
    assert fits[ESTIMATES < 1.2 * 80 * GIB].min() > 0.02
    assert fits.min() > 0.0, "nothing is ruled out before anything was measured"


def test_many_layouts_or_samples_at_once_are_as_one_at_a_time_in_any_order() -> None:
    samples = outcomes(1.2 * ESTIMATES, step=4)
    belief = NEW.told(samples)
    many = np.array(belief.peak_bytes(COLUMNS, MODEL))
    each = np.array([np.ravel(belief.peak_bytes(layout, MODEL)) for layout in LAYOUTS]).T
    np.testing.assert_allclose(many, each, rtol=1e-9)
    fits = (
        belief.fits(asked, MODEL, 80 * GIB) for asked in (belief.terms(COLUMNS, MODEL), COLUMNS)
    )
    np.testing.assert_allclose(*fits, rtol=1e-4)
    one_by_one = NEW
    for each_sample in reversed(samples):
        one_by_one = one_by_one.told([each_sample])
    np.testing.assert_allclose(np.array(one_by_one.peak_bytes(COLUMNS, MODEL)), many, rtol=1e-6)


def test_samples_count_for_less_the_farther_they_come_from() -> None:
    truth = 1.3 * ESTIMATES
    samples = outcomes(truth, step=12)
    other_model = model_preset("llama-7b")
    of_other_model = [
        replace(each, model=other_model, peak_memory_bytes=int(1.3 * estimate.item()))
        for each in samples
        if each.peak_memory_bytes
        for estimate in [peak_memory_bytes(each.layout, other_model, MEGATRON_LIKE)]
    ]
    beliefs = [NEW.told(samples), NEW.told_elsewhere(of_other_model), NEW]
    distances = [float(np.median(errors(belief, truth))) for belief in beliefs]
    assert distances == sorted(distances)
    assert distances[1] < 0.7 * distances[2]
    spreads = [float(np.median(belief.peak_bytes(COLUMNS, MODEL)[1])) for belief in beliefs]
    assert spreads == sorted(spreads)


def test_peaks_of_two_stages_correct_those_between() -> None:
    layout = Layout(tp=4, pp=8, dp=2, num_microbatches=32, zero_stage=1, precision="bf16")
    truth = [1.2 * stage.total_bytes for stage in stage_memory(layout, MODEL, MEGATRON_LIKE)]
    told = NEW.told(
        StagePeak(
            model=MODEL,
            cluster=CLUSTER,
            layout=layout,
            stage=stage,
            peak_memory_bytes=int(truth[stage]),
            software=OTHERS,
        )
        for stage in (0, 7)
    )
    means, deviations = told.stage_peak_bytes(layout, MODEL)
    np.testing.assert_allclose(means, truth, rtol=0.03)
    assert deviations.shape == (8,)
    fullest, _ = told.peak_bytes(layout, MODEL)
    assert fullest == pytest.approx(means.max())


def test_one_absurd_measurement_does_not_bend_the_others() -> None:
    samples = outcomes(ESTIMATES)
    absurd = [replace(samples[0], state="completed", step_time_s=1.0, peak_memory_bytes=GIB // 2)]
    sane, bent = (
        NEW.told(some).peak_bytes(COLUMNS, MODEL)[0] for some in (samples, samples + absurd)
    )
    np.testing.assert_allclose(bent, sane, rtol=0.02)
