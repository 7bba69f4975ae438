"""The plot of usage: node-hours over time, by use."""

from __future__ import annotations

from datetime import date, timedelta
from itertools import accumulate

from layout_tuner.api.plot_data.plot_data import PlottedData, line
from layout_tuner.results_db.service_records import USAGE_PARTS, UsageRead


def usage_over_time(found: UsageRead) -> PlottedData:
    """A line for each use, which climbs in each day by its node-hours, to the sum of the period."""
    if not found.days:
        return PlottedData(says=["No campaign used a node in these days."])
    number = (found.until - found.since).days + 1
    by_day = {(date.fromisoformat(row.name or "") - found.since).days: row for row in found.days}
    traces, top = [], 0.0
    for place, part in enumerate(USAGE_PARTS, 1):
        used = [getattr(by_day[n], part) if n in by_day else 0.0 for n in range(number)]
        sums = list(accumulate(used, initial=0.0))
        top = max(top, sums[-1])
        if sums[-1]:
            name = part.replace("_", " ")
            traces.append(line(name, range(number + 1), sums, color=f"--part{place}"))
    ticks = range(0, number + 1, -(-number // 8))
    texts = [f"{found.since + timedelta(days=tick)}" for tick in ticks]
    across = {"tickvals": list(ticks), "ticktext": texts, "range": [0, number]}
    up = {"title": {"text": "node-hours"}, "range": [0, 1.05 * top or 1.0]}
    says = ["Node-hours since the first day; a day begins at its mark, in UTC."]
    return PlottedData(traces=traces, layout={"xaxis": across, "yaxis": up}, says=says)
