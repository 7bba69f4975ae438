"""Memory of trainers that are not known, as a mixture of hypotheses."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from search_spaces.belief.known_measurements import Sample
from search_spaces.belief.peaks.memory import MemoryBelief
from search_spaces.belief.peaks.trainer_hypotheses import TrainerMemory, mixed
from search_spaces.estimates.memory import peak_memory_bytes
from search_spaces.estimates.storage import (
    MEGATRON_LIKE,
    NANOTRON,
    score_traffic_of,
    storage_hypotheses,
    storage_of,
)
from search_spaces.spec.layout_columns import LayoutColumns
from search_spaces.spec.presets.clusters import CLUSTER_PRESETS
from search_spaces.spec.presets.models import MODEL_PRESETS
from tests.kit.layouts import filled_layouts

A100 = CLUSTER_PRESETS["a100-sxm"]
MODEL = replace(
    MODEL_PRESETS["llama-7b"],
    num_layers=40,
    hidden_size=5120,
    ffn_hidden_size=13824,
    num_heads=40,
    num_kv_heads=40,
)
LAYOUTS = filled_layouts(
    64,
    fixed={"num_nodes": 8, "num_microbatches": 8, "zero_stage": 1, "precision": "bf16"},
    tp=(1, 2, 4),
    pp=(1, 2, 4),
    micro_batch_size=(1, 2, 4),
)
COLUMNS = LayoutColumns.of_each(LAYOUTS)
CAPACITY = float(A100.device_memory_bytes)
UNKNOWN = TrainerMemory.prior(A100, software="a new trainer")


def samples(name: str, *, with_peaks: bool) -> list[Sample]:
    """What a trainer that stores as a hypothesis says would measure."""
    hypotheses = storage_hypotheses("a new trainer", A100)
    (storage,) = (each.storage for each in hypotheses if each.name == name)
    found = []
    for layout, peak in zip(LAYOUTS, peak_memory_bytes(COLUMNS, MODEL, storage), strict=True):
        ran = peak < 0.94 * CAPACITY
        found.append(
            Sample(
                model=MODEL,
                cluster=A100,
                layout=layout,
                state="completed" if ran else "infeasible",
                step_time_s=1.0 if ran else None,
                peak_memory_bytes=round(peak) if ran and with_peaks else None,
                software="a new trainer",
            )
        )
    return found


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
        assert memory.deciding(COLUMNS, MODEL, CAPACITY) is None
        mine, before = (np.array(each.peak_bytes(COLUMNS, MODEL)) for each in (memory, alone))
        np.testing.assert_array_equal(mine, before)
        mine, before = (each.fits(COLUMNS, MODEL, CAPACITY) for each in (memory, alone))
        np.testing.assert_array_equal(mine, before)


def test_an_unknown_trainer_has_eight_to_sixteen_hypotheses_of_weight_one_together() -> None:
    every = storage_hypotheses("a new trainer", A100)
    assert 8 <= len(every) <= 16
    assert sum(each.weight for each in every) == pytest.approx(1.0)
    assert len({each.storage for each in every}) == len(every)
    assert storage_of("a new trainer", A100) is MEGATRON_LIKE
    # Fused attention is not charged for scores that it never stores.
    fused, option = score_traffic_of("nanotron", A100), score_traffic_of("megatron-lm", A100)
    assert (fused, option) == (pytest.approx(0.1), 1.0)
    assert fused < score_traffic_of("a new trainer", A100) < option
    assert NANOTRON.fused_attention


def test_p_fits_is_the_weighted_mean_and_no_layout_is_ruled_out() -> None:
    each = np.array([belief.fits(COLUMNS, MODEL, CAPACITY) for belief in UNKNOWN.beliefs])
    fits = UNKNOWN.fits(COLUMNS, MODEL, CAPACITY)
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
        told = UNKNOWN.told(samples(name, with_peaks=True))
        assert share(UNKNOWN, f"{gradients},") < 0.4
        assert share(told, f"{gradients},") > 0.9


def test_outcomes_alone_weigh_against_hypotheses_that_they_contradict() -> None:
    name, copies = "16-bit gradients, attention that is not fused", "three copies of a gradient"
    outcomes = samples(name, with_peaks=False)
    told = UNKNOWN.told(outcomes)
    assert share(told, copies) < share(UNKNOWN, copies)
    ran = np.array([each.state == "completed" for each in outcomes])
    before, after = (memory.fits(COLUMNS, MODEL, CAPACITY) for memory in (UNKNOWN, told))
    losses = [-np.log(np.where(ran, fits, 1.0 - fits)).mean() for fits in (before, after)]
    assert losses[1] < 0.6 * losses[0]
    # Those of another trainer do not move the weights.
    others = [replace(each, software="megatron-lm") for each in samples(name, with_peaks=True)]
    np.testing.assert_allclose(UNKNOWN.told_elsewhere(others).weights, UNKNOWN.weights, atol=1e-9)


def test_the_deciding_property_is_the_one_whose_outcome_changes_fitting_most() -> None:
    found = UNKNOWN.deciding(COLUMNS, MODEL, CAPACITY)
    assert found is not None
    sides = {
        has: [place for place, name in enumerate(UNKNOWN.names) if (found.name in name) is has]
        for has in (True, False)
    }
    each = np.array([belief.fits(COLUMNS, MODEL, CAPACITY).mean() for belief in UNKNOWN.beliefs])
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
