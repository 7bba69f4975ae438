"""The factors of job knobs in the regression of step times.

Each value of a knob, other than the trainer's default, has a factor of its own. It scales the terms
of the step that the knob touches, on top of their own factors. So a knob changes what is exposed of
these terms: one on a reduction that the backward pass hides changes little. The factors have a
normal prior in logarithms, and the regression (`predictions.belief.factor_regression`) learns them
from all jobs that have the value, as it learns those of the terms.

Knobs of two trainers are different knobs, also where their names are equal.
"""

# ruff: noqa: N803, N806 (shapes in names: N jobs, F factors of terms and step, K factors of knobs)

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Self

import numpy as np

from layout_tuner.array_types import Floats, Ints
from layout_tuner.predictions.estimates.step_time import TERM_NAMES
from layout_tuner.search_spaces.jobs.job_knob import JobKnob, KnobEffect, Touched
from layout_tuner.search_spaces.layouts.job_settings import JobSettings, JobValue
from layout_tuner.search_spaces.spaces.job_set import JobSet
from layout_tuner.trainers.registry import knobs_of_software

TERMS_OF: Final[Mapping[Touched, tuple[str, ...]]] = {
    "tp": ("tensor_inside", "tensor_across", "latency_inside", "latency_across"),
    "cp": ("context",),
    "ep": ("exchange_inside", "exchange_across", "exchange_latency"),
    "dp": (
        *("data_inside", "data_across", "data_congestion", "data_latency"),
        *("weights_gather", "gather_latency"),
    ),
    "pp": (
        *("pipeline_inside", "pipeline_across", "pipeline_latency"),
        *("imbalance", "equal_layers"),
    ),
    "host": ("host", "host_tensor", "each_microbatch", "each_step"),
    "compute": (
        *("matrices", "attention", "attention_bytes", "matrix_bytes", "elementwise", "kernels"),
        *("head", "logits", "accumulation"),
    ),
    "optimizer": ("optimizer",),
}
"""The terms of a step in each group that a knob may touch. The odds of an overlap are in none: a
knob changes the seconds that remain."""

INTERACTION_LOG_SD: Final = 0.25
"""Standard deviation of an interaction (`JobRows`): as much as a value may do at all. It was chosen
with seeds of the benchmark of searches of jobs that do not judge it (1000 to 1039), as was
`residual.SETTING_DISTANCE`."""

NUM_STEP_FACTORS: Final = len(TERM_NAMES) + 1
"""Factors of the terms, and that on the whole step."""


@dataclass(frozen=True, slots=True)
class KnobValue:
    """A value of a knob of one trainer."""

    software: str
    """The trainer, as a table's source says it; empty: the embedded one."""
    name: str
    kind: type
    """The type of the value: True is not 1."""
    value: JobValue

    @classmethod
    def of(cls, software: str, settings: JobSettings) -> Iterable[Self]:
        """The values that some settings have."""
        return (cls(software, name, type(value), value) for name, value in settings.items())


@dataclass(frozen=True, kw_only=True, eq=False)
class KnownKnobs:
    """Declarations of knobs: those of the campaign that asks, and the trainers' catalogues."""

    software: str = ""
    """The trainer of the campaign."""
    knobs: Mapping[str, JobKnob] = field(default_factory=dict)
    """The campaign's declarations, by name."""
    unknown: KnobEffect = field(default_factory=KnobEffect)
    """What is expected of a value of which nothing is stated."""

    def declared(self, software: str, name: str) -> JobKnob | None:
        """The declaration of a trainer's knob; None: nothing is known of it."""
        if software == self.software and name in self.knobs:
            return self.knobs[name]
        return knobs_of_software(software).get(name)

    def effect(self, of: KnobValue) -> tuple[KnobEffect, tuple[Touched, ...] | None]:
        """What a value is expected to do, and the terms that it touches; None: the whole step.

        A value of which nothing is stated does `unknown` to the terms that its knob touches, or to
        the step where that is not stated either.
        """
        knob = self.declared(of.software, of.name)
        stated = knob.effect(of.value) if knob else None
        touches = (stated.touches if stated else ()) or (knob.touches if knob else ())
        if stated is None and not touches:
            return self.unknown, None
        return stated or self.unknown, touches

    @property
    def values(self) -> tuple[KnobValue, ...]:
        """The values of the campaign's knobs, without the defaults."""
        return tuple(
            KnobValue(self.software, name, type(value), value)
            for name, knob in self.knobs.items()
            for value in knob.values
            if not knob.is_default(value)
        )


NO_KNOBS: Final = KnownKnobs()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KnobFactors:
    """The factors of some values of knobs: their prior, and what they scale."""

    values: tuple[KnobValue, ...] = ()
    mean: Floats = field(default_factory=lambda: np.zeros(0))
    """Prior means of the logarithms; shape [K]."""
    log_sd: Floats = field(default_factory=lambda: np.zeros(0))
    """Their standard deviations."""
    touched: Floats = field(default_factory=lambda: np.zeros((0, NUM_STEP_FACTORS)))
    """1 where a value scales a term, or the whole step (the last column); 0 elsewhere."""

    @classmethod
    def of(cls, values: Iterable[KnobValue], known: KnownKnobs) -> Self:
        distinct = tuple(dict.fromkeys(values))
        effects = [known.effect(each) for each in distinct]
        touched_KF = np.zeros((len(distinct), NUM_STEP_FACTORS))
        for place, (_, touches) in enumerate(effects):
            if touches is None:
                touched_KF[place, -1] = 1.0
            for group in touches or ():
                touched_KF[place, [TERM_NAMES.index(name) for name in TERMS_OF[group]]] = 1.0
        return cls(
            values=distinct,
            mean=np.log([effect.factor for effect, _ in effects]),
            log_sd=np.array([effect.log_sd for effect, _ in effects]),
            touched=touched_KF,
        )

    def __len__(self) -> int:
        return len(self.values)

    def design(self, software: str, jobs: Sequence[JobSettings]) -> Floats:
        """1 where some settings have a value; shape [settings, K]."""
        places = {value: place for place, value in enumerate(self.values)}
        design = np.zeros((len(jobs), len(self)))
        for row, settings in enumerate(jobs):
            for value in KnobValue.of(software, settings):
                if value in places:
                    design[row, places[value]] = 1.0
        return design

    def aligned(self, deviations: Floats, of: KnobFactors) -> Floats:
        """Deviations behind which those of other knobs stand, with those of these knobs instead."""
        places = {value: place for place, value in enumerate(of.values, NUM_STEP_FACTORS)}
        of_knobs = [
            deviations[places[value]] if value in places else mean
            for value, mean in zip(self.values, self.mean, strict=True)
        ]
        return np.concatenate([deviations[:NUM_STEP_FACTORS], of_knobs])

    def settings(self, software: str, jobs: Sequence[JobSettings], job: Ints) -> KnobSettings:
        """The settings of some rows: `job` has the place of each row's among `jobs`."""
        return KnobSettings(knobs=self, design=self.design(software, jobs), job=job)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KnobSettings:
    """The values of knobs that some rows have."""

    knobs: KnobFactors
    design: Floats
    """1 where settings have a value of a knob; shape [settings, K]."""
    job: Ints
    """The place of each row's settings in `design`."""

    def rows(self, rows: slice | Ints) -> KnobSettings:
        return KnobSettings(knobs=self.knobs, design=self.design, job=self.job[rows])

    @property
    def of_rows(self) -> Floats:
        """1 where a row has a value."""
        return np.asarray(self.design[self.job])

    def deviations(self, deviations: Floats) -> Floats:
        """Deviations of the factors of terms and step of each row; shape [rows, F].

        `deviations` has those of the knobs behind those of the terms and the step: one row for all,
        or one for each.
        """
        of_knobs = self.of_rows * deviations[..., NUM_STEP_FACTORS:]
        return np.asarray(
            deviations[..., :NUM_STEP_FACTORS] + of_knobs @ self.knobs.touched, np.float64
        )

    def slopes(self, slopes_NF: Floats) -> Floats:
        """The slopes by all deviations, from those by the deviations of terms and step."""
        of_knobs = self.of_rows * (slopes_NF @ self.knobs.touched.T)
        return np.concatenate([slopes_NF, of_knobs], axis=1)


def joined_settings(parts: Sequence[KnobSettings | None]) -> KnobSettings | None:
    """The settings of several models of one search, one after the other: all have the same knobs.

    None: no part has settings, as in a search without job knobs.
    """
    known = [each for each in parts if each is not None]
    if not known:
        return None
    assert len(known) == len(parts), "models of one search have settings, or none of them has"
    starts = np.cumsum([0, *(len(each.design) for each in known[:-1])])
    return KnobSettings(
        knobs=known[0].knobs,
        design=np.concatenate([each.design for each in known]),
        job=np.concatenate([each.job + start for each, start in zip(known, starts, strict=True)]),
    )


class JobRows:
    """Finds the layouts and settings of the jobs of a search, by their positions.

    A value of a knob may do something else where tp is above 1, which changes the products that a
    device computes and adds communication. So each value has a second factor for these layouts,
    its interaction; the interactions stand behind the factors of all values.
    """

    def __init__(self, jobs: JobSet, knobs: KnobFactors, software: str) -> None:
        self._jobs = jobs
        self.interactions = replace(
            knobs, mean=np.zeros(len(knobs)), log_sd=np.full(len(knobs), INTERACTION_LOG_SD)
        )
        """The prior of the interactions, and what they scale."""
        both = replace(knobs, touched=np.concatenate([knobs.touched, knobs.touched]))
        design_SK = knobs.design(software, jobs.settings)
        without_tp = np.hstack([design_SK, np.zeros_like(design_SK)])
        with_tp = np.hstack([design_SK, design_SK])
        self.every = KnobSettings(
            knobs=both,
            design=np.concatenate([without_tp, with_tp]),
            job=np.arange(2 * len(jobs.settings)),
        )
        """All settings that jobs have: first where tp is 1, and then where it is above."""

    def places(self, positions: Ints) -> Ints:
        """The places of the jobs' settings in `every`."""
        has_tp = self._jobs.column("tp", positions) > 1
        return self._jobs.setting_places(positions) + has_tp * len(self._jobs.settings)

    def rows(self, positions: Ints) -> tuple[Ints, KnobSettings]:
        """The places of the jobs' layouts among the legal ones, and the jobs' settings."""
        return self._jobs.layout_rows(positions), self.every.rows(self.places(positions))


NO_KNOB_FACTORS: Final = KnobFactors()
