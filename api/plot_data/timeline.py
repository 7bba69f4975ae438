"""The timeline of an allocation: the attempts of a campaign's trials as bars against time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

from layout_tuner.api.formatting import moment, state_words
from layout_tuner.api.plot_data.plot_data import Bar, PlottedData, Spot, bars, marked, rows_layout
from layout_tuner.results_db.campaigns.history_and_timeline import CampaignTimeline, TimelineAttempt
from layout_tuner.terminal.plurals import counted

MOST_ROWS_DRAWN: Final = 60

_LOOKS: Final[Mapping[str, Mapping[str, Any]]] = {
    "completed": {"color": "--part1"},
    "infeasible": {"color": "--part3", "pattern": {"shape": "/"}},
    "failed": {"color": "--part4", "pattern": {"shape": "x"}},
    "cancelled": {"color": "--part6", "pattern": {"shape": "-"}},
    "lost": {"color": "--tint", "line": {"color": "--bad", "width": 1.5}},
    "waiting": {"color": "--ground", "line": {"color": "--run", "width": 1.5}},
    "running": {"color": "--run-tint", "line": {"color": "--run", "width": 1.5}},
}
"""The colour of each kind of bar with a pattern or an edge: no kind has a colour alone."""

_UNITS: Final = ((5 * 3600.0, "hours", 3600.0), (300.0, "minutes", 60.0), (0.0, "seconds", 1.0))
"""Units of the axis with their seconds, each from a length in seconds on."""


def timeline(found: CampaignTimeline, now: datetime, marks: Mapping[int, str]) -> PlottedData:
    """Attempts in rows of their workers; a worker that runs several at once has several rows.

    Bars of running attempts end at `now`; `marks` has "winner" or "baseline" by the ids of trials.
    """
    if not found.attempts:
        return PlottedData(says=["No worker has leased a trial of this campaign."])
    begin = min(each.started_at for each in found.attempts)
    last = max(each.ended_at or now for each in found.attempts)
    length_s = max((last - begin).total_seconds(), 1.0)
    unit, unit_s = next(each[1:] for each in _UNITS if length_s >= each[0])
    rows, names = _rows(found.attempts, last)
    shown = [each for each in found.attempts if rows[each] < MOST_ROWS_DRAWN]
    of_kind: dict[str, list[Bar]] = {kind: [] for kind in _LOOKS}
    of_mark: dict[str, list[Spot]] = {}
    for each in shown:
        kind, words = _kind(each)
        start = (each.started_at - begin) / timedelta(seconds=unit_s)
        length = ((each.ended_at or last) - each.started_at) / timedelta(seconds=unit_s)
        nodes = counted(each.num_nodes, "node")
        text = f"trial {each.number}, attempt {each.attempt}: {words}; {nodes}"
        label = str(each.number) if kind in ("completed", "running") else f"{each.number} {words}"
        bar = Bar(rows[each], start, length, text, each.trial_id, label)
        of_kind[kind].append(bar)
        if mark := marks.get(each.trial_id):
            spot = Spot(start + length / 2, rows[each] - 0.35, text, each.trial_id)
            of_mark.setdefault(mark, []).append(spot)
    return PlottedData(
        traces=[
            *(
                trace
                for kind, look in _LOOKS.items()
                for trace in bars(kind, of_kind[kind], **look)
            ),
            *(trace for mark, spots in of_mark.items() for trace in marked(mark, *spots)),
        ],
        layout=rows_layout(
            f"{unit} since {moment(begin)}", length_s / unit_s, names[:MOST_ROWS_DRAWN]
        ),
        says=[
            "One bar for each attempt, in the row of its worker. Blue edges are attempts that run, or "
            "wait for devices where the bar is empty; red edges those that were lost or returned.",
            *_left_out_words(found, len(found.attempts) - len(shown)),
        ],
        headings=(">trial", ">attempt", "worker", "state", "started", "ended", ">nodes", "mark"),
        rows=[
            (
                str(each.number),
                str(each.attempt),
                each.worker_name,
                _kind(each)[1],
                moment(each.started_at),
                moment(each.ended_at),
                str(each.num_nodes),
                marks.get(each.trial_id, ""),
            )
            for each in found.attempts
        ],
        row_ids=[each.trial_id for each in found.attempts],
        hides=found.num_left_out > 0,
    )


def _rows(
    attempts: Sequence[TimelineAttempt], end: datetime
) -> tuple[dict[TimelineAttempt, int], list[str]]:
    """The row of each attempt, and the names of the rows: a worker's stands at its first."""
    free: dict[str, list[datetime]] = {}
    own: dict[TimelineAttempt, int] = {}
    names: dict[str, str] = {}
    for each in sorted(attempts, key=lambda each: (each.started_at, each.trial_id)):
        names[each.worker_id] = each.worker_name
        ends = free.setdefault(each.worker_id, [])
        row = next((i for i, at in enumerate(ends) if at <= each.started_at), len(ends))
        ends[row : row + 1] = [each.ended_at or end]
        own[each] = row
    first: dict[str, int] = {}
    labels: list[str] = []
    for worker, ends in free.items():
        first[worker] = len(labels)
        labels += [names[worker][:26], *[""] * (len(ends) - 1)]
    return {each: first[each.worker_id] + row for each, row in own.items()}, labels


def _kind(attempt: TimelineAttempt) -> tuple[str, str]:
    """The kind of an attempt's bar, and its state in words."""
    if attempt.ending is None:
        # A worker leases ahead: such a trial holds no devices yet.
        waits = attempt.phase == "waiting"
        return ("waiting", "waiting for devices") if waits else ("running", "RUNNING")
    if attempt.ending in ("lost", "returned", "superseded"):
        return "lost", attempt.ending.upper()
    return attempt.state.lower(), state_words(attempt.state, attempt.reason)


def _left_out_words(found: CampaignTimeline, num_beyond: int) -> Iterator[str]:
    if num_beyond:
        yield f"{num_beyond:,} attempts beyond {MOST_ROWS_DRAWN} rows are not drawn."
    if found.num_left_out:
        yield f"{found.num_left_out:,} older attempts are left out."
