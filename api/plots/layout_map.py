"""The layout drawn: nodes as boxes, their devices as cells with stage and replica."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from markupsafe import Markup

from layout_tuner.api.plot_data.plot_data import both_ends
from layout_tuner.api.plots.svg import WIDTH, Plot, join, number, svg_tag, tag
from layout_tuner.predictions.estimates.links import traffic_in_words
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.clusters.level_units import level_units
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.layouts.rank_mesh import (
    coordinates,
    expert_coordinates,
    ranks_per_node,
)
from layout_tuner.terminal.plurals import counted

MAX_DEVICES: Final = 256
"""Devices up to which every node is drawn."""
MAX_NODES: Final = 16
"""Nodes that are drawn of a larger job."""
MAX_PER_NODE: Final = 32
"""Devices that are drawn of a node of a larger job."""
TINTS: Final = 6
"""Tints of stages; further stages repeat them."""

_COLUMNS: Final = 8
_CELL_HEIGHT: Final = 20.0
_MARGIN: Final = 5.0
_HEAD: Final = 18.0
_CHARACTER: Final = 5.6
"""Width of a character in a cell."""


def layout_map(layout: Layout, cluster: Cluster | None = None) -> Plot:
    """Nodes, devices, stages, groups and replicas of a layout.

    Where the cluster has levels, the nodes of a larger unit name it, and a note says which axes
    communicate over which level.
    """
    units = _units(layout, cluster)
    per_node = ranks_per_node(layout.num_devices, layout.num_nodes)
    is_folded = layout.num_devices > MAX_DEVICES
    nodes = list(range(layout.num_nodes))
    if is_folded:  # the first node of each stage; of many stages, of the first and the last ones
        stages = both_ends(layout.pp, MAX_NODES)
        firsts = (stage * layout.num_devices // layout.pp // per_node for stage in stages)
        nodes = list(dict.fromkeys(firsts))
    shown = min(per_node, MAX_PER_NODE) if is_folded else per_node
    cell = 8.0 + _CHARACTER * len(_cell_text(layout.num_devices - 1, layout))
    columns = min(shown, _COLUMNS)
    named = 14.0 * max((len(name) for name, _ in units), default=0)
    width = max(columns * cell + 2 * _MARGIN, 150.0 + named)
    height = _HEAD + -(-shown // columns) * _CELL_HEIGHT + 2 * _MARGIN
    a_row = max(int(WIDTH // (width + 10.0)), 1)
    boxes = [
        _node(
            layout,
            node,
            range(node * per_node, min((node + 1) * per_node, layout.num_devices)),
            shown=shown,
            cell=cell,
            units="".join(f", {name} {node * per_node // size}" for name, size in units),
            corner=((place % a_row) * (width + 10.0), (place // a_row) * (height + 10.0)),
            size=(width, height),
        )
        for place, node in enumerate(nodes)
    ]
    rows = -(-len(nodes) // a_row)
    return Plot(
        svg=svg_tag(
            min(a_row, len(nodes)) * (width + 10.0) - 8.0,
            rows * (height + 10.0) - 8.0,
            tag("g", *boxes, class_="map", transform="translate(1,1)"),
            says=_words(layout),
        ),
        notes=(
            *_notes(layout, nodes, per_node, shown),
            *_traffic(layout, cluster),
        ),
    )


def _units(layout: Layout, cluster: Cluster | None) -> tuple[tuple[str, int], ...]:
    """The levels beyond the node of which a layout has several units, with its devices in one."""
    if cluster is None or not cluster.levels:
        return ()
    units = level_units(cluster, LayoutColumns.of_each([layout]))
    sizes = [
        (level, int(np.max(unit))) for level, unit in zip(cluster.network, units, strict=False)
    ]
    node, devices = cluster.devices_per_node, layout.num_devices
    return tuple((e.name, n) for e, n in sizes if (e.devices or 0) > node and n < devices)


def _traffic(layout: Layout, cluster: Cluster | None) -> Iterator[str]:
    """Which axes communicate over which level of the network, smallest level first."""
    if cluster is not None and (said := traffic_in_words(layout, cluster)):
        yield f"Largest level of the network that each kind of group needs: {said}."


def _node(
    layout: Layout,
    node: int,
    ranks: range,
    *,
    shown: int,
    cell: float,
    units: str,
    corner: tuple[float, float],
    size: tuple[float, float],
) -> Markup:
    left, top = corner
    columns = min(shown, _COLUMNS)
    by_tint: defaultdict[int, list[str]] = defaultdict(list)
    runs: dict[tuple[int, int], list[float]] = {}
    texts = []
    for index, rank in enumerate(ranks[:shown]):
        place = coordinates(rank, layout)
        x = left + _MARGIN + index % columns * cell
        y = top + _HEAD + _MARGIN + index // columns * _CELL_HEIGHT
        by_tint[place.pp_rank % TINTS].append(
            f"M{number(x)} {number(y)}h{number(cell - 2)}v{number(_CELL_HEIGHT - 2)}"
            f"h-{number(cell - 2)}z"
        )
        texts.append(tag("text", _cell_text(rank, layout), x=x + cell / 2 - 1, y=y + 13.0))
        runs.setdefault((rank // layout.tp_ranks, index // columns), [x, y, 0.0])[2] += cell
    frames = "".join(
        f"M{number(x - 1)} {number(y - 1)}h{number(length)}v{number(_CELL_HEIGHT)}"
        f"h-{number(length)}z"
        for x, y, length in runs.values()
    )
    name = f"node {node}{units}: rank" + (
        f"s {ranks[0]} to {ranks[-1]}" if len(ranks) > 1 else f" {ranks[0]}"
    )
    return join(
        tag("rect", x=left, y=top, width=size[0], height=size[1], rx=4.0, class_="node"),
        tag("text", name, x=left + 6.0, y=top + 14.0, class_="head"),
        *(tag("path", d="".join(cells), class_=f"tint{tint}") for tint, cells in by_tint.items()),
        tag("path", d=frames, class_="tp") if layout.tp_ranks > 1 else None,
        *texts,
    )


def _cell_text(rank: int, layout: Layout) -> str:
    place, held = coordinates(rank, layout), expert_coordinates(rank, layout)
    context = f" C{place.cp_rank}" if layout.cp > 1 else ""
    parts = ((layout.ep, held.ep_rank), (layout.etp, held.etp_rank))
    experts = ".".join(str(part) for degree, part in parts if degree > 1)
    return f"S{place.pp_rank} R{place.dp_rank}{context}" + (f" E{experts}" if experts else "")


def _words(layout: Layout) -> str:
    return (
        f"{counted(layout.num_devices, 'rank')} on {counted(layout.num_nodes, 'node')}: "
        f"{counted(layout.pp, 'pipeline stage')}, {counted(layout.dp, 'data-parallel replica')}, "
        f"tensor-parallel groups of {layout.tp_ranks}"
        + (f" in {counted(layout.tp_columns, 'column')}" if layout.tp_columns > 1 else "")
        + (f", context-parallel groups of {layout.cp}" if layout.cp > 1 else "")
        + (f", expert-parallel groups of {layout.ep}" if layout.ep > 1 else "")
        + (f", expert-tensor-parallel groups of {layout.etp}" if layout.etp > 1 else "")
    )


def _notes(layout: Layout, nodes: Sequence[int], per_node: int, shown: int) -> list[str]:
    found = [
        "A box is a node, with its ranks; a cell is a device, with its pipeline stage (S, and a "
        "tint) and its data-parallel replica (R)."
        + (
            f" A frame holds a tensor-parallel group of {layout.tp_ranks}."
            if layout.tp_ranks > 1
            else ""
        )
    ]
    if layout.cp > 1:
        found.append(
            f"C is the rank of a context-parallel group: the {layout.cp} ranks with the same S, R "
            "and place in their frame share each sequence."
        )
    if layout.ep > 1:
        found.append(
            f"E numbers the {layout.ep} shares of each layer's experts: devices with the same S and E "
            "hold the same experts, and a group of all shares exchanges tokens."
            + (
                f" After the dot: the {layout.etp} parts of their weights."
                if layout.etp > 1
                else ""
            )
        )
    elif layout.etp > 1:
        found.append(
            f"E numbers the {layout.etp} parts of each expert's weights: devices with the same S and E "
            "hold the same part of all experts."
        )
    ends = (("S0", "embedding"), (f"S{layout.pp - 1}", "head"))
    for (stage, end), counts in zip(ends, layout.counted_ends, strict=True):
        if counts:
            found.append(f"{stage} has one layer fewer: its {end} counts as a layer.")
    if layout.is_written_out:
        found.append(f"The stages have these layers: {layout.pipeline_layout}.")
    if layout.is_v_shaped:
        found.append("S is the rank of a V: S0 has the first and the last stage.")
    if len(nodes) < layout.num_nodes:
        of = "each" if layout.pp <= MAX_NODES else f"the first and the last {MAX_NODES // 2}"
        stages = "pipeline stage" if layout.pp <= MAX_NODES else "pipeline stages"
        found.append(
            f"Drawn are {len(nodes)} of {layout.num_nodes:,} nodes: the first of {of} {stages}. "
            "The other nodes hold the further replicas of the stages in the same order."
        )
    if shown < per_node:
        found.append(f"Drawn are the first {shown} of the {per_node:,} devices of a node.")
    return found
