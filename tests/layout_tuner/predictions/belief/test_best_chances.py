"""How likely each layout is the best, how many to probe, and which pipelines may stall."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from layout_tuner.predictions.belief.best_chances import BestChances, LayoutDraws
from layout_tuner.predictions.belief.corrected_step_time import TimeCalibration, known_share
from layout_tuner.predictions.belief.peaks.trainer_hypotheses import TrainerMemory
from layout_tuner.predictions.belief.pipeline_stalls import PipelineStalls
from layout_tuner.search_spaces.clusters.cluster_presets import CLUSTER_PRESETS
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.models.model_presets import MODEL_PRESETS

A100 = CLUSTER_PRESETS["a100-sxm"]
MODEL = MODEL_PRESETS["llama-7b"]
COLUMNS = LayoutColumns.of_each(
    Layout(tp=tp, dp=8 // tp, num_microbatches=4 * tp, zero_stage=1, precision="bf16")
    for tp in (1, 2, 4, 8)
)
CAPACITY = 60 * 2.0**30
DRAWS = LayoutDraws(
    model=MODEL,
    cluster=A100,
    software="megatron-lm",
    time=TimeCalibration(),
    memory=TrainerMemory.prior(A100, software="megatron-lm"),
)


def test_chances_are_shares_of_draws_and_count_only_what_runs() -> None:
    objectives = np.array([[2.0, 1.0], [2.0, 1.0], [1.0, 2.0], [2.0, 1.0]])
    runs = np.array([[True, True], [False, True], [True, True], [False, False]])
    chances = BestChances.of(objectives, runs)
    np.testing.assert_allclose(chances.best, [1 / 3, 2 / 3])
    np.testing.assert_allclose(chances.near, [2 / 3, 1.0])
    # A layout within 5 % of the best needs no further probe.
    objectives = np.log([[1.00, 0.96], [1.00, 1.04], [1.00, 1.04]])
    chances = BestChances.of(objectives, np.ones((3, 2), dtype=bool))
    np.testing.assert_allclose(chances.near, [1.0, 1.0])


def test_chances_follow_predicted_speed_and_memory() -> None:
    chances = DRAWS.chances(COLUMNS, np.zeros(4), CAPACITY)
    assert chances.best.sum() == pytest.approx(1.0)
    assert (np.diff(chances.near) >= 0).all()
    assert chances.near[-1] == 1.0
    steps, _ = DRAWS.time.predict(COLUMNS, MODEL, A100, software="megatron-lm")
    fits = DRAWS.memory.fits(COLUMNS, MODEL, CAPACITY)
    assert fits.min() < 0.5 < fits.max(), "the layouts differ in whether they fit"
    assert chances.best.argmax() == np.where(fits > 0.5, steps, np.inf).argmin()
    favoured = DRAWS.chances(COLUMNS, np.array([0.0, 0.0, 0.0, 3.0]), CAPACITY)
    assert favoured.best.argmax() == 3
    again, other = (DRAWS.chances(COLUMNS, np.zeros(4), CAPACITY, seed=seed) for seed in (0, 1))
    np.testing.assert_array_equal(again.best, chances.best)
    assert (other.best != chances.best).any(), "another seed draws others"


def test_intervals_are_narrow_where_errors_of_trainer_and_device_are_known() -> None:
    known, unknown = (
        float(np.median(TimeCalibration().predict(COLUMNS, MODEL, A100, software=software)[1]))
        for software in ("megatron-lm", "a new trainer")
    )
    assert np.exp(2 * 1.96 * known) < 1.8 < np.exp(2 * 1.96 * unknown)
    other = replace(A100, device="a new device")
    assert known_share("megatron-lm", other) == known_share("", A100) == 1.0


def test_the_trainer_that_is_named_first_decides_how_wide_intervals_are() -> None:
    h100, gb200 = CLUSTER_PRESETS["h100-sxm"], CLUSTER_PRESETS["gb200"]
    bridge = known_share("Megatron-Bridge 26.08", h100)
    assert known_share("Megatron-LM", h100) < known_share("torchtitan", h100) < bridge < 1.0
    assert known_share("Megatron-Bridge 26.08", gb200) == bridge
    assert known_share("Megatron-LM", gb200) == 1.0, "nobody published its errors there"


CLUSTER = replace(CLUSTER_PRESETS["h100-sxm"], devices_per_node=8)
INSIDE, REPLICAS, PAIR, MANY = 0, 1, 2, 3
LAYOUTS = (
    Layout(pp=2, dp=4, num_nodes=1),
    Layout(dp=256, num_nodes=32),
    Layout(pp=2, dp=8, num_nodes=2),
    Layout(pp=2, dp=128, num_nodes=32),
)
NOTHING = np.zeros(0, dtype=np.int64)


STALLS = PipelineStalls(LayoutColumns.of_each(LAYOUTS), CLUSTER)


def test_pipelines_across_nodes_are_at_risk_which_each_measured_one_makes_more_or_less_real() -> (
    None
):
    risks = STALLS.probability(np.arange(4), NOTHING, np.zeros(0))
    np.testing.assert_allclose(risks, [0.0, 0.0, 2 / 34, 0.5])
    # Layouts without risk do not change it.
    told = STALLS.probability(np.array([MANY]), np.array([INSIDE, REPLICAS]), np.array([1.0, 1.0]))
    np.testing.assert_allclose(told, [0.5])
    both = np.array([PAIR, MANY])
    sound = STALLS.probability(both, np.array([PAIR]), np.array([0.0]))
    np.testing.assert_allclose(sound, [1 / 34, 0.25])
    stalled = STALLS.probability(both, np.array([PAIR]), np.array([1.0]))
    np.testing.assert_allclose(stalled, [(2 / 34 + 1) / 2, 0.75])


def test_of_an_unknown_trainer_it_is_a_hypothesis_that_pipelines_stall_at_all() -> None:
    unknown = PipelineStalls(LayoutColumns.of_each(LAYOUTS), CLUSTER, "a new trainer")
    risks = unknown.probability(np.arange(4), NOTHING, np.zeros(0))
    np.testing.assert_allclose(risks, [0.0, 0.0, 0.375 * 2 / 34, 0.375 * 0.5])
    stalled = unknown.probability(np.array([MANY]), np.array([MANY]), np.array([1.0]))
    np.testing.assert_allclose(stalled, [(0.1875 + 1) / 2])
