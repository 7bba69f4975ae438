"""In which order trials are listed, and where a page of such a list ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from results_db.records import TrialRecord
from results_db.trials.filter import KNOB_FIELDS
from search_spaces.protocol.metrics import METRICS

SORT_KEYS: Final[tuple[str, ...]] = ("number", "ended_at", "node_seconds", *KNOB_FIELDS, *METRICS)
"""Sort keys of trials: their number, the time of their end, their cost, a knob, or a metric."""

if TYPE_CHECKING:
    SortKey = str
else:
    SortKey = Literal[SORT_KEYS]  # FastAPI reads the choices from it
"""One of SORT_KEYS."""

KNOWN_AT_THE_END: Final = frozenset({"ended_at", "node_seconds", *METRICS})
"""Keys that a trial has no value of, or no final one, before it has ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialOrder:
    """What a list of trials is sorted by. Trials without a value come last, whichever way it goes.

    Of equals the older comes first. Words go by the memory that they save.
    """

    key: SortKey = "number"
    descending: bool = False


BY_NUMBER: Final = TrialOrder()


MAX_COUNTED: Final = 10_000
"""Most trials of a list that are counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PageEnd:
    """The last or the first trial of a page, and as of when the list is."""

    ended_seq: int
    """The campaign's trial that had ended last when the first page was read: what ended since
    counts as not ended on every page, so that no trial passes from behind a page's end to before
    it."""
    value: float | None
    """Of the key, as SQL compares it; None: the trial had none."""
    trial_id: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialPageRecord:
    """A page of a list of trials."""

    trials: tuple[TrialRecord, ...]
    end: PageEnd | None
    """Where the next page goes on; None on the last."""
    start: PageEnd | None = None
    """Where the previous page ends; None on the first."""
