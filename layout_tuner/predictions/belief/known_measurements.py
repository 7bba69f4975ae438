"""Measurements of other campaigns and of tables, which calibrate the estimates of a search."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from layout_tuner.predictions.belief.observation import (
    ObservationInvalidError,
    ObservationState,
    refuse_unless_positive,
)
from layout_tuner.search_spaces.clusters.cluster import UNKNOWN_DEVICE, Cluster
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.search_spaces.tables import TableCell, read_table
from layout_tuner.search_spaces.tables.selection import CellFilter, refuse_simulated, select

_STATES: Final[dict[str, ObservationState]] = {
    "completed": "completed",
    "out_of_memory": "infeasible",
    "failed": "failed",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A measured or failed run of one layout; ObservationInvalidError if it contradicts itself."""

    model: ModelShape
    cluster: Cluster
    layout: Layout
    state: ObservationState
    """Whether it ran, and if not, why."""
    step_time_s: float | None = None
    """Seconds an optimizer step; there if and only if completed."""
    peak_memory_bytes: int | None = None
    """Peak of the fullest rank, where that was measured."""
    software: str = ""
    """The training software; measurements with equal texts may be pooled. Empty: not stated."""

    def __post_init__(self) -> None:
        if (self.state == "completed") != (self.step_time_s is not None):
            raise ObservationInvalidError(
                f"state={self.state!r} does not go with step_time_s={self.step_time_s!r}; a "
                "completed sample has a step time, any other has none"
            )
        refuse_unless_positive(
            step_time_s=self.step_time_s, peak_memory_bytes=self.peak_memory_bytes
        )


ELSEWHERE: Final = "elsewhere"
"""The campaign of samples from other campaigns and tables."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Knowledge:
    """Samples of other campaigns and tables, which calibrate a search from its start."""

    samples: tuple[Sample, ...] = ()
    """In the order in which they were taken."""

    def __len__(self) -> int:
        return len(self.samples)

    def __iter__(self) -> Iterator[Sample]:
        return iter(self.samples)

    def on(self, cluster: Cluster) -> Knowledge:
        """The same for a search on this cluster: samples of the same machine get its constants.

        Their campaigns may have described it with wrong ones. The same machine has the same name,
        device and devices per node; others keep their constants. The memory of a device stays that
        of the sample, since a probe may use no more than its campaign states.
        """
        # By identity, by which fits group samples too.
        clusters = {id(sample.cluster): sample.cluster for sample in self.samples}
        ours = {key: _described_as(theirs, cluster) for key, theirs in clusters.items()}
        return Knowledge(
            samples=tuple(
                sample
                if ours[id(sample.cluster)] is sample.cluster
                else replace(sample, cluster=ours[id(sample.cluster)])
                for sample in self.samples
            )
        )


def _described_as(theirs: Cluster, cluster: Cluster) -> Cluster:
    """The cluster of a sample, with the constants of this one where it is the same machine."""
    if (theirs.name, theirs.devices_per_node) != (cluster.name, cluster.devices_per_node):
        return theirs
    if theirs.device not in (cluster.device, UNKNOWN_DEVICE):
        return theirs
    ours = replace(
        cluster, device_memory_bytes=theirs.device_memory_bytes, num_nodes=theirs.num_nodes
    )
    is_same = ours.is_measured == theirs.is_measured
    return theirs if is_same and replace(ours, source=theirs.source) == theirs else ours


def read_calibrating_cells(
    described: str, *, may_be_simulated: bool = False
) -> tuple[TableCell, ...]:
    """The cells of `TABLE`, or the cells of `TABLE:KEY=VALUE,...` that match the filter.

    Raises:
        TableInvalidError: it cannot be read, no cell is selected, or one is simulated: simulated
            figures calibrate nothing that is to be measured.
    """
    path, colon, text = described.rpartition(":")
    if not colon or "=" not in text or Path(described).exists():
        path, text = described, ""
    cells = select(read_table(Path(path)), (CellFilter.read(text),))
    if not may_be_simulated:
        refuse_simulated(cells)
    return cells


def knowledge_of(cells: Iterable[TableCell]) -> Knowledge:
    """The rows of some cells as samples, in their order; repeats of a layout count once."""
    return Knowledge(
        samples=tuple(
            Sample(
                model=cell.model,
                cluster=cell.cluster,
                layout=row.layout,
                state=_STATES[row.status],
                step_time_s=row.step_time_s,
                peak_memory_bytes=row.peak_memory_bytes,
                software=cell.key.software,
            )
            for cell in cells
            for row in cell.merged
        )
    )
