"""The search space: the choices of every knob, and the set of legal layouts among them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from layout_tuner.array_types import Bools, Ints
from layout_tuner.documents.reading import (
    MAX_COUNT,
    Problems,
    read_fields_of,
    read_mapping,
    shown,
    switch_problem,
)
from layout_tuner.errors import NoLegalLayoutError, SpaceInvalidError
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.jobs.job_choices import NO_CHOICES, JobChoices
from layout_tuner.search_spaces.layouts.global_batch import GlobalBatch
from layout_tuner.search_spaces.layouts.knobs import read_choices
from layout_tuner.search_spaces.layouts.layout import DEGREES, KNOBS, LAYOUT_FIELDS, Layout
from layout_tuner.search_spaces.layouts.layout_columns import (
    NO_JOBS,
    LayoutColumns,
    codes_of,
    texts_of,
)
from layout_tuner.search_spaces.legality_rules import ALL_SCOPES, RULES
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.search_spaces.rule import RuleContext, Scope

MAX_COMBINATIONS: Final = 5_000_000
"""Most combinations of a space. All of them may be legal; with more, the memory estimate and the
encoding for a strategy would take longer than a few seconds."""

SPACE_FIELDS: Final = (
    "global_batch_size",
    *LAYOUT_FIELDS,
    "job",
    "allow_tp_across_nodes",
    "auto",
)
"""Fields of a space's document. The precision is by default the cluster's, and never of 8
bits or fewer (`Cluster.default_precision`)."""

DERIVABLE: Final = ("dp", "num_microbatches")
"""Knobs that follow from the others where they are left out."""

EVERY_ROW: Final = slice(None)


@dataclass(frozen=True, init=False)
class SearchSpace:
    """The choices of every knob of a layout.

    It is made of `SPACE_FIELDS` by name. A knob is a scalar, a list or a range (see
    `search_spaces.layouts.knobs`). Missing knobs have the default of `Layout`; a campaign that is
    submitted gets others (`search_spaces.campaigns.default_space`).

    Raises:
        SpaceInvalidError: at construction; the message begins with the knob.
    """

    global_batch: GlobalBatch
    """Sequences a step: from a number, or bounds `{min:, max:}`. There is no default."""
    choices: Mapping[str, tuple[Any, ...]] = field(hash=False)
    """By knob, in the canonical order, its choices in the given order. `DERIVABLE` knobs that are
    left out are not among them. Then there are as many replicas as fill the nodes, and as many
    micro-batches as a fixed batch takes; with bounds the micro-batches are a knob."""
    allow_tp_across_nodes: bool
    """Whether a tensor-parallel group may span nodes."""
    job: JobChoices
    """The trainer's own knobs that are searched beside those of the layout."""
    auto: tuple[str, ...]
    """Knobs that the document left out, and whose choices the service made of the model and the
    cluster (`search_spaces.campaigns.default_space`)."""

    def __init__(
        self,
        *,
        global_batch_size: Any = None,
        allow_tp_across_nodes: bool = False,
        job: JobChoices | Mapping[str, Any] = NO_CHOICES,
        auto: Sequence[str] = (),
        **knobs: Any,
    ) -> None:
        if wrong := knobs.keys() - KNOBS.keys():
            raise TypeError(f"a space has no knobs {', '.join(sorted(wrong))}")
        problems = Problems(SpaceInvalidError)
        read: dict[str, Any] = {"choices": {}, "allow_tp_across_nodes": allow_tp_across_nodes}
        with problems.collecting():
            read["global_batch"] = _read_batch(global_batch_size)
        for name, knob in KNOBS.items():
            value = knobs.get(name, None if name in DERIVABLE else knob.default)
            with problems.collecting():
                if value is not None:
                    read["choices"][name] = read_choices(knob, value)
                elif name not in DERIVABLE:
                    raise SpaceInvalidError(
                        "the value is null; leave it out for its default", field=name
                    )
        problems.note(switch_problem(allow_tp_across_nodes), field="allow_tp_across_nodes")
        with problems.collecting("job"):
            is_read = isinstance(job, JobChoices)
            read["job"] = job if is_read else JobChoices.of(job, {}, "")
        with problems.collecting():
            read["auto"] = read_auto(auto)
        problems.refuse()
        for name, value in read.items():
            object.__setattr__(self, name, value)
        self._check_accumulation()
        if self.num_combinations > MAX_COMBINATIONS:
            raise SpaceInvalidError(
                f"the space has {self.num_combinations} combinations, more than "
                f"{MAX_COMBINATIONS}; give some knob fewer values"
            )

    def _check_accumulation(self) -> None:
        batch = self.global_batch
        if batch.is_fixed and "num_microbatches" in self.choices:
            raise SpaceInvalidError(
                f"global_batch_size is fixed at {batch.minimum}, so that num_microbatches follows "
                "from it: leave it out, or bound the batch with {min:, max:}",
                field="num_microbatches",
            )
        if not batch.is_fixed and "num_microbatches" not in self.choices:
            raise SpaceInvalidError(
                f"global_batch_size is bounded ({batch.minimum} to {batch.maximum}), so that "
                "num_microbatches does not follow from it: give its values, or fix the batch",
                field="num_microbatches",
            )

    @property
    def knobs(self) -> tuple[str, ...]:
        """Layout fields that are chosen rather than derived, in the canonical order."""
        return tuple(self.choices)

    def values(self, knob: str) -> tuple[Any, ...]:
        """The choices of one knob; empty where it is derived."""
        return self.choices.get(knob, ())

    @property
    def shape(self) -> tuple[int, ...]:
        """How many choices each of `knobs` has."""
        return tuple(len(self.values(knob)) for knob in self.knobs)

    @property
    def num_combinations(self) -> int:
        """Combinations of all knobs, legal or not."""
        return math.prod(self.shape)

    def layout_of(self, chosen: Mapping[str, Any], devices_per_node: int) -> Layout:
        """The layout with some knobs, from which `dp` and `num_microbatches` follow where missing.

        With a bounded batch `num_microbatches` must not be missing.
        """
        knobs = dict(chosen)
        if "dp" not in knobs:
            devices = knobs["num_nodes"] * devices_per_node
            devices_of_replica = math.prod(knobs.get(name, 1) for name in _OTHER_DEGREES)
            knobs["dp"] = min(max(devices // devices_of_replica, 1), MAX_COUNT)
        if "num_microbatches" not in knobs:
            once = knobs["dp"] * knobs["micro_batch_size"]
            knobs["num_microbatches"] = max(self.global_batch.minimum // once, 1)
        return Layout(**knobs)

    def holds(self, layout: Layout, devices_per_node: int) -> bool:
        """Whether a legal layout is one of the combinations, on nodes of so many devices.

        Its job's settings are not looked at (`JobChoices.holds`).
        """
        layout = layout.without_job
        chosen = {knob: getattr(layout, knob) for knob in self.knobs}
        if any(value not in self.values(knob) for knob, value in chosen.items()):
            return False
        if "dp" not in self.choices and layout.num_devices != layout.num_nodes * devices_per_node:
            return False
        return self.layout_of(chosen, devices_per_node) == layout

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """Builds a space from its knobs by name; SpaceInvalidError if one is unknown or wrong."""
        values = read_mapping(mapping, SpaceInvalidError, "the search space")
        return read_fields_of(cls, values, SPACE_FIELDS, SpaceInvalidError, "knob")

    def to_mapping(self, *, every_knob: bool = False) -> dict[str, Any]:
        """The knobs by name as plain JSON values, ranges written out, derived knobs left out.

        New knobs at their default are left out too (`Knob.is_new`), unless every knob is asked for:
        a submitted space without a knob leaves its choices to the service.
        """
        mapping: dict[str, Any] = {"global_batch_size": self.global_batch.to_value()}
        for knob, choices in self.choices.items():
            value = choices[0] if len(choices) == 1 else list(choices)
            if every_knob or not KNOBS[knob].is_left_out(value):
                mapping[knob] = value
        if self.job:
            mapping["job"] = self.job.to_mapping()
        mapping["allow_tp_across_nodes"] = self.allow_tp_across_nodes
        return mapping | {"auto": list(self.auto)} if self.auto else mapping


def _read_batch(value: Any) -> GlobalBatch:
    if value is None:
        raise SpaceInvalidError(
            "there is none; tokens/s grow with the batch, so that layouts compare only at an "
            "equal one: give a number, or bounds {min:, max:}",
            field="global_batch_size",
        )
    return GlobalBatch.read(value)


def read_auto(value: object) -> tuple[str, ...]:
    """The knobs whose choices the service made; SpaceInvalidError if it is no list of knobs."""
    if not isinstance(value, (list, tuple)) or not all(
        isinstance(name, str) and name in KNOBS for name in value
    ):
        raise SpaceInvalidError(
            f"{shown(value)} is not a list of knobs; the service writes it, leave it out",
            field="auto",
        )
    return tuple(dict.fromkeys(value))


_OTHER_DEGREES: Final = tuple(name for name in DEGREES if name != "dp")


@dataclass(frozen=True, kw_only=True, slots=True)
class Exclusion:
    """What one rule keeps out of a space."""

    rule: str
    """Name of the rule."""
    count: int
    """Combinations that break it; a combination may break several rules."""
    example: str
    """The sentence of one of them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LegalSet:
    """The legal layouts of a space, by position: an index of 4 bytes each until one is read."""

    space: SearchSpace
    devices_per_node: int
    """Devices that a derived dp fills."""
    indices: Ints | NDArray[np.int32]
    """Positions of the legal combinations in the grid of all combinations, ascending."""
    exclusions: tuple[Exclusion, ...]
    """Rules that excluded layouts, the strictest first."""

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def num_combinations(self) -> int:
        """Combinations that were checked."""
        return self.space.num_combinations

    def layout(self, position: int) -> Layout:
        """The legal layout at `position`, from 0."""
        if not 0 <= position < len(self):
            raise IndexError(f"position {position} is not in 0 to {len(self) - 1}")
        return _layout_at(self.space, int(self.indices[position]), self.devices_per_node)

    def index_of(self, layout: Layout) -> int | None:
        """The position of `layout`, or None where it is not in the set."""
        index = 0
        for knob in self.space.knobs:
            choices = self.space.values(knob)
            value = getattr(layout, knob)
            if value not in choices:
                return None
            index = index * len(choices) + choices.index(value)
        # A key of another type would convert all indices.
        position = int(np.searchsorted(self.indices, self.indices.dtype.type(index)))
        if position == len(self) or self.layout(position) != layout:
            return None
        return position

    def only(self, layouts: Collection[Layout]) -> Self:
        """The set of these layouts alone; SpaceInvalidError if one of them is not in the set."""
        positions = []
        for layout in layouts:
            position = self.index_of(layout)
            if position is None:
                raise SpaceInvalidError(f"{layout.key} is not a legal layout of the space")
            positions.append(position)
        return replace(self, indices=self.indices[sorted(set(positions))])

    def column(self, knob: str, rows: slice | Ints = EVERY_ROW, /) -> Ints:
        """One field of the legal layouts, or of some: a whole number each (see `code_of`)."""
        indices = self.indices[rows]
        if knob in self.space.knobs:
            place, length = self.space.knobs.index(knob), len(self.space.values(knob))
            later = math.prod(self.space.shape[place + 1 :])
            choices = codes_of(knob, self.space.values(knob))
            if length == 1:
                return np.broadcast_to(choices, indices.shape)
            upper = indices // later
            # % takes four times as long.
            return np.take(choices, upper - upper // length * length)
        if knob == "dp":
            devices = self.column("num_nodes", rows) * self.devices_per_node
            return _filling_dp(devices, {name: self.column(name, rows) for name in _OTHER_DEGREES})
        dp, micro_batch_size = self.column("dp", rows), self.column("micro_batch_size", rows)
        return _accumulation(dp, micro_batch_size, self.space)

    def columns(self, rows: slice | Ints = EVERY_ROW, /) -> LayoutColumns:
        columns = {knob: self.column(knob, rows) for knob in LAYOUT_FIELDS}
        return LayoutColumns(**columns, jobs=NO_JOBS, texts=texts_of(self.space.values))

    def refuse_if_empty(self) -> None:
        """Raises NoLegalLayoutError, with what each rule excludes, where nothing is legal."""
        if len(self):
            return
        first = self.exclusions[0]
        counts = [f"{first.rule} excludes {first.count} (as: {first.example})"]
        counts += [f"{other.rule} {other.count}" for other in self.exclusions[1:]]
        raise NoLegalLayoutError(
            f"none of the {self.num_combinations} combinations is legal: {', '.join(counts)}"
        )


def enumerate_legal(
    space: SearchSpace,
    model: ModelShape,
    cluster: Cluster,
    *,
    scopes: Collection[Scope] = ALL_SCOPES,
    before_each_rule: Callable[[], None] = lambda: None,
) -> LegalSet:
    """Every legal layout of a space; the set may be empty.

    Each rule is computed over the axes of its own knobs alone and broadcast over the rest, so that
    the cost is that of one pass over the combinations a rule.

    `scopes` are the rules to apply (`OTHER_TRAINER_SCOPES`: whatever some trainer could run).
    `before_each_rule` is called before a rule is computed; an error that it raises ends the
    enumeration, for example after a time limit.
    """
    context = RuleContext(
        model=model,
        cluster=cluster,
        global_batch=space.global_batch,
        allow_tp_across_nodes=space.allow_tp_across_nodes,
        fill_nodes="dp" not in space.choices,
    )
    axes = np.ix_(*(np.arange(length) for length in space.shape))
    grid = {
        knob: codes_of(knob, space.values(knob))[axis]
        for knob, axis in zip(space.knobs, axes, strict=True)
    }
    derived = _with_derived(grid, space, cluster.devices_per_node)
    columns = LayoutColumns(**derived, jobs=NO_JOBS, texts=texts_of(space.values))
    illegal = np.zeros(space.shape, dtype=np.bool_)
    exclusions = []
    for rule in RULES:
        if rule.scope not in scopes:
            continue
        before_each_rule()
        broken = np.asarray(rule.illegal(columns, context))
        count = int(np.count_nonzero(broken)) * (illegal.size // broken.size)
        if not count:
            continue
        np.logical_or(illegal, broken, out=illegal)
        example = _layout_at(space, _first_index(broken, space.shape), cluster.devices_per_node)
        sentence = rule.sentence(example, context)
        exclusions.append(Exclusion(rule=rule.name, count=count, example=sentence))
    return LegalSet(
        space=space,
        devices_per_node=cluster.devices_per_node,
        indices=np.flatnonzero(np.logical_not(illegal, out=illegal)).astype(np.int32),
        exclusions=tuple(sorted(exclusions, key=lambda exclusion: -exclusion.count)),
    )


def _first_index(broken: Bools, shape: tuple[int, ...]) -> int:
    """The flat index, in the grid of `shape`, of the first combination that `broken` marks."""
    padded = broken.reshape((1,) * (len(shape) - broken.ndim) + broken.shape)
    place = np.unravel_index(int(padded.argmax()), padded.shape)
    return int(np.ravel_multi_index(place, shape))


def _with_derived(
    chosen: Mapping[str, Ints], space: SearchSpace, devices_per_node: int
) -> dict[str, Ints]:
    """The chosen columns and the derived ones, rounded down: what does not divide breaks a rule."""
    columns = dict(chosen)
    if "dp" not in columns:
        devices = columns["num_nodes"] * devices_per_node
        columns["dp"] = _filling_dp(devices, columns)
    if "num_microbatches" not in columns:
        columns["num_microbatches"] = _accumulation(
            columns["dp"], columns["micro_batch_size"], space
        )
    return columns


def _filling_dp(devices: Ints, columns: Mapping[str, Ints]) -> Ints:
    """As many replicas as fit on the devices."""
    devices_of_replica = math.prod(columns[name] for name in _OTHER_DEGREES)
    replicas: Ints = np.clip(devices // devices_of_replica, 1, MAX_COUNT)
    return replicas


def _accumulation(dp: Ints, micro_batch_size: Ints, space: SearchSpace) -> Ints:
    """As many micro-batches as fit into the fixed batch."""
    times: Ints = np.maximum(space.global_batch.minimum // (dp * micro_batch_size), 1)
    return times


def _layout_at(space: SearchSpace, index: int, devices_per_node: int) -> Layout:
    """The layout at a flat index of the grid: `_with_derived` for one layout, 10 times faster."""
    chosen: dict[str, Any] = {}
    for knob in reversed(space.knobs):
        choices = space.values(knob)
        index, place = divmod(index, len(choices))
        chosen[knob] = choices[place]
    return space.layout_of(chosen, devices_per_node)
