"""A layout on more nodes than it was measured on: more replicas, less accumulation."""

from __future__ import annotations

from dataclasses import replace

from layout_tuner.errors import LayoutInvalidError
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.legality_rules import violations
from layout_tuner.search_spaces.models.model_shape import ModelShape


def scaled(
    layout: Layout,
    num_nodes: int,
    *,
    model: ModelShape,
    cluster: Cluster,
    allow_tp_across_nodes: bool = False,
) -> Layout:
    """The layout on `num_nodes`, with the same global batch and ranks per node.

    dp grows with the nodes, and num_microbatches shrinks; all other knobs stay. The layout must be
    legal on the cluster, which may be larger than it is described.

    Raises:
        LayoutInvalidError: the nodes are fewer than the layout's, something does not divide, or the
            result is illegal.
    """
    if num_nodes < layout.num_nodes:
        raise LayoutInvalidError(
            f"num_nodes={num_nodes} is fewer than the {layout.num_nodes} of the layout, which is "
            f"scaled to more nodes only; name {layout.num_nodes} or more"
        )
    dp, rest = divmod(layout.dp * num_nodes, layout.num_nodes)
    if rest:
        raise LayoutInvalidError(
            f"dp*num_nodes={layout.dp}*{num_nodes}={layout.dp * num_nodes} is not divisible by the "
            f"layout's num_nodes={layout.num_nodes}, so that the ranks of a node would change; name a "
            f"multiple of {layout.num_nodes}"
        )
    num_microbatches, rest = divmod(layout.global_batch_size, dp * layout.micro_batch_size)
    if rest:
        raise LayoutInvalidError(
            f"global_batch_size={layout.global_batch_size} is not divisible by dp*micro_batch_size="
            f"{dp}*{layout.micro_batch_size}={dp * layout.micro_batch_size} on num_nodes={num_nodes}; "
            "name fewer nodes, or another number of them"
        )
    larger = replace(layout, num_nodes=num_nodes, dp=dp, num_microbatches=num_microbatches)
    broken = violations(
        larger,
        model,
        replace(cluster, num_nodes=max(cluster.num_nodes, num_nodes)),
        global_batch=layout.global_batch_size,
        allow_tp_across_nodes=allow_tp_across_nodes,
    )
    if broken:
        raise LayoutInvalidError(
            f"the layout is not legal on num_nodes={num_nodes}: {'; '.join(broken)}"
        )
    return larger
