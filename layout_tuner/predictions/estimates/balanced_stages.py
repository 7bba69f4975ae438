"""The cut of a model's layers into the stages of a pipeline that takes the least time."""

from __future__ import annotations

from typing import Final

import numpy as np

from layout_tuner.array_types import Floats
from layout_tuner.predictions.estimates.step_time import block_and_head_s
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.search_spaces.models.sublayers import has_kinds

_EARLY: Final = 1e-6
"""Weight by which, of cuts that are as good, the one with the smaller early stages is taken: under
1F1B they hold the most micro-batches."""


def balanced_stages(layout: Layout, model: ModelShape, cluster: Cluster) -> tuple[int, ...] | None:
    """Layers of each of pp * vpp stages whose largest takes the least time.

    Of several such cuts it is the one with the least sum of squared times. The embedding takes no
    time. Only the first and the last stage may have no layer. `layout` states what the times of
    layers depend on. None: there are more stages than layers for them.
    """
    layer_s, head_s = block_and_head_s(layout, model, cluster)
    times = np.full(model.num_layers, layer_s)
    if has_kinds(model):
        for each in model.kinds:
            times[list(each.layers)] = block_and_head_s(layout, each.shape, cluster)[0]
    elif model.num_dense_layers:
        # Of a mixed model `layer_s` is the mean.
        dense_s, _ = block_and_head_s(layout, model.dense, cluster)
        others = layer_s * model.num_layers - dense_s * model.num_dense_layers
        times[: model.num_dense_layers] = dense_s
        times[model.num_dense_layers :] = others / model.num_expert_layers
    return cut(times, head_s, layout.pp * layout.vpp)


def cut(layer_s: Floats, head_s: float, num_stages: int) -> tuple[int, ...] | None:
    """The same of layers that take `layer_s` each, and an output that takes `head_s`."""
    until = np.concatenate([[0.0], np.cumsum(layer_s)])
    taken_s = until[None, :] - until[:, None]  # by first layer, and the one after the last
    taken_s[np.tril_indices(len(until), -1)] = np.inf
    inner_s = taken_s.copy()
    np.fill_diagonal(inner_s, np.inf)
    largest = until.copy()  # of the stages so far, by the layers that they have
    for _ in range(num_stages - 2):
        largest = np.maximum(largest[:, None], inner_s).min(axis=0)
    limit = np.maximum(largest, taken_s[:, -1] + head_s).min() if num_stages > 1 else np.inf
    if not np.isfinite(limit) and num_stages > 1:
        return None
    limit *= 1.0 + 1e-9

    def weights(seconds: Floats, stage: int) -> Floats:
        weight = (1.0 + _EARLY * (num_stages - stage)) * seconds**2
        return np.where(seconds <= limit, weight, np.inf)

    best, chosen = weights(until, 0), []
    for stage in range(1, num_stages):
        is_last = stage == num_stages - 1
        own_s = taken_s + head_s if is_last else inner_s
        total = best[:, None] + weights(own_s, stage)
        chosen.append(total.argmin(axis=0))
        best = total.min(axis=0)
    ends = [len(layer_s)]
    for begins in reversed(chosen):
        ends.append(int(begins[ends[-1]]))
    return tuple(int(each) for each in np.diff([0, *ends[::-1]]))
