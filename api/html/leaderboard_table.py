"""The leaderboard as a table: its columns, its filters, and its rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from layout_tuner.api.errors import ColumnUnknownError
from layout_tuner.api.ranked_columns import (
    COLUMNS,
    RankedColumn,
    device_peak_words,
    job_columns,
    variant,
)
from layout_tuner.documents.reading import nearest, shown, word_of
from layout_tuner.protocol.metrics import METRICS
from layout_tuner.results_db.leaderboard.leaderboard_records import PageOfLayouts, RankedLayout
from layout_tuner.results_db.records import CampaignRecord
from layout_tuner.results_db.store import Store
from layout_tuner.results_db.trials.filter import (
    KNOB_FIELDS,
    LeaderboardListing,
    is_job_key,
)
from layout_tuner.search_spaces.layouts.job_settings import JOB_PREFIX
from layout_tuner.search_spaces.layouts.layout import KNOBS

PAGE: Final = 100
"""Rows on one page."""

CHOICES: Final = (*KNOB_FIELDS, *METRICS)
"""Columns that readers can choose, besides rank, trial and value."""

_SHOWN_METRICS: Final = ("mfu", "peak_memory_bytes")
"""Metrics that are shown unless the reader chooses columns."""

_SMALL_IS_GOOD: Final = frozenset({*KNOB_FIELDS, "step_time_s", "peak_memory_bytes"})
"""Columns that are sorted with the smallest value first by default."""

_COUNTED_AT_ONCE: Final = 5_000
"""A page of up to so many ranked layouts has the values of all knobs, else of the opened one."""

_INTERVAL_WIDTH: Final = 110.0
_MARGIN: Final = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaderboardColumn:
    """A column of a knob or a metric."""

    name: str
    """The sort key."""
    heading: str
    is_number: bool
    sorted: str
    """The value of aria-sort: ascending, descending or none."""
    next_order: str
    """The order after the reader has chosen the heading: asc or desc."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaderboardLine:
    """A layout as a row of the table."""

    ranked: RankedLayout
    cells: Sequence[str]
    """One for each column."""
    marks: Sequence[str]
    """Words such as "tied" and "stopped early"."""
    drawn: tuple[float, float, float]
    """The interval's lower end, the value and the upper end in units of the plot."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KnobFacet:
    """A knob that readers can filter by."""

    name: str
    """Also the query parameter."""
    label: str
    counts: Mapping[str, int] | None
    """Layouts by value, on the whole leaderboard; None: not counted for this page."""
    chosen: frozenset[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaderboardTable:
    """A page of the leaderboard with everything around it."""

    objective: str
    listing: LeaderboardListing
    columns: Sequence[LeaderboardColumn]
    lines: Sequence[LeaderboardLine]
    constant: Mapping[str, str]
    """Knobs that are the same in all listed layouts, with their values."""
    facets: Sequence[KnobFacet]
    """Of the knobs that differ on the whole leaderboard, or are filtered by."""
    choices: Sequence[tuple[str, str]]
    """Names and headings of all columns that readers can choose."""
    bounds: Sequence[tuple[str, str, float | None, float | None]]
    """Of each metric: its name, its heading, and the bounds of the filter."""
    total: int
    source: str | None
    """Where the measurements of an imported campaign come from; None: it ran here."""
    offset: int
    chosen: frozenset[str]
    """The columns that the reader has chosen; empty: the default ones."""
    peak: str
    """The peak that MFU and HFU are shares of; empty: not known."""
    width: float = _INTERVAL_WIDTH
    """Width of the plot of an interval."""


def leaderboard_table(
    store: Store,
    campaign: CampaignRecord,
    listing: LeaderboardListing,
    *,
    objective: str,
    columns: Sequence[str],
    offset: int,
    opened: str | None = None,
) -> LeaderboardTable:
    """A page of a campaign's leaderboard; ColumnUnknownError for a column that does not exist.

    Without columns it shows the knobs that differ, and some metrics. The values of the knob
    `opened` are counted, however many layouts there are.
    """
    of_jobs = job_columns(campaign.stored.shown_knobs)
    choices = (*KNOB_FIELDS, *of_jobs, *METRICS)
    known = {**COLUMNS, **of_jobs}
    for name in columns:
        if name not in choices:
            raise ColumnUnknownError(f"the column {shown(name)} is unknown{nearest(name, choices)}")
    page = store.leaderboard.page_of_layouts(
        campaign.id, objective, listing=listing, limit=PAGE, offset=offset
    )
    constant = store.leaderboard.constant_knobs(
        campaign.id, objective, listing=listing, knobs=campaign.stored.shown_knobs
    )
    # Metrics come first: of a wide table, a narrow window shows the first columns.
    names = [name for name in choices if name in columns] or [
        *_SHOWN_METRICS,
        *(name for name in (*KNOB_FIELDS, *of_jobs) if name not in constant),
    ]
    shown_columns = [known[name] for name in names]
    return LeaderboardTable(
        objective=objective,
        listing=listing,
        columns=[_column(each, listing) for each in shown_columns],
        lines=_lines(page, shown_columns, has_front=len(campaign.objectives) > 1),
        constant={
            known[name].label: "-" if value is None else word_of(value)
            for name, value in constant.items()
            if name not in names and not (name in KNOBS and value == KNOBS[name].default)
        },
        facets=_facets(store, campaign, listing, known, opened),
        choices=[(name, known[name].label) for name in choices],
        bounds=[(name, COLUMNS[name].label, *listing.wanted.bounds(name)) for name in METRICS],
        total=page.total,
        source=page.source,
        offset=offset,
        chosen=frozenset(columns),
        peak=device_peak_words(page.layouts),
    )


def _column(shown: RankedColumn, listing: LeaderboardListing) -> LeaderboardColumn:
    name = shown.name
    first = "asc" if name in _SMALL_IS_GOOD or is_job_key(name) else "desc"
    is_sorted = listing.sort == name
    order = "desc" if listing.descending else "asc"
    return LeaderboardColumn(
        name=name,
        heading=shown.label,
        is_number=shown.is_number,
        sorted=("descending" if listing.descending else "ascending") if is_sorted else "none",
        next_order=first if not is_sorted else ("asc" if order == "desc" else "desc"),
    )


def _facets(
    store: Store,
    campaign: CampaignRecord,
    listing: LeaderboardListing,
    known: Mapping[str, RankedColumn],
    opened: str | None,
) -> list[KnobFacet]:
    knobs = campaign.stored.shown_knobs
    same = store.leaderboard.constant_knobs(campaign.id, knobs=knobs)
    every = (*KNOB_FIELDS, *(JOB_PREFIX + name for name in knobs))
    chosen = {name: listing.wanted.stated.get(name, ()) for name in every}
    num_ranked = store.leaderboard.ranked_summary(campaign.id).num_ranked
    names = [name for name in every if chosen[name] or (num_ranked and name not in same)]
    # Of many layouts, the values of all knobs would take longer than the rest of the page.
    is_short = num_ranked <= _COUNTED_AT_ONCE
    counted = store.leaderboard.knob_values(
        campaign.id, *(name for name in names if is_short or name == opened), knobs=knobs
    )
    return [
        KnobFacet(
            name=name,
            label=known[name].label,
            counts={word_of(v): number for v, number in counted[name].items() if v is not None}
            if name in counted
            else None,
            chosen=frozenset(map(word_of, chosen[name])),
        )
        for name in names
    ]


def _lines(
    page: PageOfLayouts, columns: Sequence[RankedColumn], *, has_front: bool
) -> list[LeaderboardLine]:
    place = _scale(page.layouts)
    return [
        LeaderboardLine(
            ranked=each,
            cells=[column.cell(each) for column in columns],
            marks=_marks(each, on_front=has_front and each.trial.id in page.front),
            drawn=(place(each.value_low), place(each.value), place(each.value_high)),
        )
        for each in page.layouts
    ]


def _marks(ranked: RankedLayout, *, on_front: bool) -> list[str]:
    held = {
        "tied_with_first": ranked.tied_with_first and ranked.rank > 1,
        "shortened": ranked.shortened,
        "on_front": on_front,
        "is_baseline": ranked.is_baseline,
        "disturbed": ranked.disturbed,
    }
    marks = [COLUMNS[name].label for name, holds in held.items() if holds]
    return [variant(ranked), *marks] if variant(ranked) else marks


def _scale(layouts: Sequence[RankedLayout]) -> Callable[[float], float]:
    """Maps values to positions in the plots of a page, which have one scale."""
    ends = [end for each in layouts for end in (each.value_low, each.value_high)]
    low, high = (min(ends), max(ends)) if ends else (0.0, 1.0)
    reach = (high - low) or 1.0
    length = _INTERVAL_WIDTH - 2 * _MARGIN
    return lambda value: round(_MARGIN + (value - low) / reach * length, 1)
