"""A measurement table as values: cells of rows, each a layout and what became of it."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, Self

from layout_tuner.documents.reading import is_positive_number, shown
from layout_tuner.errors import TableInvalidError
from layout_tuner.protocol.measurement import IMPORTED_TRAINER
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.jobs.job_choices import NO_CHOICES, JobChoices
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_fields import ATTENTION_FIELDS
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.search_spaces.tables.columns import STATUSES
from layout_tuner.search_spaces.tables.variants import (
    Identity,
    Variant,
    differences,
    variant_of,
)
from layout_tuner.trainers.embedded import EMBEDDED_TRAINER
from layout_tuner.trainers.simulator import SIMULATED, is_simulator, says_simulated

Status = Literal["completed", "out_of_memory", "failed"]
"""out_of_memory: the layout does not fit. failed: it did not run, for another or unknown reason."""

OWN_SOURCE: Final = "layout-tuner campaign"
"""The beginning of the source of tables that a service of this project measured."""
_WITH: Final = " with "
"""Before the name of another trainer than the embedded one; names of campaigns have no space."""

MAX_REPEAT_RATIO: Final = 2.0
"""Repeats of a layout contradict each other if their step times differ by this factor or more."""

_FILE_NAME: Final = re.compile(r"[^.\s]+\.(csv|tsv|json|jsonl|xlsx|parquet|txt|log)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class TableRow:
    """One measurement, or one failed run; TableInvalidError if status and figures contradict."""

    layout: Layout
    status: Status
    tokens_per_s: float | None = None
    """Throughput of the whole job; stated if and only if completed."""
    step_time_s: float | None = None
    """Seconds per iteration; stated if and only if completed."""
    peak_memory_bytes: int | None = None
    """Peak of the fullest device, where it was measured."""
    number: int = 0
    """The row's place in its table, from 1; 0: it was not read from one."""
    line: int = 0
    """The line of the file that the row ends on; 0: it was not read from one."""
    unstated: tuple[str, ...] = ()
    """Columns of knobs that the table leaves empty; the defaults are assumed."""
    aside: Mapping[str, str] = field(default_factory=dict)
    """Columns that the format does not know, kept as they are."""

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise TableInvalidError(
                f"status={shown(self.status)} is not one of {', '.join(STATUSES)}"
            )
        figures = {"tokens_per_s": self.tokens_per_s, "step_time_s": self.step_time_s}
        for name, value in (figures | {"peak_memory_bytes": self.peak_memory_bytes}).items():
            if value is not None and not is_positive_number(value):
                raise TableInvalidError(f"{name}={shown(value)} is not a finite number over 0")
        for name, value in figures.items():
            if (value is None) == (self.status == "completed"):
                has = "is empty" if value is None else f"is {value:g}"
                raise TableInvalidError(
                    f"status is {self.status} and {name} {has}; a completed row has it, no other does"
                )

    @property
    def identity(self) -> Identity:
        """Its layout, and how else it was run: rows with the same identity are repeats."""
        return self.layout, variant_of(self.aside)

    @property
    def name(self) -> str:
        """The row as messages call it."""
        if not self.number:
            return f"layout {self.layout.key}"
        return f"row {self.number} (line {self.line})"


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class CellKey:
    """The values that all rows of a cell share; a cell is one campaign's worth of layouts."""

    source: str
    cluster: str
    model: str
    seq_length: int
    num_devices: int
    global_batch_size: int
    attention: str = ""
    """As `ModelShape.attention`; empty: not stated."""
    attention_dropout: float | None = None
    hidden_dropout: float = 0.0

    @classmethod
    def of(cls, source: str, cluster: Cluster, model: ModelShape, layout: Layout) -> Self:
        """The key of the cell that a layout belongs to."""
        return cls(
            source=source,
            cluster=cluster.name,
            model=model.name,
            seq_length=model.seq_length,
            num_devices=layout.num_devices,
            global_batch_size=layout.global_batch_size,
            attention=model.attention or "",
            attention_dropout=model.attention_dropout,
            hidden_dropout=model.hidden_dropout,
        )

    @property
    def is_simulated(self) -> bool:
        """Whether the source says that the rows are simulated."""
        return says_simulated(self.source)

    @property
    def software(self) -> str:
        """The software that ran the layouts, by the source; empty: this project's own trainer.

        For campaigns of a service it is their trainer.

        Names of files are left out, since measurements of one origin come in several files: "vTrain
        MICRO24 ground_truth_single.csv" and "... ground_truth_multi.csv" are both "vTrain MICRO24".
        """
        return software_of_source(self.source)

    def __str__(self) -> str:
        names = ("seq_length", "global_batch_size", *ATTENTION_FIELDS)
        values = {name: getattr(self, name) for name in names}
        if self.attention_dropout == 0:
            values["attention_dropout"] = "0"
        stated = [f"{name}={value}" for name, value in values.items() if value]
        return ", ".join((f"{self.model} on {self.num_devices} x {self.cluster}", *stated))


def own_source(campaign: str, trainer: str, *, seed: int = 0) -> str:
    """The source of what a campaign of a service measured; of a simulated one, with its seed."""
    if is_simulator(trainer):
        return f"{SIMULATED} by {trainer}, seed {seed}: {OWN_SOURCE} {campaign}"
    other = "" if trainer in (EMBEDDED_TRAINER, IMPORTED_TRAINER) else f"{_WITH}{trainer}"
    return f"{OWN_SOURCE} {campaign}{other}"


def software_of_source(source: str) -> str:
    """See `CellKey.software`."""
    if source.startswith(OWN_SOURCE):
        return source.partition(_WITH)[2]
    words = source.split()
    return " ".join(word for word in words if not _FILE_NAME.fullmatch(word)) or source


@dataclass(frozen=True, kw_only=True, slots=True)
class TableCell:
    """The rows of one campaign; TableInvalidError if they contradict each other or the key."""

    key: CellKey
    model: ModelShape
    cluster: Cluster
    """The machine, with as many nodes as the layouts take."""
    rows: tuple[TableRow, ...]
    """In the order of the table."""
    job: JobChoices = NO_CHOICES
    """The job knobs that some row sets, with the values that rows have."""

    def __post_init__(self) -> None:
        for row in self.rows:
            _refuse_foreign(self.key, row)
        for repeats in _by_identity(self.rows).values():
            _refuse_contradictions(repeats)

    @property
    def merged(self) -> tuple[TableRow, ...]:
        """One row an identity, in the order of the first of each.

        Of repeats that completed the median counts (by step time; of two the mean), and a repeat
        that failed is forgotten: it shows that a run can crash, not that the layout does.
        """
        return tuple(_merge(repeats) for repeats in _by_identity(self.rows).values())

    def differences(self) -> dict[Identity, Variant]:
        """By identity, what parts it from others of its layout; see `variants.differences`."""
        return differences(row.identity for row in self.rows)

    @property
    def num_completed(self) -> int:
        return sum(row.status == "completed" for row in self.rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasurementTable:
    """Cells of measurements, and the assumptions of their reader."""

    cells: tuple[TableCell, ...]
    """In the order of their first rows."""
    notes: tuple[str, ...] = ()
    """Assumptions about values that the table does not state, as sentences."""
    aside_columns: tuple[str, ...] = ()
    """Names of the columns that the format does not know, in their order."""

    @property
    def rows(self) -> tuple[TableRow, ...]:
        """Every row in the order of the table."""
        rows = [row for cell in self.cells for row in cell.rows]
        return tuple(sorted(rows, key=lambda row: row.number))


def _by_identity(rows: tuple[TableRow, ...]) -> dict[Identity, list[TableRow]]:
    groups: dict[Identity, list[TableRow]] = {}
    for row in rows:
        groups.setdefault(row.identity, []).append(row)
    return groups


def _refuse_foreign(key: CellKey, row: TableRow) -> None:
    stated: dict[str, Any] = {
        "num_devices": (row.layout.num_devices, key.num_devices),
        "global_batch_size": (row.layout.global_batch_size, key.global_batch_size),
    }
    for name, (own, cells) in stated.items():
        if own != cells:
            raise TableInvalidError(f"{row.name}: {name}={own} in a cell of {name}={cells}")


def _refuse_contradictions(repeats: list[TableRow]) -> None:
    """Of one layout: it fits or it does not, and it is not both fast and slow."""
    first = {row.status: row for row in reversed(repeats)}
    if "completed" in first and "out_of_memory" in first:
        fits, fails = first["completed"], first["out_of_memory"]
        raise TableInvalidError(
            f"{fits.name} and {fails.name} contradict each other: the same layout "
            f"{fits.layout.key} of the same cell is completed in one and out_of_memory in the other"
        )
    timed = sorted((row.step_time_s, row.name) for row in repeats if row.step_time_s is not None)
    if timed and timed[-1][0] >= 0.999 * MAX_REPEAT_RATIO * timed[0][0]:
        (low, fast), (high, slow) = timed[0], timed[-1]
        raise TableInvalidError(
            f"{fast} and {slow} contradict each other: the same layout {repeats[0].layout.key} of "
            f"the same cell takes {low:g} s in one and {high:g} s in the other, a factor of "
            f"{MAX_REPEAT_RATIO:g} apart or more"
        )


def _merge(repeats: list[TableRow]) -> TableRow:
    completed = [row for row in repeats if row.status == "completed"]
    if not completed:
        out_of_memory = [row for row in repeats if row.status == "out_of_memory"]
        return (out_of_memory or repeats)[0]
    if len(completed) == 1:
        return completed[0]
    step_time_s = statistics.median(row.step_time_s or 0.0 for row in completed)
    tokens = statistics.median(
        (row.tokens_per_s or 0.0) * (row.step_time_s or 0.0) for row in completed
    )
    peaks = [row.peak_memory_bytes for row in completed if row.peak_memory_bytes is not None]
    return replace(
        completed[0],
        step_time_s=step_time_s,
        tokens_per_s=tokens / step_time_s,
        peak_memory_bytes=max(peaks, default=None),
    )
