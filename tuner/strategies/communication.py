"""AxoNN's ranking: layouts by what their communication takes, as modelled (arXiv:2502.08145).

Its authors' scripts take four matrices a layer, divide the bytes of each axis by a bandwidth, and
launch the first 20 of the order; neither overlap nor computation counts. Axes, innermost first:
tensor columns, tp, ZeRO-3's shards, and replicas. Here the down projection is charged to the axis
that sums it, and the other axes of a layout (cp, pp, ep) as in the estimates, without factors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from layout_tuner.array_types import Floats, Ints
from layout_tuner.predictions.estimates.links import GroupLinks, level_links
from layout_tuner.predictions.estimates.rank_stages import RankStages
from layout_tuner.predictions.estimates.step_shape import (
    forward_passes,
    mean_of_layers,
    recomputing_share,
)
from layout_tuner.predictions.estimates.step_time import TERM_NAMES, time_terms
from layout_tuner.predictions.estimates.tensor_sums import layer_sums
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.search_spaces.models.sublayers import has_kinds
from layout_tuner.tuner.strategies.search_problem import SearchProblem

_OTHER_AXES: Final = [
    place
    for place, name in enumerate(TERM_NAMES)
    if name.startswith(("context", "exchange", "pipeline"))
]


def order_by_communication(problem: SearchProblem) -> NDArray[np.int64]:
    """Positions of the layouts, the least communication for a sequence first.

    Equal ones stay in the canonical order. The scripts also name a least number of ranks for each
    of their models, by the memory of their machines; other machines have another, and none here.
    """
    columns = problem.without_jobs.columns()
    seconds = communication_s(columns, problem.model, problem.cluster)
    return np.argsort(seconds / columns.global_batch_size, kind="stable")


def communication_s(columns: LayoutColumns, model: ModelShape, cluster: Cluster) -> Floats:
    """Seconds of a step in which each layout communicates, of columns with one axis."""
    terms = time_terms(columns, model, cluster, dtype=np.float32)
    seconds: Floats = terms.seconds[:, _OTHER_AXES].sum(axis=1, dtype=np.float64)
    stride: Ints | int = 1
    levels = level_links(cluster, columns)
    for ranks, sent, collectives in _axes(columns, model):
        links = GroupLinks.of(ranks, stride, cluster, levels, 1.0)
        hops = np.where(links.inside, 0.0, collectives * ranks * links.latency_s)
        shares = (ranks - 1.0) / ranks
        seconds += np.where(ranks > 1, shares * sent / links.bytes_per_s + hops, 0.0)
        stride = stride * ranks
    return seconds


def _axes(columns: LayoutColumns, model: ModelShape) -> Iterator[tuple[Ints, Floats, Floats]]:
    """The ranks of each axis, (n - 1) / n of the bytes that a rank sends, and how often.

    A sum sends its elements twice at 16 bits, forward ones again with full recomputation, in the
    layers that recompute. Weights are gathered twice and their gradients scattered once, at 16
    bits, for each micro-batch; over replicas their gradients are summed in fp32 once a step.
    """
    layers = model.num_layers / columns.pp
    blocks = layers * columns.num_microbatches
    tokens = columns.micro_batch_size * model.seq_length / columns.cp * blocks
    passes = forward_passes(
        columns, recomputing_share(columns, model, RankStages.of(columns, model))
    )

    def mean(of: Callable[[ModelShape], Floats]) -> Floats:
        return mean_of_layers(model, of) if has_kinds(model) else of(model)

    def sent(shape: ModelShape, axis: str) -> Floats:
        each = getattr(layer_sums(shape, columns.tp, columns.tp_columns), axis)
        return np.asarray(passes * each.forward + each.backward)

    def weights(shape: ModelShape) -> Floats:
        others = (
            shape.num_layer_matrix_parameters - shape.num_expert_parameters
        ) / columns.tp_ranks
        return np.asarray(others + shape.num_expert_parameters / (columns.etp * columns.ep))

    # Two matrices of each sublayer.
    matrices = 2.0 * mean(lambda shape: np.asarray(float(shape.num_sublayers)))
    for ranks, axis in ((columns.tp_columns, "columns"), (columns.tp, "tp")):
        yield ranks, 2.0 * 2.0 * tokens * mean(partial(sent, axis=axis)), matrices * blocks
    held = mean(weights) * layers
    # Ranks that share the stored weights; ZeRO's first two stages are not among AxoNN's axes.
    depth = np.where(columns.zero_stage == 3, columns.zero_group_size, 1)
    yield depth, 3.0 * 2.0 * held * columns.num_microbatches, 3.0 * matrices * blocks
    yield columns.dp_cp // depth, 8.0 * held / depth, matrices * layers
