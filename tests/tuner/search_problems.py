"""Problems for the tests of strategies: listed layouts, with a model and a cluster."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.layouts.layout import LAYOUT_FIELDS, Layout
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns, codes_of
from layout_tuner.search_spaces.models.model_presets import resolve_model
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.search_spaces.spaces.search_space import EVERY_ROW
from layout_tuner.tuner.strategies.ask_and_tell import LayoutSet
from layout_tuner.tuner.strategies.search_problem import SearchProblem
from layout_tuner.units import GIB


class ListedLayouts:
    """A layout set that is written out."""

    def __init__(self, layouts: Iterable[Layout]) -> None:
        self._layouts = list(layouts)
        self._positions = {layout: i for i, layout in enumerate(self._layouts)}

    def __len__(self) -> int:
        return len(self._layouts)

    def column(self, knob: str) -> NDArray[np.int64]:
        return codes_of(knob, (getattr(layout, knob) for layout in self._layouts))

    def columns(self, rows: slice = EVERY_ROW) -> LayoutColumns:
        return LayoutColumns(**{name: self.column(name)[rows] for name in LAYOUT_FIELDS})

    def layout(self, index: int) -> Layout:
        return self._layouts[index]

    def index_of(self, layout: Layout) -> int | None:
        return self._positions.get(layout)


def make_cluster(**changes: Any) -> Cluster:
    """Four nodes of eight devices of 40 GiB, not far from an A100."""
    values: dict[str, Any] = {
        "name": "test-cluster",
        "device": "test device",
        "num_nodes": 4,
        "devices_per_node": 8,
        "device_memory_bytes": 40 * GIB,
        "peak_flops_per_s": {"fp32": 20e12, "bf16": 300e12, "fp16": 300e12},
        "memory_bandwidth_bytes_per_s": 2e12,
        "intra_node_bandwidth_bytes_per_s": {2: 200e9, 4: 200e9, 8: 200e9},
        "inter_node_bandwidth_bytes_per_s": 25e9,
    }
    return Cluster(**values | changes)


def make_problem(layouts: LayoutSet, **changes: Any) -> SearchProblem:
    """The search for the best of some layouts, of a model of 1.3 billion parameters by default."""
    model: ModelShape = resolve_model("gpt-1.3b")
    values: dict[str, Any] = {"model": model, "cluster": make_cluster()}
    return SearchProblem(layouts=layouts, **values | changes)
