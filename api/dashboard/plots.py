"""Pages of a campaign's plots and of the timeline of its allocation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import HTMLResponse, JSONResponse

from api.dashboard.campaign_view import render_campaign
from api.dashboard.figures.campaign_plots import CampaignPlots, FigureName, PlotChoices
from api.dashboard.rendering import PAGE_HEADERS
from api.dependencies import CampaignDep, StoreDep
from api.service.formatting import unit
from results_db.campaigns.charts import FailureCount
from search_spaces.spec.layout import KNOBS
from search_spaces.spec.objectives import ALL_OBJECTIVES, AnyObjective

if TYPE_CHECKING:
    KnobName = str
else:
    # FastAPI reads the choices from it.
    KnobName = Literal[tuple(KNOBS)]

router = APIRouter()

MOST_NODES: Final = 12
"""Nodes with a column in the table of failures; the others share one."""

Show = Annotated[
    Literal["all"] | None,
    Query(description="all: axes include values that are far out, timelines all attempts."),
]


def read_choices(
    show: Show = None,
    x: KnobName | None = None,
    y: KnobName | None = None,
    across: AnyObjective | None = None,
    up: AnyObjective | None = None,
    knob: KnobName | None = None,
) -> PlotChoices:
    """What the reader has chosen."""
    return PlotChoices(show_all=show == "all", x=x, y=y, across=across, up=up, knob=knob)


ChoicesDep = Annotated[PlotChoices, Depends(read_choices)]


@router.get("/campaigns/{campaign}/plots", include_in_schema=False)
def show_plots(
    request: Request, campaign: CampaignDep, store: StoreDep, choices: ChoicesDep
) -> HTMLResponse:
    """The plots of a campaign."""
    plots = CampaignPlots(store=store, campaign=campaign, choices=choices)
    return render_campaign(
        request,
        store,
        campaign,
        "plots.html",
        plots=plots,
        knobs=KNOBS,
        objectives=[(name, unit(name)) for name in ALL_OBJECTIVES],
        pairs=[(name, KNOBS[name].label) for name in plots.facts.varying or KNOBS],
    )


@router.get("/campaigns/{campaign}/figures/{name}.json", include_in_schema=False)
def show_figure(
    name: FigureName, campaign: CampaignDep, store: StoreDep, choices: ChoicesDep
) -> JSONResponse:
    """The data of one plot, for the script of the page."""
    plots = CampaignPlots(store=store, campaign=campaign, choices=choices)
    headers = {name: PAGE_HEADERS[name] for name in ("Cache-Control", "Vary")}
    return JSONResponse(plots.draw(name, choices.knob).document(), headers=headers)


@router.get("/campaigns/{campaign}/timeline", include_in_schema=False)
def show_timeline(
    request: Request, campaign: CampaignDep, store: StoreDep, choices: ChoicesDep
) -> HTMLResponse:
    """The attempts of a campaign against time, and its failures by reason and node."""
    failures = store.failures(campaign.id)
    return render_campaign(
        request,
        store,
        campaign,
        "timeline.html",
        plots=CampaignPlots(store=store, campaign=campaign, choices=choices),
        failures=failure_table(failures),
        num_failures=sum(each.num_trials for each in failures),
    )


def failure_table(found: Sequence[FailureCount]) -> Mapping[str, Any]:
    """Failures with a row for each reason and a column for each node, the most first.

    Returns:
        `nodes`: the headings; `rows`: the reason, its state, a count for each node, and the sum.
    """
    by_node: Counter[str] = Counter()
    by_reason: Counter[tuple[str, str]] = Counter()
    cells: Counter[tuple[tuple[str, str], str]] = Counter()
    for each in found:
        by_node[each.node] += each.num_trials
    first = [node for node, _ in by_node.most_common(MOST_NODES)]
    others = len(by_node) - len(first)
    for each in found:
        reason = (each.reason, each.state)
        by_reason[reason] += each.num_trials
        cells[reason, each.node if each.node in first else "others"] += each.num_trials
    keys = [*first, *(["others"] if others else [])]
    words = (
        {"": "node unknown", "others": f"{others} other nodes"} if others else {"": "node unknown"}
    )
    return {
        "nodes": [words.get(key, key) for key in keys],
        "rows": [
            (reason, state, [cells[(reason, state), key] for key in keys], total)
            for (reason, state), total in by_reason.most_common()
        ],
    }
