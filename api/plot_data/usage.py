"""The plot of usage: node-hours over time, by use."""

from __future__ import annotations

from datetime import date, timedelta
from typing import Any, Final

from layout_tuner.api.plot_data.plot_data import PlottedData, line
from layout_tuner.results_db.service_records import USAGE_PARTS, UsageRead

_MOST_BARS: Final = 60


def usage_over_time(found: UsageRead) -> PlottedData:
    """A bar for each day, or for several where the period is long; parts lie on each other."""
    if not found.days:
        return PlottedData(says=["No campaign used a node in these days."])
    width = -(-((found.until - found.since).days + 1) // _MOST_BARS)
    number = (found.until - found.since).days // width + 1
    tops, traces = [0.0] * number, []
    for place, part in enumerate(USAGE_PARTS, 1):
        heights = [0.0] * number
        for row in found.days:
            bar = (date.fromisoformat(row.name or "") - found.since).days // width
            heights[bar] += getattr(row, part)
        xs, ys = list[Any](), list[Any]()
        for bar, height in enumerate(heights):
            if height:
                low, tops[bar] = tops[bar], tops[bar] + height
                xs += [bar, bar, bar + 0.9, bar + 0.9, None]
                ys += [low, tops[bar], tops[bar], low, None]
        if xs:
            colour = f"--part{place}"
            drawn = line(part.replace("_", " "), xs, ys, color=colour)
            traces.append({**drawn, "fill": "toself", "fillcolor": colour})
    ticks = range(0, number, -(-number // 8))
    days = [found.since + timedelta(days=width * tick) for tick in ticks]
    across = {"tickvals": [tick + 0.45 for tick in ticks], "ticktext": [f"{day}" for day in days]}
    return PlottedData(
        traces=traces,
        layout={
            "xaxis": {"range": [0, number], "showgrid": False, **across},
            "yaxis": {"title": {"text": "node-hours"}, "range": [0, 1.05 * max(tops) or 1.0]},
        },
        says=[f"A bar is of {width} days, in UTC." if width > 1 else "A bar is of a day, in UTC."],
    )
