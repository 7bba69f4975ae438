"""The risk that a pipeline across nodes stalls."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from search_spaces.belief.pipeline_stalls import PipelineStalls
from search_spaces.spec.layout import Layout
from search_spaces.spec.layout_columns import LayoutColumns
from search_spaces.spec.presets.clusters import CLUSTER_PRESETS

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
