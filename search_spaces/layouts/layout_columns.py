"""Many layouts at once: one array a layout field, of shapes that broadcast against each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

import numpy as np

from layout_tuner.array_types import Bools, Floats, Ints
from layout_tuner.documents.reading import MAX_COUNT
from layout_tuner.search_spaces.layouts.job_settings import NO_SETTINGS, JobSettings
from layout_tuner.search_spaces.layouts.layout import (
    KNOBS,
    LAYOUT_FIELDS,
    PRECISIONS,
    SCHEDULES,
    Layout,
)
from layout_tuner.search_spaces.layouts.narrow_formats import NARROW, NarrowFormat, wide_precision
from layout_tuner.search_spaces.layouts.pipeline_layout import SPLIT, stage_layers
from layout_tuner.search_spaces.layouts.recomputation import (
    RECOMPUTE_CHOICES,
    RECOMPUTE_MODES,
    RECOMPUTE_MODULES,
    layers_by_rank,
    modules_of,
)
from layout_tuner.search_spaces.layouts.schedules import V_SLOTS, splits_backward

Codes = Ints

NO_JOBS: Final = (NO_SETTINGS,)
"""The job settings of layouts alone."""

_TEXT_KNOBS: Final = tuple(name for name, knob in KNOBS.items() if knob.is_text)

_ARRAYS: Final = (*LAYOUT_FIELDS, "job")

_REPEATS: Final = {
    module: np.array([module in modules_of(choice) for choice in RECOMPUTE_CHOICES])
    for module in RECOMPUTE_MODULES
}


def code_of(knob: str, value: Any) -> int:
    """The number that stands for `value` in a column (see `Knob.code`).

    A column of strings would take five times the memory and ten times as long to compare.
    """
    return KNOBS[knob].code(value)


def codes_of(knob: str, values: Iterable[Any]) -> Codes:
    """`code_of` each of the values."""
    return np.array([code_of(knob, value) for value in values], dtype=np.int64)


# By the code of the schedule: a look-up takes a tenth of the time of `np.isin`.
_V_SHAPED: Final = np.array([name in V_SLOTS for name in SCHEDULES])
_SPLITTING: Final = np.array([splits_backward(name) for name in SCHEDULES])


def texts_of(values: Callable[[str], Iterable[Any]]) -> Mapping[int, str]:
    """The free texts among the values of each knob, by their codes."""
    return {
        code_of(name, value): value
        for name in _TEXT_KNOBS
        for value in set(values(name)).difference(KNOBS[name].choices)
    }


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
    pipeline_layout: Codes
    rank_order: Codes
    micro_batch_size: Ints
    num_microbatches: Ints
    zero_stage: Ints
    zero_replicas: Ints
    recompute: Codes
    recompute_layers: Codes
    offload: Codes
    optimizer_states: Codes
    sequence_parallel: Codes
    precision: Codes
    job: Ints = field(default_factory=lambda: np.zeros((), dtype=np.int64))
    """Positions of each layout's job settings among `jobs`."""
    jobs: tuple[JobSettings, ...] = NO_JOBS
    texts: Mapping[int, str] = field(default_factory=dict)
    """The free texts of all knobs by their codes (`Knob.code`); others may be among them."""

    @classmethod
    def of(cls, layouts: Layout | Self) -> Self:
        """Columns of one layout: arrays without an axis."""
        if not isinstance(layouts, Layout):
            return layouts
        values = {name: code_of(name, getattr(layouts, name)) for name in LAYOUT_FIELDS}
        columns = {name: np.asarray(value) for name, value in values.items()}
        texts = texts_of(lambda name: (getattr(layouts, name),))
        return cls(**columns, jobs=(layouts.job,), texts=texts)

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
        texts = texts_of(lambda name: (getattr(layout, name) for layout in listed))
        return cls(**columns, job=np.array(job, dtype=np.int64), jobs=tuple(jobs), texts=texts)

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
        texts = {code: text for part in parts for code, text in part.texts.items()}
        return cls(**columns, job=np.concatenate(job), jobs=tuple(jobs), texts=texts)

    def flattened(self) -> Self:
        """The same layouts as columns with one axis, of equal length."""
        each = np.broadcast_arrays(*(np.atleast_1d(getattr(self, name)) for name in _ARRAYS))
        flat = (array.reshape(-1) for array in each)
        arrays = dict(zip(_ARRAYS, flat, strict=True))
        return type(self)(**arrays, jobs=self.jobs, texts=self.texts)

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

    def words(self, knob: str) -> tuple[Sequence[str], Ints]:
        """The words and texts that a knob of free text may have here, and each layout's place."""
        column, words = getattr(self, knob), KNOBS[knob].choices
        if not self.texts:
            return words, column
        # Sorting the column would take longer than all that is computed of it.
        fits = {code: text for code, text in self.texts.items() if not KNOBS[knob].problem(text)}
        codes = [*range(len(words)), *sorted(fits)]
        return [*words, *(fits[code] for code in sorted(fits))], np.searchsorted(codes, column)

    @property
    def is_v_shaped(self) -> Bools:
        return _V_SHAPED[self.schedule]

    @property
    def last_rank(self) -> Ints:
        """The pipeline rank that has the output: the first one of a V."""
        return np.where(self.is_v_shaped & (self.vpp == 2), 0, self.pp - 1)

    @property
    def splits_backward(self) -> Bools:
        """Where backward passes leave out the products of weight gradients."""
        return _SPLITTING[self.schedule]

    @property
    def recomputes_modules(self) -> Bools:
        """Where modules of a layer are recomputed that no mode names."""
        return self.recompute >= len(RECOMPUTE_MODES)

    def repeats(self, module: str) -> Bools:
        """Where a module of `RECOMPUTE_MODULES` is recomputed without the rest of its layer."""
        return _REPEATS[module][self.recompute]

    def of_recompute_layers(self, of: Callable[[tuple[int, ...]], int]) -> Ints:
        """A number of the layers that recompute by pipeline rank; all of them are no numbers."""
        words, places = self.words("recompute_layers")
        return np.array([of(layers_by_rank(word)) for word in words], dtype=np.int64)[places]

    def recomputing_share(self, stage: Ints, layers: Floats) -> Floats | None:
        """Share of a stage's layers that recompute. None: all of them, everywhere."""
        if not self.recompute_layers.any():
            return None
        words, places = self.words("recompute_layers")
        numbers = [layers_by_rank(word) or (MAX_COUNT,) for word in words]
        most = max(map(len, numbers))
        table = np.array([[*each, *each[-1:] * (most - len(each))] for each in numbers])
        found = table[places, np.minimum(stage, most - 1)] * self.vpp
        return np.asarray(np.minimum(found / np.maximum(layers, 1.0), 1.0), dtype=np.float64)

    def recomputing_shares(
        self, num_layers: int, of_rank: Callable[[Ints], Floats] | None = None
    ) -> tuple[Floats, Floats] | None:
        """Shares of all layers that recompute, and of those of the slowest stage.

        `of_rank` has the layers of a pipeline rank; None: an even split. A layer that recomputes
        takes a third longer. None: all of them, everywhere.
        """
        if not self.recompute_layers.any():
            return None
        even = np.asarray(num_layers / self.pp)
        lengths = np.maximum(self.of_recompute_layers(len), 1)
        if of_rank is not None:
            lengths = np.maximum(lengths, np.where(self.pipeline_layout != 0, self.pp, 1))
        total, most, slowest = np.zeros(()), np.zeros(()), np.zeros(())
        for rank in range(int(lengths.max())):
            layers = even if of_rank is None else of_rank(np.asarray(rank))
            each = self.recomputing_share(np.asarray(rank), layers)
            assert each is not None, "some layouts have a number"
            of_even = layers / even
            time = np.where(rank < lengths, of_even * (3.0 + each), 0.0)
            total = total + np.where(rank < lengths, of_even * each, 0.0)
            most, slowest = np.where(time > slowest, each, most), np.maximum(time, slowest)
        return total / lengths, most

    def of_stages(self, of: Callable[[tuple[int, ...]], int]) -> Ints:
        """A number of the layers of each stage, for pipelines that are written out; else 0."""
        words, places = self.words("pipeline_layout")
        numbers = [0 if word == SPLIT else of(stage_layers(word)) for word in words]
        return np.array(numbers, dtype=np.int64)[places]

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
        is_cut = (self.pp > 1) & (self.pipeline_layout == 0)
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


def different_combinations(knobs: Sequence[Ints]) -> tuple[Ints, Ints]:
    """The different combinations of numbers, a column each, and the place of each layout's.

    Combinations are compared as one number: rows of an array take 50 times as long to sort.
    """
    each = np.broadcast_arrays(*knobs)
    codes = np.zeros(each[0].shape, dtype=np.int64)
    for knob in each:
        _, places = np.unique(knob, return_inverse=True)
        codes = codes * (int(places.max()) + 1) + places.reshape(codes.shape)
    _, firsts, place = np.unique(codes, return_index=True, return_inverse=True)
    return np.stack([knob.reshape(-1)[firsts] for knob in each]), place.reshape(codes.shape)
