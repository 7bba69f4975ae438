"""The leaderboard, the Pareto front and the history of a report: their rows and plots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from markupsafe import Markup

from api.dashboard.drawings.plots import Point, history, interval, scale, scatter
from api.report.facts import SHOWN, ReportFacts
from api.service.formatting import (
    half_interval,
    layout_cells,
    memory,
    objective_figure,
    percent,
    unit,
)
from results_db.campaigns.reports import TrialPoint
from results_db.leaderboard.ranked_layout import RankedLayout
from search_spaces.spec.objectives import MEMORY_HEADROOM
from search_spaces.terminal.text_table import folded

_INTERVAL_WIDTH: Final = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportTable:
    """Rows with what stands beside them."""

    columns: Sequence[str]
    """Headings; one that begins with ">" is of numbers."""
    rows: Sequence[Sequence[str | Markup]]
    same: Sequence[str] = ()
    """Columns that are the same in all rows, in words."""
    plot: Markup | None = None


def leaderboard(facts: ReportFacts) -> ReportTable | None:
    """The best layouts, with their intervals on one scale; None: no trial is ranked."""
    shown = facts.best[:SHOWN]
    if not shown:
        return None
    layouts = [layout_cells(ranked.trial.layout) for ranked in shown]
    columns, knobs, same = folded(list(layouts[0]), [list(each.values()) for each in layouts])
    ends = [end for each in shown for end in (each.low, each.high, each.value) if end is not None]
    over = scale(ends, 6.0, _INTERVAL_WIDTH - 6.0)
    rows: list[list[Any]] = []
    for place, ranked in enumerate(shown):
        measured = ranked.trial.measurement
        assert measured is not None  # it is ranked
        speedup = measured.step_time_s / ranked.step_time_s
        drawn = Markup("")
        if ranked.low is not None and ranked.high is not None:
            drawn = interval(ranked.value, ranked.low, ranked.high, over, is_winner=place == 0)
        rows.append(
            [
                str(place + 1),
                _marks(facts, place, ranked),
                str(ranked.trial.number),
                *knobs[place],
                objective_figure(facts.campaign.objective, ranked.value),
                half_interval(ranked.value, ranked.high),
                drawn,
                str(ranked.num_runs),
                percent(measured.mfu, speedup),
                memory(measured.peak_memory_bytes),
            ]
        )
    figures = (f">{unit(facts.campaign.objective)}", ">95 %", "interval", ">runs", ">MFU")
    return ReportTable(
        columns=(">rank", "mark", ">trial", *columns, *figures, ">peak memory"),
        rows=rows,
        same=same,
    )


def _marks(facts: ReportFacts, place: int, ranked: RankedLayout) -> str:
    marks = {
        "=": place > 0 and ranked.is_tied,
        "short": ranked.shortened,
        "front": len(facts.campaign.objectives) > 1 and ranked.trial.id in facts.front,
    }
    return " ".join(mark for mark, is_set in marks.items() if is_set)


def front(facts: ReportFacts) -> ReportTable | None:
    """Layouts in the plane of two objectives; None: fewer than two have both."""
    across, up = facts.plane
    placed = facts.placed()
    if len(placed) < 2:
        return None
    winner_id = None if facts.winner is None else facts.winner.trial.id
    points = [
        Point(
            x=_drawn(across, each.x),
            y=_drawn(up, each.y),
            kind=_kind(
                each.trial, is_winner=each.trial.trial_id == winner_id, on_front=each.on_front
            ),
            says=_says(each.trial, (across, each.x), (up, each.y)),
        )
        # The winner and the front are drawn last, over the others.
        for each in sorted(
            placed, key=lambda each: (each.trial.trial_id == winner_id, each.on_front)
        )
    ]
    on_front = sorted((each for each in placed if each.on_front), key=lambda each: -each.y)
    line = sorted(
        (_drawn(across, each.x), _drawn(up, each.y), str(each.trial.number)) for each in on_front
    )
    legend = [("winner", "winner"), ("front", "on the front"), ("full", "other layouts")]
    return ReportTable(
        plot=scatter(points, line, legend, x_label=_label(across), y_label=_label(up)),
        columns=(">trial", "layout", f">{_label(up)}", f">{_label(across)}"),
        rows=[
            (
                str(each.trial.number),
                each.trial.layout_key,
                objective_figure(up, each.y),
                objective_figure(across, each.x),
            )
            for each in on_front[:SHOWN]
        ],
    )


def _drawn(objective: str, value: float) -> float:
    return value * 100 if objective == MEMORY_HEADROOM else value


def _label(objective: str) -> str:
    return "memory headroom, %" if objective == MEMORY_HEADROOM else unit(objective)


def _kind(trial: TrialPoint, *, is_winner: bool, on_front: bool = False) -> str:
    if is_winner:
        return "winner"
    if on_front:
        return "front"
    return "short" if trial.shortened else "full"


def _says(trial: TrialPoint, *figures: tuple[str, float]) -> str:
    told = ", ".join(f"{objective_figure(name, number)} {_label(name)}" for name, number in figures)
    return f"trial {trial.number}: {told}; {trial.layout_key}"


_FAILED_KINDS: Final = {"INFEASIBLE": "memory", "FAILED": "failed", "CANCELLED": "cancelled"}

_LEGEND: Final = (
    ("full", "measured"),
    ("again", "measured again"),
    ("short", "stopped early"),
    ("unranked", "not ranked"),
    ("memory", "out of memory"),
    ("failed", "failed"),
    ("cancelled", "cancelled"),
)


def history_plot(facts: ReportFacts) -> Markup | None:
    """The values of trials in the order in which they ended; None: none has."""
    if not facts.ended:
        return None
    objective = facts.campaign.objective
    measured: list[Point] = []
    failed: list[Point] = []
    best: list[tuple[float, float]] = []
    for place, trial in enumerate(facts.ended, 1):
        value = facts.value(trial, objective)
        if trial.state != "COMPLETED" or value is None:
            kind = _FAILED_KINDS.get(trial.state, "failed")
            why = f"trial {trial.number}: {trial.reason or trial.state}; {trial.layout_key}"
            failed.append(Point(x=place, y=0.0, kind=kind, says=why))
            continue
        is_ranked = facts.is_ranked(trial)
        kind = _history_kind(trial, is_ranked=is_ranked)
        measured.append(Point(x=place, y=value, kind=kind, says=_says(trial, (objective, value))))
        counts = is_ranked and not trial.shortened
        if counts and (not best or value > best[-1][1]):
            best.append((place, value))
    if best:
        best.append((float(len(facts.ended)), best[-1][1]))
    there = {point.kind for point in (*measured, *failed)}
    legend = [(kind, words) for kind, words in _LEGEND if kind in there]
    return history(measured, best, failed, legend, y_label=unit(objective))


def _history_kind(trial: TrialPoint, *, is_ranked: bool) -> str:
    if not is_ranked:
        return "unranked"
    if trial.shortened:
        return "short"
    return "again" if trial.is_repeat else "full"
