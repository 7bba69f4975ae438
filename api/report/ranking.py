"""Sections of the leaderboard, the Pareto front, and the history of measurements."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from api.dashboard.drawings.plots import Point, Scale, history, interval, scale, scatter
from api.report.facts import SHOWN, ReportFacts
from api.report.markup import Content, Markup, note, section, table, tag
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


def leaderboard(facts: ReportFacts) -> Markup:
    """The best layouts, with their intervals on one scale."""
    shown = facts.best[:SHOWN]
    if not shown:
        return section("Leaderboard", tag("p", "No trial is ranked yet."))
    objective = facts.campaign.objective
    layouts = [layout_cells(ranked.trial.layout) for ranked in shown]
    columns, knobs, same = folded(list(layouts[0]), [list(each.values()) for each in layouts])
    ends = [end for each in shown for end in (each.low, each.high, each.value) if end is not None]
    over = scale(ends, 6.0, _INTERVAL_WIDTH - 6.0)
    rows = [
        (
            str(rank),
            " ".join(_marks(facts, rank, ranked)),
            str(ranked.trial.number),
            *knobs[rank - 1],
            *_measured_columns(facts, rank, ranked, over),
        )
        for rank, ranked in enumerate(shown, 1)
    ]
    figures = (f">{unit(objective)}", ">95 %", "interval", ">runs", ">MFU", ">peak memory")
    return section(
        "Leaderboard",
        note(f"The same in all that are shown: {', '.join(same)}.") if same else None,
        table((">rank", "", ">trial", *columns, *figures), rows),
        note(*_leaderboard_words(facts, len(shown))),
    )


def _measured_columns(
    facts: ReportFacts, rank: int, ranked: RankedLayout, over: Scale
) -> tuple[Content, ...]:
    measured = ranked.trial.measurement
    assert measured is not None  # it is ranked
    speedup = measured.step_time_s / ranked.step_time_s
    drawn = None
    if ranked.low is not None and ranked.high is not None:
        drawn = interval(ranked.value, ranked.low, ranked.high, over, is_winner=rank == 1)
    return (
        objective_figure(facts.campaign.objective, ranked.value),
        half_interval(ranked.value, ranked.high),
        drawn,
        str(ranked.num_runs),
        percent(measured.mfu, speedup),
        memory(measured.peak_memory_bytes),
    )


def _leaderboard_words(facts: ReportFacts, num_shown: int) -> Iterator[str]:
    if facts.num_ranked > num_shown:
        yield f"{facts.num_ranked - num_shown:,} more are ranked. "
    if facts.num_constrained:
        yield (
            f"{facts.num_constrained:,} completed trials break the campaign's constraints and are "
            "not ranked. "
        )
    yield "mbs: micro-batch size; acc: micro-batches a step. "
    yield "A layout stands with the median of its runs. = : cannot be told apart from the first; "
    yield "short: stopped early, since it was slower than the best of its time"
    if len(facts.campaign.objectives) > 1:
        yield "; front: no other is as good in all of the campaign's objectives and better in one"
    yield "."


def _marks(facts: ReportFacts, rank: int, ranked: RankedLayout) -> Iterator[str]:
    if rank > 1 and ranked.is_tied:
        yield "="
    if ranked.shortened:
        yield "short"
    if len(facts.campaign.objectives) > 1 and ranked.trial.id in facts.front:
        yield "front"


def front(facts: ReportFacts) -> Markup:
    """Layouts in the plane of two objectives, and a table of the front."""
    across, up = facts.plane
    placed = facts.placed()
    if len(placed) < 2:
        return section(
            "Pareto front", tag("p", f"Too few layouts have both {across} and {up} for a front.")
        )
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
    line = sorted(
        (_drawn(across, each.x), _drawn(up, each.y), str(each.trial.number))
        for each in placed
        if each.on_front
    )
    legend = [("winner", "winner"), ("front", "on the front"), ("full", "other layouts")]
    rows = [
        (
            str(each.trial.number),
            each.trial.layout_key,
            objective_figure(up, each.y),
            objective_figure(across, each.x),
        )
        for each in sorted(placed, key=lambda each: -each.y)
        if each.on_front
    ]
    return section(
        "Pareto front",
        _what_front(facts, across, up),
        scatter(points, line, legend, x_label=_label(across), y_label=_label(up)),
        table((">trial", "layout", f">{_label(up)}", f">{_label(across)}"), rows[:SHOWN]),
    )


def _what_front(facts: ReportFacts, across: str, up: str) -> Markup:
    if len(facts.campaign.objectives) == 1:
        return note(
            f"The campaign was searched by {up} alone. Beside {across}, of which more is better too, "
            "these are the layouts that no other beats in both. Each stands with its first run."
        )
    others = " The front is over all objectives." if len(facts.campaign.objectives) > 2 else ""
    return note(f"More is better in both. Each layout stands with its first run.{others}")


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


_FAILED_KINDS = {"INFEASIBLE": "memory", "FAILED": "failed", "CANCELLED": "cancelled"}


def progress(facts: ReportFacts) -> Markup:
    """The values of trials in the order in which they ended."""
    if not facts.ended:
        return section("History", tag("p", "No trial has ended yet."))
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
    return section(
        "History",
        history(measured, best, failed, _legend(measured, failed), y_label=unit(objective)),
        note(
            "One point a run, repeats apart; the line is the best single run so far. The leaderboard "
            "stands by medians over runs, so that its winner may lie below a lucky run."
        ),
    )


def _history_kind(trial: TrialPoint, *, is_ranked: bool) -> str:
    if not is_ranked:
        return "unranked"
    if trial.shortened:
        return "short"
    return "again" if trial.is_repeat else "full"


_LEGEND = (
    ("full", "measured"),
    ("again", "measured again"),
    ("short", "stopped early"),
    ("unranked", "not ranked"),
    ("memory", "out of memory"),
    ("failed", "failed"),
    ("cancelled", "cancelled"),
)


def _legend(*points: list[Point]) -> list[tuple[str, str]]:
    there = {point.kind for each in points for point in each}
    return [(kind, words) for kind, words in _LEGEND if kind in there]
