"""What lists of trials and leaderboards show, in which order, and where a page ends.

Filters are by state, by any knob of the layouts, and by the measurements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from layout_tuner.documents.reading import MAX_WIDTH, nearest
from layout_tuner.protocol.metrics import METRICS
from layout_tuner.protocol.states import TRIAL_STATES
from layout_tuner.results_db.errors import ListingInvalidError, TrialFilterInvalidError
from layout_tuner.search_spaces.layouts.job_settings import (
    JOB_PREFIX,
    job_name_problem,
    job_value_problem,
    value_of_word,
)
from layout_tuner.search_spaces.layouts.layout import KNOBS
from layout_tuner.search_spaces.layouts.pipeline_layout import MAX_TEXT

MAX_VALUES: Final = 100
"""Most values that one knob, or the states, may be held to."""

MAX_KNOB: Final = 2**31 - 1
"""Largest value of a knob that a database holds."""

MAX_BOUND: Final = 2**63 - 1
"""Largest bound that a database compares a metric with."""

KNOB_FIELDS: Final = (*KNOBS, "num_devices", "global_batch_size")
"""Fields of a filter that are knobs of the layout, or follow from them."""

LISTED_FIELDS: Final = ("numbers", "states", "reasons", "nodes", *KNOB_FIELDS)
"""Fields of a filter that list allowed values."""

SINGULAR: Final = {"numbers": "number", "states": "state", "reasons": "reason", "nodes": "node"}
"""Names of fields as columns, and in a URL, where a list repeats the name with one value each."""

BOUND_FIELDS: Final = tuple(f"{end}_{metric}" for metric in METRICS for end in ("min", "max"))
"""Fields of a filter that bound a metric."""

CHOICES: Final[Mapping[str, tuple[Any, ...]]] = {
    "states": TRIAL_STATES,
    **{name: each.choices for name, each in KNOBS.items() if not each.is_number | each.is_text},
}
"""Fields whose values are words, or true and false, with their values."""

TEXTS: Final = {"reasons": 40, "nodes": 255} | {
    name: MAX_TEXT for name, knob in KNOBS.items() if knob.is_text
}
"""Fields whose values are free texts, with their largest lengths."""

_ENDS: Final = ("min_", "max_")


def job_knob_name(name: str) -> str | None:
    """The job knob that a field, a bound or a sort key is called after; None: it is another one."""
    end = name[: len(_ENDS[0])] if name.startswith(_ENDS) else ""
    before, job, knob = name.partition(JOB_PREFIX)
    return knob if job and before == end and job_name_problem(knob) is None else None


def is_job_key(name: str) -> bool:
    """Whether a sort key, or a list of allowed values, is that of a job knob."""
    return name.startswith(JOB_PREFIX) and job_knob_name(name) is not None


def job_field(name: str, words: Sequence[str]) -> Any:
    """The value of a field about a job knob, from its words in a URL or in a condition.

    Raises TrialFilterInvalidError where a bound is not one whole number.
    """
    if name.startswith(JOB_PREFIX):
        return tuple(map(value_of_word, words))
    value = value_of_word(words[0])
    if len(words) > 1 or type(value) is not int:
        raise TrialFilterInvalidError(f"{name}={','.join(words)} is not a whole number")
    return value


_NOTHING_STATED: Final[Mapping[str, Any]] = {
    **dict.fromkeys(LISTED_FIELDS, ()),
    **dict.fromkeys(BOUND_FIELDS),
}


@dataclass(frozen=True, init=False, slots=True)
class TrialFilter:
    """Conditions that trials must all meet; without conditions, every trial matches.

    Its fields are given by keyword:

    - numbers: in their campaign, from 1; states; reasons (crashed, timeout, out_of_memory, ...);
      nodes, on which a trial failed first;
    - every field of a layout, num_devices, and global_batch_size;
    - `job.` and the name of a job knob, and min_ and max_ of it;
    - min_ and max_ of every metric (`protocol.metrics`).

    Fields that are no bounds are tuples of values; a trial matches with any of them. A bound on a
    metric excludes trials that did not measure it. Bounds include their ends.

    Raises:
        TrialFilterInvalidError: at construction, when a value is none that the field can have, or
            when bounds leave nothing between them.
    """

    stated: Mapping[str, Any]
    """The fields that are stated, by name, in the order of all fields."""

    def __init__(self, **stated: Any) -> None:
        for name in stated:
            if name not in _NOTHING_STATED and job_knob_name(name) is None:
                raise TypeError(f"TrialFilter has no field {name!r}")
        kept = {
            name: stated[name]
            for name, nothing in _NOTHING_STATED.items()
            if name in stated and stated[name] != nothing
        }
        for name in sorted(stated.keys() - _NOTHING_STATED.keys()):
            if stated[name] not in ((), None):
                _refuse_of_job(name, stated[name])
                kept[name] = stated[name]
        object.__setattr__(self, "stated", kept)
        for name in LISTED_FIELDS:
            if name in kept:
                _refuse_values(name, kept[name])
                if name in KNOBS and (parse := KNOBS[name].parse):
                    kept[name] = tuple(map(parse, kept[name]))
        of_jobs = dict.fromkeys(name[4:] for name in kept if name[4:].startswith(JOB_PREFIX))
        for metric in (*METRICS, *of_jobs):
            low, high = self.bounds(metric)
            if metric in METRICS:
                _refuse_bound("min", metric, low)
                _refuse_bound("max", metric, high)
            if low is not None and high is not None and low > high:
                raise TrialFilterInvalidError(
                    f"min_{metric}={low} is over max_{metric}={high}: no trial is between them"
                )

    def __getattr__(self, name: str) -> Any:
        """A field's value: () or None where it is not stated."""
        if name not in _NOTHING_STATED:
            raise AttributeError(f"TrialFilter has no field {name!r}")
        return self.stated.get(name, _NOTHING_STATED[name])

    def __hash__(self) -> int:
        return hash(tuple(self.stated.items()))

    def bounds(self, metric: str) -> tuple[float | None, float | None]:
        """The least and the most of a metric; None: not bounded."""
        return self.stated.get(f"min_{metric}"), self.stated.get(f"max_{metric}")

    @property
    def of_jobs(self) -> Mapping[str, Any]:
        """The fields about job knobs."""
        return {name: value for name, value in self.stated.items() if job_knob_name(name)}

    @property
    def needs_measurement(self) -> bool:
        """Whether a metric is bounded, so that only trials with a measurement are meant."""
        return any(name in self.stated for name in BOUND_FIELDS)


def _refuse_of_job(name: str, stated: object) -> None:
    if name.startswith(JOB_PREFIX):
        _refuse_values(name, stated)
    elif type(stated) is not int or not 0 <= stated <= MAX_WIDTH:
        raise TrialFilterInvalidError(f"{name}={stated!r} is not a whole number up to {MAX_WIDTH}")


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
    if name.startswith(JOB_PREFIX):
        return job_value_problem(value)
    if name in KNOBS and KNOBS[name].parse is not None:
        return KNOBS[name].problem(value)
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


def _refuse_bound(end: str, metric: str, value: object) -> None:
    if value is None:
        return
    whole = METRICS[metric].is_whole
    fits = type(value) is int or (isinstance(value, float) and not whole)
    if not fits or not math.isfinite(value) or abs(value) > MAX_BOUND:  # type: ignore[arg-type]
        what = "a whole number" if whole else "a finite number"
        raise TrialFilterInvalidError(f"{end}_{metric}={value!r} is not {what} up to {MAX_BOUND}")


EVERY_TRIAL: Final = TrialFilter()

SORT_KEYS: Final[tuple[str, ...]] = ("number", "ended_at", "node_seconds", *KNOB_FIELDS, *METRICS)
"""Sort keys of trials: their number, the time of their end, their cost, a knob, or a metric."""

SortKey = str
"""One of SORT_KEYS, or `job.` and the name of a job knob (`is_job_key`)."""

KNOWN_AT_THE_END: Final = frozenset({"ended_at", "node_seconds", *METRICS})
"""Keys that a trial has no value of, or no final one, before it has ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialOrder:
    """The sort key of a list of trials. Trials without a value come last in both directions.

    Of equals the older comes first. Words go by the memory that they save.
    """

    key: SortKey = "number"
    descending: bool = False


BY_NUMBER: Final = TrialOrder()


@dataclass(frozen=True, kw_only=True, slots=True)
class PageEnd:
    """The last or the first trial of a page, and the time of the list."""

    ended_seq: int
    """The campaign's trial that had ended last when the first page was read: what ended since
    counts as not ended on every page, so that no trial passes from behind a page's end to before
    it."""
    value: float | None
    """Of the key, as SQL compares it; None: the trial had none."""
    trial_id: int


MAX_WITHIN_PERCENT: Final = 100.0

LISTING_SORT_KEYS: Final[tuple[str, ...]] = (*KNOB_FIELDS, *METRICS)
"""Sort keys of a leaderboard besides the rank: the knobs and metrics that filters know."""

ListingSortKey = str
"""One of LISTING_SORT_KEYS, or the key of a job knob."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaderboardListing:
    """Which ranked layouts are listed, and in which order. By default: all, by the objective.

    Raises:
        ListingInvalidError: at construction, when a value is out of its range.
    """

    front: bool = False
    """Only the Pareto front over the campaign's objectives."""
    wanted: TrialFilter = EVERY_TRIAL
    """Filter of the layout, and of the measurement of its first trial."""
    within_percent: float | None = None
    """Only layouts at most so many percent below the winner's objective, the cheapest first by
    node-hours per token. Shortened layouts are left out if any layout was measured in full."""
    sort: str | None = None
    """One of `LISTING_SORT_KEYS`: a knob, or a metric of the layout's first trial. Layouts without
    a value come last, whichever direction; of equals the one with the larger objective comes first,
    then the earlier. None: by rank, or by cost with `within_percent`."""
    descending: bool = False
    """Whether the largest value of `sort` comes first."""

    @property
    def is_about_jobs(self) -> bool:
        """Whether it filters or sorts by a job knob."""
        return bool(self.wanted.of_jobs) or is_job_key(self.sort or "")

    def __post_init__(self) -> None:
        is_known = self.sort in LISTING_SORT_KEYS or is_job_key(self.sort or "")
        if self.sort is not None and not is_known:
            hint = nearest(self.sort, LISTING_SORT_KEYS)
            raise ListingInvalidError(f"sort={self.sort!r} is unknown{hint}")
        if self.descending and self.sort is None:
            raise ListingInvalidError(
                "order=desc needs a sort key: without one the leaderboard is in the order of the "
                "ranks; add sort=KEY, or leave the order out"
            )
        within = self.within_percent
        if within is not None and not 0 <= within <= MAX_WITHIN_PERCENT:
            raise ListingInvalidError(f"within={within} is not a percentage from 0 to 100")


WHOLE: Final = LeaderboardListing()
