"""In which order trials are listed, and where a page of such a list ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

from results_db.records import TrialRecord
from results_db.trial_filter import METRICS

SortKey = Literal[
    "number",
    "ended_at",
    "node_seconds",
    "num_nodes",
    "tp",
    "pp",
    "dp",
    "vpp",
    "micro_batch_size",
    "num_microbatches",
    "zero_stage",
    "zero_replicas",
    "recompute",
    "sequence_parallel",
    "precision",
    "num_devices",
    "global_batch_size",
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
"""What trials are sorted by: their number, when they ended, what they cost, a knob, or a metric."""

SORT_KEYS: Final[tuple[SortKey, ...]] = get_args(SortKey)

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


@dataclass(frozen=True, kw_only=True, slots=True)
class PageEnd:
    """The last trial of a page, and as of when the list is."""

    ended_seq: int
    """The campaign's trial that had ended last when the first page was read: what ended since counts
    as not ended on every page, so that no trial passes from behind a page's end to before it."""
    value: float | None
    """Of the key, as SQL compares it; None: the trial had none."""
    trial_id: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialPageRecord:
    """A page of a list of trials."""

    trials: tuple[TrialRecord, ...]
    end: PageEnd | None
    """Where the next page goes on; None on the last."""
