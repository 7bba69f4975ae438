from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from layout_tuner.predictions.belief.known_measurements import Sample
from layout_tuner.predictions.belief.peaks.corrected_peak import MemoryBelief, StagePeak
from layout_tuner.predictions.belief.peaks.memory_fit import LOGISTIC_PER_NORMAL
from layout_tuner.predictions.belief.peaks.trainer_hypotheses import (
    TrainerMemory,
    mixed,
    quantiles,
)
from layout_tuner.predictions.estimates.peak_memory import (
    memory_terms,
    peak_memory_bytes,
    stage_memory,
)
from layout_tuner.predictions.estimates.trainer_kernels import kernels_of
from layout_tuner.predictions.estimates.trainer_storage import (
    MEGATRON_2022,
    NANOTRON,
    storage_hypotheses,
    storage_of,
)
from layout_tuner.search_spaces.clusters.cluster_presets import CLUSTER_PRESETS
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.models.model_presets import MODEL_PRESETS, model_preset
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
STORAGE = storage_of(OTHERS, CLUSTER)
ESTIMATES = peak_memory_bytes(COLUMNS, MODEL, STORAGE)


def sample(layout: Layout, peak_bytes: float | None = None, **changes: Any) -> Sample:
    values: dict[str, Any] = {"model": MODEL, "cluster": CLUSTER, "software": OTHERS}
    values |= {"state": "completed", **changes}
    return Sample(
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
        some.peak_bytes(told.layout, MODEL)[0] for some in (belief.updated([told]), belief)
    )
    return float((after / before).item())


def test_a_factor_on_all_of_memory_or_on_one_term_is_found() -> None:
    for factor in (0.7, 1.0, 1.4):
        belief = NEW.updated(outcomes(factor * ESTIMATES, step=6))
        assert np.median(errors(belief, factor * ESTIMATES)) < 0.05, factor
    terms = memory_terms(COLUMNS, MODEL, STORAGE).num_bytes
    of_terms = np.array([1.0, 1.0, 1.5, 1.0, 1.0, 1.0])
    truth = (terms * of_terms[:, None]).sum(axis=1).max(axis=0)
    assert errors(NEW.updated(outcomes(truth)), truth).max() < 0.05
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
    for belief in (NEW, NEW.updated(outcomes(ESTIMATES, step=7))):
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
    belief = NEW.updated(samples)
    many = np.array(belief.peak_bytes(COLUMNS, MODEL))
    each = np.array([np.ravel(belief.peak_bytes(layout, MODEL)) for layout in LAYOUTS]).T
    np.testing.assert_allclose(many, each, rtol=1e-9)
    fits = (
        belief.fits(asked, MODEL, 80 * GIB) for asked in (belief.terms(COLUMNS, MODEL), COLUMNS)
    )
    np.testing.assert_allclose(*fits, rtol=1e-4)
    one_by_one = NEW
    for each_sample in reversed(samples):
        one_by_one = one_by_one.updated([each_sample])
    np.testing.assert_allclose(np.array(one_by_one.peak_bytes(COLUMNS, MODEL)), many, rtol=1e-6)


def test_samples_count_for_less_the_farther_they_come_from() -> None:
    truth = 1.3 * ESTIMATES
    samples = outcomes(truth, step=12)
    other_model = model_preset("llama-7b")
    of_other_model = [
        replace(each, model=other_model, peak_memory_bytes=int(1.3 * estimate.item()))
        for each in samples
        if each.peak_memory_bytes
        for estimate in [peak_memory_bytes(each.layout, other_model, STORAGE)]
    ]
    beliefs = [NEW.updated(samples), NEW.updated(of_other_model, elsewhere=True), NEW]
    distances = [float(np.median(errors(belief, truth))) for belief in beliefs]
    assert distances == sorted(distances)
    assert distances[1] < 0.7 * distances[2]
    spreads = [float(np.median(belief.peak_bytes(COLUMNS, MODEL)[1])) for belief in beliefs]
    assert spreads == sorted(spreads)


def test_peaks_of_two_stages_correct_those_between() -> None:
    layout = Layout(tp=4, pp=8, dp=2, num_microbatches=32, zero_stage=1, precision="bf16")
    truth = [1.2 * stage.total_bytes for stage in stage_memory(layout, MODEL, STORAGE)]
    told = NEW.updated(
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
        NEW.updated(some).peak_bytes(COLUMNS, MODEL)[0] for some in (samples, samples + absurd)
    )
    np.testing.assert_allclose(bent, sane, rtol=0.02)


A100 = CLUSTER_PRESETS["a100-sxm"]
LLAMA_13B = replace(
    MODEL_PRESETS["llama-7b"],
    num_layers=40,
    hidden_size=5120,
    ffn_hidden_size=13824,
    num_heads=40,
    num_kv_heads=40,
)
GRID = filled_layouts(
    64,
    fixed={"num_nodes": 8, "num_microbatches": 8, "zero_stage": 1, "precision": "bf16"},
    tp=(1, 2, 4),
    pp=(1, 2, 4),
    micro_batch_size=(1, 2, 4),
)
GRID_COLUMNS = LayoutColumns.of_each(GRID)
CAPACITY = float(A100.device_memory_bytes)
UNKNOWN = TrainerMemory.prior(A100, software="a new trainer")


def samples(name: str, *, with_peaks: bool) -> list[Sample]:
    """What a trainer that stores as a hypothesis says would measure."""
    hypotheses = storage_hypotheses("a new trainer", A100)
    (storage,) = (each.storage for each in hypotheses if each.name == name)
    peaks = peak_memory_bytes(GRID_COLUMNS, LLAMA_13B, storage)
    origin = {"model": LLAMA_13B, "cluster": A100, "software": "a new trainer"}
    return [
        sample(layout, peak if with_peaks else None, **origin)
        if peak < 0.94 * CAPACITY
        else sample(layout, state="infeasible", **origin)
        for layout, peak in zip(GRID, peaks, strict=True)
    ]


def share(memory: TrainerMemory, prefix: str) -> float:
    return sum(
        float(weight)
        for name, weight in zip(memory.names, memory.weights, strict=True)
        if name.startswith(prefix)
    )


def test_a_known_trainer_is_one_hypothesis_and_predicts_as_before() -> None:
    for software in ("", "torch 2.6", "nanotron 0.4", "megatron-lm core_r0.9", "vTrain MICRO24"):
        memory = TrainerMemory.prior(A100, software=software)
        alone = MemoryBelief.prior(A100, software=software)
        assert len(memory.beliefs) == 1
        assert memory.deciding(GRID_COLUMNS, LLAMA_13B, CAPACITY) is None
        mine, before = (
            np.array(each.peak_bytes(GRID_COLUMNS, LLAMA_13B)) for each in (memory, alone)
        )
        np.testing.assert_array_equal(mine, before)
        mine, before = (each.fits(GRID_COLUMNS, LLAMA_13B, CAPACITY) for each in (memory, alone))
        np.testing.assert_array_equal(mine, before)


def test_an_unknown_trainer_has_eight_to_sixteen_hypotheses_of_weight_one_together() -> None:
    every = storage_hypotheses("a new trainer", A100)
    assert 8 <= len(every) <= 16
    assert sum(each.weight for each in every) == pytest.approx(1.0)
    assert len({each.storage for each in every}) == len(every)
    assert storage_of("a new trainer", A100) is MEGATRON_2022
    # Fused attention is not charged for scores that it never stores.
    known = [kernels_of(each, A100) for each in ("nanotron", "a new trainer", "vTrain")]
    fused, either, unfused = (kernels.score_traffic for kernels in known)
    assert (fused, unfused) == (0.0, 1.0)
    assert fused < either < unfused
    assert NANOTRON.fused_attention


def test_p_fits_is_the_weighted_mean_and_no_layout_is_ruled_out() -> None:
    each = np.array([belief.fits(GRID_COLUMNS, LLAMA_13B, CAPACITY) for belief in UNKNOWN.beliefs])
    fits = UNKNOWN.fits(GRID_COLUMNS, LLAMA_13B, CAPACITY)
    np.testing.assert_allclose(fits, np.array(UNKNOWN.priors) @ each, rtol=0.02)
    assert (fits > 0).all()
    # What fits with 16-bit gradients alone is not written off because fp32 ones do not fit.
    decided = (each.max(axis=0) > 0.9) & (each.min(axis=0) < 0.1)
    assert decided.any()
    assert (fits[decided] > 0.1).all()


def test_measured_peaks_find_the_gradients_that_a_trainer_keeps() -> None:
    for gradients in (
        "fp32 gradients",
        "16-bit gradients that ZeRO shards",
        "three copies of a gradient",
    ):
        name = f"{gradients}, fused attention, two copies of the logits"
        told = UNKNOWN.updated(samples(name, with_peaks=True))
        assert share(UNKNOWN, f"{gradients},") < 0.4
        assert share(told, f"{gradients},") > 0.9


def test_outcomes_alone_weigh_against_hypotheses_that_they_contradict() -> None:
    name, copies = "16-bit gradients, attention that is not fused", "three copies of a gradient"
    outcomes = samples(name, with_peaks=False)
    told = UNKNOWN.updated(outcomes)
    assert share(told, copies) < share(UNKNOWN, copies)
    ran = np.array([each.state == "completed" for each in outcomes])
    before, after = (memory.fits(GRID_COLUMNS, LLAMA_13B, CAPACITY) for memory in (UNKNOWN, told))
    losses = [-np.log(np.where(ran, fits, 1.0 - fits)).mean() for fits in (before, after)]
    assert losses[1] < 0.6 * losses[0]
    # Those of another trainer do not move the weights.
    others = [replace(each, software="megatron-lm") for each in samples(name, with_peaks=True)]
    np.testing.assert_allclose(
        UNKNOWN.updated(others, elsewhere=True).weights, UNKNOWN.weights, atol=1e-9
    )


def test_the_deciding_property_is_the_one_whose_outcome_changes_fitting_most() -> None:
    found = UNKNOWN.deciding(GRID_COLUMNS, LLAMA_13B, CAPACITY)
    sides = {
        has: [place for place, name in enumerate(UNKNOWN.names) if (found.name in name) is has]
        for has in (True, False)
    }
    each = np.array(
        [belief.fits(GRID_COLUMNS, LLAMA_13B, CAPACITY).mean() for belief in UNKNOWN.beliefs]
    )
    for has, stated in ((True, found.fits), (False, found.fits_without)):
        weights = UNKNOWN.weights[sides[has]]
        assert stated == pytest.approx(np.average(each[sides[has]], weights=weights))
    assert found.share == pytest.approx(UNKNOWN.weights[sides[True]].sum())
    assert abs(found.fits - found.fits_without) > 0.05


def test_a_mixture_has_the_mean_and_the_spread_of_its_parts() -> None:
    mean, deviation = mixed(
        [(0.25, (np.array([1.0]), np.array([0.1]))), (0.75, (np.array([3.0]), np.array([0.2])))]
    )
    assert mean.item() == pytest.approx(2.5)
    assert deviation.item() == pytest.approx(math.sqrt(0.25 * 0.01 + 0.75 * 0.04 + 0.75))


def test_quantiles_of_a_mixture_are_those_of_its_samples_and_agree_with_p_fits() -> None:
    parts = [
        (0.5, (np.array([20.0, 5.0]), np.array([1.0, 2.0]))),
        (0.3, (np.array([23.0, 5.0]), np.array([2.0, 2.0]))),
        (0.2, (np.array([150.0, 5.0]), np.array([20.0, 2.0]))),
    ]
    rng = np.random.default_rng(1)
    part = rng.choice(3, size=200_000, p=[weight for weight, _ in parts])
    means, deviations = (np.array([peaks[of] for _, peaks in parts])[part] for of in (0, 1))
    off = rng.logistic(size=part.shape)[:, None] / LOGISTIC_PER_NORMAL
    drawn = means * np.exp(off * deviations / means)
    expected = np.quantile(drawn, (0.1, 0.5, 0.9), axis=0)
    np.testing.assert_allclose(quantiles(parts), expected, rtol=0.02)
    # The median is none of the outlier's 150, unlike the mean.
    assert quantiles(parts)[1, 0] < 25 < mixed(parts)[0][0]
    for memory in (UNKNOWN, TrainerMemory.prior(A100, software="nanotron")):
        found = quantiles(memory.each_peak_bytes(GRID_COLUMNS, LLAMA_13B))
        usable = (CAPACITY - memory.storage.context_bytes) / (1.0 + memory.storage.reserved_share)
        fits = memory.fits(GRID_COLUMNS, LLAMA_13B, CAPACITY)
        for share, ends in zip((0.1, 0.5, 0.9), found, strict=True):
            np.testing.assert_array_equal(ends < usable, fits > share)
    layout = GRID[0]
    by_stage = quantiles(UNKNOWN.each_stage_peak_bytes(layout, LLAMA_13B))
    assert by_stage.shape == (3, layout.pp)
    assert (np.diff(by_stage, axis=0) > 0).all()
