"""Layouts of the leaderboard as documents, as quickly as the database returns their columns.

A page has some 7,000 figures. One statement selects them all, in the order of the documents that
they end in; neither rows of the ORM nor records are made of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, Final

from sqlalchemy import Integer, Select, bindparam, func, select
from sqlalchemy.orm import Session

from results_db.database.compiled_statement import DriverStatement
from results_db.events.event_log import CampaignResults
from results_db.leaderboard.listing import count_listed
from results_db.leaderboard.pages import PageStatements, RankedPage
from results_db.leaderboard.ranking import (
    Ranking,
    best_first,
    in_campaign_of_parameter,
    ranked_columns,
    rows_of,
)
from results_db.models.standings import LeaderboardRow
from results_db.models.tables import (
    BreakdownRow,
    Import,
    MeasurementRow,
    StageMemoryRow,
    Trial,
)
from results_db.rows import COST_COLUMNS, PLAIN_MEASUREMENT_FIELDS
from search_spaces.protocol.outcome import Breakdown
from search_spaces.spec.layout import LAYOUT_FIELDS
from search_spaces.spec.objectives import MEMORY_HEADROOM, memory_headroom

_TRIAL: Final = (
    "id",
    "number",
    "campaign_id",
    "layout_key",
    "num_devices",
    "global_batch_size",
    "state",
    "reason",
    "message",
    "node",
    "attempt",
    "lost_attempts",
    "iterations_done",
    "repeat_of",
    "is_baseline",
    "node_seconds",
    "created_at",
    "started_at",
    "ended_at",
)
_COST: Final = tuple(COST_COLUMNS)
_BREAKDOWN: Final = tuple(field.name for field in fields(Breakdown))
_MEASUREMENT: Final = (
    *PLAIN_MEASUREMENT_FIELDS,
    "peak_memory_bytes_by_stage",
    "peak_reserved_bytes_by_stage",
    "breakdown",
)
_DOCUMENT: Final = (
    *_TRIAL,
    "layout",
    "cost",
    "measurement",
    "objectives",
    "on_front",
    "value",
    "value_low",
    "value_high",
    "step_time_s",
    "num_runs",
    "shortened",
    "tied_with_first",
    "rank",
)
_PEAK: Final = PLAIN_MEASUREMENT_FIELDS.index("peak_memory_bytes")

_STAGES: Final = select(
    StageMemoryRow.trial_id, StageMemoryRow.peak_memory_bytes, StageMemoryRow.peak_reserved_bytes
).order_by(StageMemoryRow.trial_id, StageMemoryRow.stage)

Column = Sequence[Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentStatements:
    """The statements of pages that become documents, and where their columns go."""

    page: PageStatements
    objectives: tuple[str, ...]
    """The objectives that a document shows."""
    parts: Mapping[str, slice]
    """The columns of a selected row that make each part of a document."""
    stages: DriverStatement
    """The pipeline stages of the first rows of a campaign."""
    about: DriverStatement
    """The number of a campaign's layouts, and the source of an imported campaign."""

    def documents(
        self, session: Session, page: RankedPage, device_memory_bytes: int | None
    ) -> list[dict[str, Any]]:
        """Layouts as documents.

        Args:
            session: the transaction that selected the page.
            page: selected with `self.page`.
            device_memory_bytes: of the campaign's cluster; None: its description does not say.
        """
        if not page.rows:
            return []
        columns = list(zip(*page.selected, strict=True))
        parts = {name: columns[where] for name, where in self.parts.items()}
        values, _, num_runs, shortened, step_times_s, *_ = parts["ranked"]
        pairs = list(zip(values, page.factors, strict=True))
        made = zip(
            *parts["trial"],
            _dicts(LAYOUT_FIELDS, parts["layout"]),
            _dicts((*_COST, "total"), [*parts["cost"], map(_sum_of_four, *parts["cost"])]),
            self._measurements(session, parts, page),
            self._objectives(parts, device_memory_bytes),
            *parts["on_front"],
            values,
            [None if factor is None else value / factor for value, factor in pairs],
            [None if factor is None else value * factor for value, factor in pairs],
            step_times_s,
            num_runs,
            shortened,
            page.ties,
            page.ranks,
            strict=True,
        )
        return [dict(zip(_DOCUMENT, each, strict=True)) for each in made]

    def total_and_source(
        self, results: CampaignResults, ranking: Ranking, page: RankedPage
    ) -> tuple[int, str | None]:
        """The number of layouts that are listed in all, and the source of an imported campaign."""
        campaign_id, session = ranking.campaign_id, results.session
        if ranking.listing.is_whole:
            ((total, source),) = self.about.rows(session, campaign=campaign_id)
        else:
            total = 0 if page.first is None else count_listed(results, ranking, page.first)
            source = session.scalar(select(Import.source).where(Import.campaign_id == campaign_id))
        return total, source

    def _measurements(
        self, session: Session, parts: Mapping[str, Sequence[Column]], page: RankedPage
    ) -> Iterator[dict[str, Any]]:
        trial_ids = parts["trial"][0]
        if page.is_top:
            campaign_id, most = parts["trial"][2][0], len(page.rows)
            rows = self.stages.rows(session, campaign=campaign_id, most=most)
        else:
            rows = rows_of(session, _STAGES.where(StageMemoryRow.trial_id.in_(trial_ids)))
        peaks: defaultdict[int, list[int]] = defaultdict(list)
        reserved: defaultdict[int, list[int]] = defaultdict(list)
        for trial_id, peak, reserved_there in rows:
            peaks[trial_id].append(peak)
            if reserved_there is not None:
                reserved[trial_id].append(reserved_there)
        breakdowns = (
            None if each["compute_s"] is None else each
            for each in _dicts(_BREAKDOWN, parts["breakdown"])
        )
        by_stage = [[peaks[id_] for id_ in trial_ids], [reserved[id_] for id_ in trial_ids]]
        return _dicts(_MEASUREMENT, [*parts["measurement"], *by_stage, breakdowns])

    def _objectives(
        self, parts: Mapping[str, Sequence[Column]], device_memory_bytes: int | None
    ) -> Iterator[dict[str, Any]]:
        columns: list[Iterable[Any]] = list(parts["objectives"])
        if MEMORY_HEADROOM in self.objectives:
            columns[self.objectives.index(MEMORY_HEADROOM)] = [
                memory_headroom(peak, device_memory_bytes) for peak in parts["measurement"][_PEAK]
            ]
        return _dicts(self.objectives, columns)


def _dicts(names: Sequence[str], columns: Iterable[Iterable[Any]]) -> Iterator[dict[str, Any]]:
    return (dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True))


def _sum_of_four(one: float, two: float, three: float, four: float) -> float:
    return one + two + three + four


@lru_cache(maxsize=1000)
def document_statements(by: str, objectives: tuple[str, ...]) -> DocumentStatements:
    """The statements for a column that ranks; to build them takes as long as to run them.

    Args:
        by: name of the column of `LeaderboardRow`.
        objectives: that each document shows.
    """
    query, parts = _layouts_query(by, objectives)
    in_campaign = in_campaign_of_parameter()
    listed_ids = (
        select(LeaderboardRow.trial_id)
        .where(in_campaign)
        .order_by(*best_first(getattr(LeaderboardRow, by)))
        .limit(bindparam("most", type_=Integer))
    )
    source = select(Import.source).where(Import.campaign_id == bindparam("campaign", type_=Integer))
    total = select(func.count()).select_from(LeaderboardRow).where(in_campaign)
    return DocumentStatements(
        page=PageStatements.of(by, query),
        objectives=objectives,
        parts=parts,
        stages=DriverStatement(_STAGES.where(StageMemoryRow.trial_id.in_(listed_ids))),
        about=DriverStatement(select(total.scalar_subquery(), source.scalar_subquery())),
    )


def _layouts_query(
    by: str, objectives: tuple[str, ...]
) -> tuple[Select[*tuple[Any, ...]], Mapping[str, slice]]:
    """A query with one row for each layout, and the columns of each part of a document."""
    parts = {
        "ranked": ranked_columns(getattr(LeaderboardRow, by)),
        "on_front": [LeaderboardRow.on_front],
        "objectives": [
            getattr(LeaderboardRow, "value" if name == MEMORY_HEADROOM else name).label(
                f"of_{name}"
            )
            for name in objectives
        ],
        "trial": [getattr(Trial, name).label(f"of_trial_{name}") for name in _TRIAL],
        "layout": [getattr(Trial, name).label(f"layout_{name}") for name in LAYOUT_FIELDS],
        "cost": [getattr(Trial, COST_COLUMNS[name]).label(f"cost_{name}") for name in _COST],
        "measurement": [
            getattr(MeasurementRow, name).label(f"measured_{name}")
            for name in PLAIN_MEASUREMENT_FIELDS
        ],
        "breakdown": [getattr(BreakdownRow, name).label(f"part_{name}") for name in _BREAKDOWN],
    }
    slices, begin = {}, 0
    for name, columns in parts.items():
        slices[name] = slice(begin, begin + len(columns))
        begin += len(columns)
    query = (
        select(*(column for columns in parts.values() for column in columns))
        .select_from(LeaderboardRow)
        .join(Trial, Trial.id == LeaderboardRow.trial_id)
        .join(MeasurementRow, MeasurementRow.trial_id == LeaderboardRow.trial_id)
        .outerjoin(BreakdownRow, BreakdownRow.trial_id == LeaderboardRow.trial_id)
    )
    return query, slices
