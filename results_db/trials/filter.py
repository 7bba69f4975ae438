"""Which trials are meant: by state, by any knob of their layouts, by what they measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Literal, get_args

from results_db.errors import TrialFilterInvalidError
from results_db.records import TRIAL_STATES, TrialState
from search_spaces.layout import PRECISIONS, RECOMPUTE_MODES, Precision, Recompute

Metric = Literal[
    "step_time_s",
    "tokens_per_s",
    "tokens_per_s_per_device",
    "tokens_per_node_hour",
    "model_tflops_per_device",
    "hardware_tflops_per_device",
    "mfu",
    "hfu",
    "peak_memory_bytes",
]
"""What of a measurement can be filtered and sorted by."""

METRICS: Final[tuple[Metric, ...]] = get_args(Metric)

MAX_VALUES: Final = 100
"""Most values that one knob, or the states, may be held to."""

MAX_KNOB: Final = 2**31 - 1
"""Largest value of a knob that a database holds."""

MAX_BOUND: Final = 2**63 - 1
"""Largest bound that a database compares a metric with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialFilter:
    """What trials must be like: all that is stated must hold. Nothing stated: every trial is meant.

    Of a knob any of the listed values will do. A bound on a metric excludes trials that did not
    measure it. Bounds include their ends.

    Raises:
        TrialFilterInvalidError: at construction, when a value is none that the field can have, or when
            bounds leave nothing between them.
    """

    numbers: tuple[int, ...] = ()
    """In their campaign, from 1."""
    states: tuple[TrialState, ...] = ()
    reasons: tuple[str, ...] = ()
    """Why they do not count: crashed, timeout, out_of_memory, ..."""
    nodes: tuple[str, ...] = ()
    """Where they went wrong first."""

    num_nodes: tuple[int, ...] = ()
    tp: tuple[int, ...] = ()
    pp: tuple[int, ...] = ()
    dp: tuple[int, ...] = ()
    vpp: tuple[int, ...] = ()
    micro_batch_size: tuple[int, ...] = ()
    num_microbatches: tuple[int, ...] = ()
    zero_stage: tuple[int, ...] = ()
    zero_replicas: tuple[int, ...] = ()
    recompute: tuple[Recompute, ...] = ()
    sequence_parallel: tuple[bool, ...] = ()
    precision: tuple[Precision, ...] = ()
    num_devices: tuple[int, ...] = ()
    global_batch_size: tuple[int, ...] = ()

    min_step_time_s: float | None = None
    max_step_time_s: float | None = None
    min_tokens_per_s: float | None = None
    max_tokens_per_s: float | None = None
    min_tokens_per_s_per_device: float | None = None
    max_tokens_per_s_per_device: float | None = None
    min_tokens_per_node_hour: float | None = None
    max_tokens_per_node_hour: float | None = None
    min_model_tflops_per_device: float | None = None
    max_model_tflops_per_device: float | None = None
    min_hardware_tflops_per_device: float | None = None
    max_hardware_tflops_per_device: float | None = None
    min_mfu: float | None = None
    max_mfu: float | None = None
    min_hfu: float | None = None
    max_hfu: float | None = None
    min_peak_memory_bytes: int | None = None
    max_peak_memory_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in LISTED_FIELDS:
            _refuse_values(name, getattr(self, name))
        for metric in METRICS:
            low, high = self.bounds(metric)
            for end, value in (("min", low), ("max", high)):
                _refuse_bound(f"{end}_{metric}", value)
            if low is not None and high is not None and low > high:
                raise TrialFilterInvalidError(
                    f"min_{metric}={low} is over max_{metric}={high}: no trial is between them"
                )

    def bounds(self, metric: Metric) -> tuple[float | None, float | None]:
        """The least and the most of a metric; None: not bounded."""
        return getattr(self, f"min_{metric}"), getattr(self, f"max_{metric}")

    @property
    def needs_measurement(self) -> bool:
        """Whether a metric is bounded, so that only trials with a measurement are meant."""
        return any(bound is not None for metric in METRICS for bound in self.bounds(metric))

    @property
    def is_empty(self) -> bool:
        """Whether every trial is meant."""
        return self == TrialFilter()


LISTED_FIELDS: Final = tuple(
    field.name for field in fields(TrialFilter) if not field.name.startswith(("min_", "max_"))
)
"""Fields of a filter that list values, of which any will do."""

KNOB_FIELDS: Final = LISTED_FIELDS[4:]
"""Those of them that are knobs of the layout, or follow from it."""

CHOICES: Final[Mapping[str, tuple[Any, ...]]] = {
    "states": TRIAL_STATES,
    "recompute": RECOMPUTE_MODES,
    "sequence_parallel": (False, True),
    "precision": PRECISIONS,
}
"""Fields whose values are words (or true and false), and which."""

TEXTS: Final = {"reasons": 40, "nodes": 255}
"""Fields whose values are free texts, and how long those may be."""


def _refuse_values(name: str, values: object) -> None:
    if not isinstance(values, tuple):
        raise TrialFilterInvalidError(f"{name}={values!r} is not a tuple of values")
    if len(values) > MAX_VALUES:
        raise TrialFilterInvalidError(
            f"{name} lists {len(values)} values; at most {MAX_VALUES} can be asked for at once"
        )
    for value in values:
        problem = _problem(name, value)
        if problem is not None:
            raise TrialFilterInvalidError(f"{name}={problem}")


def _problem(name: str, value: object) -> str | None:
    if name in CHOICES:
        choices = CHOICES[name]
        # True is no 1 here, and no number is a word.
        fits = any(value == each and type(value) is type(each) for each in choices)
        words = ", ".join(str(each) for each in choices)
        return None if fits else f"{value!r} is not one of {words}"
    if name in TEXTS:
        if not isinstance(value, str) or not value.isprintable() or not value:
            return f"{value!r} is not a text in printable characters"
        most = TEXTS[name]
        return None if len(value) <= most else f"{value[:20]!r}... is longer than {most} characters"
    if type(value) is not int or not 0 <= value <= MAX_KNOB:
        return f"{value!r} is not a whole number from 0 to {MAX_KNOB}"
    return None


def _refuse_bound(name: str, value: object) -> None:
    if value is None:
        return
    whole = name.endswith("_bytes")
    fits = type(value) is int or (isinstance(value, float) and not whole)
    if not fits or not math.isfinite(value) or abs(value) > MAX_BOUND:  # type: ignore[arg-type]
        what = "a whole number" if whole else "a finite number"
        raise TrialFilterInvalidError(f"{name}={value!r} is not {what} up to {MAX_BOUND}")
