"""Many layouts at once: one array a layout field, of shapes that broadcast against each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

import numpy as np

from layout_tuner.array_types import Bools, Floats, Ints
from layout_tuner.search_spaces.layouts.job_settings import NO_SETTINGS, JobSettings
from layout_tuner.search_spaces.layouts.layout import KNOBS, LAYOUT_FIELDS, PRECISIONS, Layout
from layout_tuner.search_spaces.layouts.narrow_formats import NARROW, NarrowFormat, wide_precision

Codes = Ints

NO_JOBS: Final = (NO_SETTINGS,)
"""The job settings of layouts alone."""

_ARRAYS: Final = (*LAYOUT_FIELDS, "job")


def code_of(knob: str, value: Any) -> int:
    """The number that stands for `value` in a column (see `Knob.code`).

    A column of strings would take five times the memory and ten times as long to compare.
    """
    return KNOBS[knob].code(value)


def codes_of(knob: str, values: Iterable[Any]) -> Codes:
    """`code_of` each of the values."""
    return np.array([code_of(knob, value) for value in values], dtype=np.int64)


_WIDE: Final = codes_of("precision", map(wide_precision, PRECISIONS))


def wide_codes(precision: Codes) -> Codes:
    """The codes of the types of what stays wide (`narrow_formats.wide_precision`)."""
    return _WIDE[precision]


def of_narrow(precision: Codes, of: Callable[[NarrowFormat], float]) -> Floats:
    """A number of the narrow format of each code; 0 for wide types."""
    values = [of(NARROW[each]) if each in NARROW else 0.0 for each in PRECISIONS]
    return np.array(values, dtype=np.float64)[precision]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayoutColumns:
    """Layouts as columns; fields and properties are those of `Layout`, each an array of values.

    The shapes need not be equal, only broadcast: over a grid of knobs each column varies along its
    own axis, so that whatever is computed from two knobs costs the product of those two alone.
    The fields are written out because type checkers know no others; a test holds them to `KNOBS`.
    """

    num_nodes: Ints
    tp: Ints
    tp_columns: Ints
    cp: Ints
    pp: Ints
    dp: Ints
    ep: Ints
    etp: Ints
    vpp: Ints
    schedule: Codes
    cp_comm_type: Codes
    pipeline_split: Codes
    rank_order: Codes
    micro_batch_size: Ints
    num_microbatches: Ints
    zero_stage: Ints
    zero_replicas: Ints
    recompute: Codes
    sequence_parallel: Codes
    precision: Codes
    job: Ints = field(default_factory=lambda: np.zeros((), dtype=np.int64))
    """Positions of each layout's job settings among `jobs`."""
    jobs: tuple[JobSettings, ...] = NO_JOBS

    @classmethod
    def of(cls, layouts: Layout | Self) -> Self:
        """Columns of one layout: arrays without an axis."""
        if not isinstance(layouts, Layout):
            return layouts
        values = {name: code_of(name, getattr(layouts, name)) for name in LAYOUT_FIELDS}
        columns = {name: np.asarray(value) for name, value in values.items()}
        return cls(**columns, jobs=(layouts.job,))

    @classmethod
    def of_each(cls, layouts: Iterable[Layout]) -> Self:
        """Columns of several layouts, in their order."""
        listed = list(layouts)
        jobs = {NO_SETTINGS: 0}
        job = [jobs.setdefault(layout.job, len(jobs)) for layout in listed]
        columns = {
            name: codes_of(name, (getattr(layout, name) for layout in listed))
            for name in LAYOUT_FIELDS
        }
        return cls(**columns, job=np.array(job, dtype=np.int64), jobs=tuple(jobs))

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """The layouts of several columns of one axis each, one after the other."""
        jobs: dict[JobSettings, int] = {NO_SETTINGS: 0}
        job = []
        for part in parts:
            places = np.array([jobs.setdefault(each, len(jobs)) for each in part.jobs])
            job.append(np.broadcast_to(places[part.job], part.tp.shape))
        columns = {
            name: np.concatenate([getattr(part, name) for part in parts]) for name in LAYOUT_FIELDS
        }
        return cls(**columns, job=np.concatenate(job), jobs=tuple(jobs))

    def flattened(self) -> Self:
        """The same layouts as columns with one axis, of equal length."""
        arrays = np.broadcast_arrays(*(np.atleast_1d(getattr(self, name)) for name in _ARRAYS))
        flat = (array.reshape(-1) for array in arrays)
        return type(self)(**dict(zip(_ARRAYS, flat, strict=True)), jobs=self.jobs)

    def rows(self, rows: slice | Ints | Bools) -> Self:
        """Some of the layouts along the first axis; a column that does not vary there stays."""
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        length = max(array.shape[:1] for array in arrays.values())
        some = {name: each[rows] for name, each in arrays.items() if each.shape[:1] == length}
        return replace(self, **some)

    def firsts(self) -> Self:
        """The first layout of each row of columns that have two axes; others are returned."""
        arrays = ((name, getattr(self, name)) for name in _ARRAYS)
        return replace(self, **{name: array[:, 0] for name, array in arrays if array.ndim > 1})

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of all columns together."""
        return np.broadcast_shapes(*(getattr(self, name).shape for name in _ARRAYS))

    @property
    def num_devices(self) -> Ints:
        return self.tp_ranks * self.cp * self.pp * self.dp

    @property
    def tp_ranks(self) -> Ints:
        return self.tp * self.tp_columns

    @property
    def dp_cp(self) -> Ints:
        return self.dp * self.cp

    @property
    def edp(self) -> Ints:
        return np.maximum(self.tp * self.dp_cp // (self.etp * self.ep), 1)

    @property
    def counted_ends(self) -> tuple[Ints, Ints]:
        # The bits of the code: embedding is 1, head is 2, embedding_and_head is 3.
        is_cut = self.pp > 1
        return (self.pipeline_split & 1) * is_cut, (self.pipeline_split >> 1) * is_cut

    @property
    def zero_group_size(self) -> Ints:
        return np.where(self.zero_stage > 0, np.maximum(self.dp_cp // self.zero_replicas, 1), 1)

    @property
    def expert_zero_group_size(self) -> Ints:
        return np.where(self.zero_stage > 0, np.maximum(self.edp // self.zero_replicas, 1), 1)

    @property
    def global_batch_size(self) -> Ints:
        return self.dp * self.micro_batch_size * self.num_microbatches
