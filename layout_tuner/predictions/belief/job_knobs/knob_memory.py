"""What job knobs do to peaks of memory.

A value of a knob adds bytes to the peak, or scales a part of it. Its declaration says how much is
expected, and how far off that may be. Each value of the campaign's knobs has a factor of its own in
the regression of peaks (`predictions.belief.peaks.memory_fit`), so that measured peaks correct it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np

from layout_tuner.array_types import Floats, Ints
from layout_tuner.predictions.belief.job_knobs.knob_step_time import NO_KNOBS, KnobValue, KnownKnobs
from layout_tuner.predictions.estimates.peak_memory import (
    MEMORY_TERMS,
    NUM_MEMORY_FACTORS,
    MemoryTerms,
    stage_parts,
)
from layout_tuner.search_spaces.jobs.job_knob import KnobEffect, MemoryPart
from layout_tuner.search_spaces.layouts.job_settings import JobSettings
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.models.model_shape import ModelShape

_UNSTATED_LOG_SD: Final = 0.06
"""Standard deviation of the change of a peak by a value of which none is stated. Published
changes of knobs that do not move data off the device: -6.6 and -7.5 % (torchtitan, compile, Llama
3.1 8B), -6.0 % (the same, asynchronous tp, 70B), -4.5 % (DeepSpeed issue 1302, no overlap_comm)."""
_LEAST_SHARE: Final = 0.1
"""A setting saves at most all but this share of a peak."""

_TERMS_OF: Final[Mapping[MemoryPart, tuple[str, ...]]] = {
    "weights": ("states",),
    "gradients": ("states",),
    "optimizer": ("sharded_states",),
    "activations": ("activations", "gathered"),
    "all": MEMORY_TERMS,
}
"""The terms of a peak that a part of memory is in; weights and gradients are shares of one."""


def _is_expected_to_change_memory(effect: KnobEffect) -> bool:
    return bool(effect.memory_bytes) or effect.memory_factor != 1.0


@dataclass(frozen=True, kw_only=True, eq=False)
class KnobMemory:
    """The effects of job knobs on peaks."""

    known: KnownKnobs = NO_KNOBS

    @cached_property
    def values(self) -> tuple[KnobValue, ...]:
        """The values that have a factor: those of the campaign's knobs that may change memory."""
        return tuple(each for each in self.known.values if self._effect(each).memory_log_sd > 0.0)

    def expected(
        self, software: str, jobs: Sequence[JobSettings]
    ) -> tuple[tuple[JobSettings, ...], Ints]:
        """The settings of some jobs that are expected to change a peak, each of them once.

        And the place among these of those of each job. What may change a peak, and is expected not
        to, widens its spread alone.
        """
        changing = []
        for settings in jobs:
            effects = {each.name: self._effect(each) for each in KnobValue.of(software, settings)}
            kept = (n for n, each in effects.items() if _is_expected_to_change_memory(each))
            changing.append(JobSettings({name: settings[name] for name in kept}))
        places = {each: place for place, each in enumerate(dict.fromkeys(changing))}
        return tuple(places), np.array([places[each] for each in changing], dtype=np.int64)

    @property
    def num_factors(self) -> int:
        """Factors of a peak's terms, of their sum and of the values."""
        return NUM_MEMORY_FACTORS + len(self.values)

    def applied(
        self, terms: MemoryTerms, columns: LayoutColumns, model: ModelShape, software: Sequence[str]
    ) -> MemoryTerms:
        """The terms with the settings of each layout.

        `columns` are of one axis, with a trainer in `software` for each layout; or they are of one
        layout, whose settings all terms have.
        """
        if not any(columns.jobs):
            return terms
        changed = replace(
            terms, num_bytes=terms.num_bytes.copy(), scatter_bytes=terms.scatter_bytes.copy()
        )
        ends, _, count = terms.num_bytes.shape
        knob_bytes = np.zeros((ends, len(self.values), count), terms.num_bytes.dtype)
        for rows, value in _rows_of_values(columns, software, count):
            effect = self._effect(value)
            part = self._part(changed, columns, model, rows, effect.memory_of)
            added = np.maximum(
                effect.memory_bytes + (effect.memory_factor - 1.0) * part,
                (_LEAST_SHARE - 1.0) * changed.num_bytes[..., rows].sum(axis=1),
            )
            shares = self._shares(changed, rows, effect)
            changed.num_bytes[..., rows] += shares * added[:, None]
            spread = effect.memory_log_sd * part
            if value in self.values:
                knob_bytes[:, self.values.index(value), rows] = spread
            else:
                scatter = changed.scatter_bytes[:, rows]
                changed.scatter_bytes[:, rows] = np.hypot(scatter, spread)
        return replace(changed, knob_bytes=knob_bytes if self.values else None)

    def _effect(self, value: KnobValue) -> KnobEffect:
        effect, _ = self.known.effect(value)
        is_stated = effect.memory_log_sd or _is_expected_to_change_memory(effect)
        return effect if is_stated else replace(effect, memory_log_sd=_UNSTATED_LOG_SD)

    @staticmethod
    def _part(
        terms: MemoryTerms, columns: LayoutColumns, model: ModelShape, rows: Ints, part: MemoryPart
    ) -> Floats:
        """Bytes of a part of memory; shape [stages, rows]."""
        places = [MEMORY_TERMS.index(name) for name in _TERMS_OF[part]]
        held = terms.num_bytes[:, places][..., rows].sum(axis=1)
        if part not in ("weights", "gradients"):
            return np.asarray(held)
        # Their ratio is about the same in all stages.
        some = columns.rows(rows) if columns.tp.size > 1 else columns
        first = stage_parts(some, model, np.zeros_like(some.pp), terms.storage)
        own = first.weights if part == "weights" else first.gradients
        return np.asarray(held * own / (first.weights + first.gradients))

    @staticmethod
    def _shares(terms: MemoryTerms, rows: Ints, effect: KnobEffect) -> Floats:
        """How what a setting adds is divided over the terms; shape [stages, terms, rows]."""
        if effect.memory_factor == 1.0:
            shares = np.zeros((1, len(MEMORY_TERMS), 1))
            shares[:, MEMORY_TERMS.index("workspace")] = 1.0
            return shares
        places = [MEMORY_TERMS.index(name) for name in _TERMS_OF[effect.memory_of]]
        held = np.zeros_like(terms.num_bytes[..., rows])
        held[:, places] = terms.num_bytes[:, places][..., rows]
        total = np.maximum(held.sum(axis=1, keepdims=True), np.finfo(held.dtype).tiny)
        return np.asarray(held / total)


def deviation_bytes(terms: MemoryTerms, num_knobs: int) -> Floats:
    """Standard deviations of the terms, their sum and the knobs; [stages, factors, layouts]."""
    deviations = terms.deviation_bytes
    if not num_knobs:
        return np.asarray(deviations)
    ends, _, count = deviations.shape
    of_knobs = terms.knob_bytes
    if of_knobs is None:
        of_knobs = np.zeros((ends, num_knobs, count), deviations.dtype)
    return np.concatenate([deviations, of_knobs], axis=1)


def _rows_of_values(
    columns: LayoutColumns, software: Sequence[str], count: int
) -> Iterator[tuple[Ints, KnobValue]]:
    """The layouts that have each value of a knob."""
    job = np.broadcast_to(columns.job, (count,))
    names = tuple(dict.fromkeys(software))
    of_row = np.array([names.index(each) for each in software])
    codes = of_row * len(columns.jobs) + job
    for code in np.unique(codes):
        trainer, settings = divmod(int(code), len(columns.jobs))
        if columns.jobs[settings]:
            rows = np.flatnonzero(codes == code)
            for value in KnobValue.of(names[trainer], columns.jobs[settings]):
                yield rows, value


NO_KNOB_MEMORY: Final = KnobMemory()
