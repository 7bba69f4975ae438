"""The page of usage: a plot over time, and a table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from fastapi import Request
from fastapi.responses import HTMLResponse

from layout_tuner.api.dependencies import StoreDep
from layout_tuner.api.formatting import usage_cells
from layout_tuner.api.html.rendering import page_url, render
from layout_tuner.api.http.lazy_routes import LazyRouter
from layout_tuner.api.plot_data.usage import usage_over_time
from layout_tuner.api.plots.static_plot import static_plot
from layout_tuner.api.routes.usage import UsageText, usage_of
from layout_tuner.documents.reading import read_choice
from layout_tuner.errors import CampaignInvalidError, SearchSpaceError
from layout_tuner.results_db.service_records import USAGE_BY

router = LazyRouter()


@router.get("/usage")
def show_usage(
    request: Request,
    store: StoreDep,
    by: UsageText = "owner",
    since: UsageText = "30d",
    until: UsageText = "",
    simulated: UsageText = "",
    tokens: UsageText = "1T",
) -> HTMLResponse:
    """Node-hours of a period, and a form for another."""
    given = {"by": by, "since": since, "until": until, "simulated": simulated, "tokens": tokens}
    shown: dict[str, Any] = {"found": None, "refusal": ""}
    try:
        kind = cast("Any", read_choice(by, USAGE_BY, CampaignInvalidError, field="by"))
        found = usage_of(store, kind, since, until, simulated=bool(simulated), tokens=tokens)
        rows = [*found.rows, replace(found.total, name="all")]
        shown["found"], shown["cells"] = found, [usage_cells(row) for row in rows]
        shown["links"] = [row.campaign_id and f"/campaigns/{row.campaign_id}" for row in rows]
        shown["plot"] = static_plot(usage_over_time(found), "Node-hours over time, by use")
    except SearchSpaceError as error:
        shown["refusal"] = str(error)
    asked = {name: text for name, text in given.items() if text}
    address = page_url(request, "/v1/usage", **asked, format="csv")
    return render(request, "usage.html", given=given, kinds=USAGE_BY, csv=address, **shown)
