"""Pages of a campaign's plots and of the timeline of its allocation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Final

from fastapi import Depends
from fastapi.responses import HTMLResponse, JSONResponse

from layout_tuner.api.dashboard.campaign_page import ShowDep
from layout_tuner.api.dependencies import CampaignDep, StoreDep
from layout_tuner.api.formatting import unit
from layout_tuner.api.html.rendering import PAGE_HEADERS
from layout_tuner.api.http.lazy_routes import LazyRouter
from layout_tuner.api.plot_data.campaign_plots import CampaignPlots, PlotChoices, PlotName
from layout_tuner.results_db.campaigns.history_and_timeline import FailureCount
from layout_tuner.search_spaces.layouts.layout import KNOBS
from layout_tuner.search_spaces.objectives import ALL_OBJECTIVES

router = LazyRouter(prefix="/campaigns/{campaign}")

MOST_NODES: Final = 12
"""Nodes with a column in the table of failures; the others share one."""


async def plots_of(
    campaign: CampaignDep, store: StoreDep, choices: Annotated[PlotChoices, Depends()]
) -> CampaignPlots:
    """The plots of the campaign, as the reader has chosen them."""
    return CampaignPlots(store=store, campaign=campaign, choices=choices)


PlotsDep = Annotated[CampaignPlots, Depends(plots_of)]


@router.get("/plots")
def show_plots(show: ShowDep, plots: PlotsDep) -> HTMLResponse:
    return show(
        "plots.html",
        plots=plots,
        knobs=plots.facts.knobs,
        objectives=[(name, unit(name)) for name in ALL_OBJECTIVES],
        pairs=[(name, plots.facts.knobs[name].label) for name in plots.facts.varying or KNOBS],
    )


@router.get("/figures/{name}.json")
def show_plot_data(name: PlotName, plots: PlotsDep) -> JSONResponse:
    """The data of one plot, for the script of the page."""
    headers = {name: PAGE_HEADERS[name] for name in ("Cache-Control", "Vary")}
    return JSONResponse(plots.data_of(name, plots.choices.knob).document(), headers=headers)


@router.get("/timeline")
def show_timeline(show: ShowDep, plots: PlotsDep) -> HTMLResponse:
    """The attempts of a campaign against time, and its failures by reason and node."""
    failures = plots.store.history.failures(plots.campaign.id)
    return show(
        "timeline.html",
        plots=plots,
        failures=failure_table(failures),
        num_failures=sum(each.num_trials for each in failures),
    )


def failure_table(found: Sequence[FailureCount]) -> dict[str, Any]:
    """Failures with a row for each reason and a column for each node, the most first."""
    by_node: Counter[str] = Counter()
    by_reason: Counter[tuple[str, str]] = Counter()
    cells: Counter[tuple[tuple[str, str], str]] = Counter()
    for each in found:
        reason = (each.reason, each.state)
        by_node[each.node] += each.num_trials
        by_reason[reason] += each.num_trials
        cells[reason, each.node] += each.num_trials
    shown = [node for node, _ in by_node.most_common(MOST_NODES)]
    others = [node for node in by_node if node not in shown]
    headings = [node or "node unknown" for node in shown]
    rows = []
    for reason, total in by_reason.most_common():
        counts = [cells[reason, node] for node in shown]
        if others:
            counts.append(sum(cells[reason, node] for node in others))
        rows.append((*reason, *(f"{count:,}" if count else "" for count in counts), f"{total:,}"))
    if others:
        headings.append(f"{len(others)} other nodes")
    return {
        "headings": ("reason", "state", *(f">{name}" for name in headings), ">all"),
        "rows": rows,
    }
