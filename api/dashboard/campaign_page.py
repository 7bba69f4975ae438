"""The page of a campaign: its winner, its leaderboard, and the parts that its other pages share."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import Annotated, Any, Final

from fastapi import Depends, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from layout_tuner.api.campaigns.progress_and_waiting import progress_of
from layout_tuner.api.dependencies import CampaignDep, StoreDep
from layout_tuner.api.html.leaderboard_table import CHOICES, PAGE, leaderboard_table
from layout_tuner.api.html.rendering import campaign_path, go_to, page_url, render
from layout_tuner.api.html.result_sentences import finding_of, lead
from layout_tuner.api.http.lazy_routes import LazyRouter
from layout_tuner.api.http.query_parameters import SortKeyOf, TrialFilterDep
from layout_tuner.api.routes.leaderboard import Front, Order, Ranking, Sort, Within
from layout_tuner.documents.limits import MAX_ID
from layout_tuner.results_db.records import CampaignRecord
from layout_tuner.results_db.store import Store
from layout_tuner.results_db.trials.filter import LISTING_SORT_KEYS, LeaderboardListing
from layout_tuner.search_spaces.layouts.job_settings import MAX_JOB_KNOBS
from layout_tuner.search_spaces.objectives import OBJECTIVES

router = LazyRouter()

MAX_COLUMNS: Final = len(CHOICES) + MAX_JOB_KNOBS

_OF_PAGE: Final = ("column", "facet", "offset", "jump", "done")
"""Query parameters of the page that the API's leaderboard does not have, or not so."""


TABS: Final = (
    ("Leaderboard", ""),
    ("Plots", "/plots"),
    ("Timeline", "/timeline"),
    ("Trials", "/trials"),
    ("Failures", "/failures"),
    ("Events", "/events"),
)
"""Names of the tabs with the ends of their paths."""


async def campaign_page(
    request: Request, campaign: CampaignDep, store: StoreDep
) -> Callable[..., HTMLResponse]:
    """Renders a page of the campaign: a template that extends campaign_base.html."""

    def show(template: str, **context: Any) -> HTMLResponse:
        baselines = store.baselines.of_campaigns([campaign])
        return render(
            request,
            template,
            campaign=campaign,
            base=campaign_path(request, campaign),
            tabs=TABS,
            progress=progress_of(store, [campaign], baselines, store.now())[campaign.id],
            baseline=baselines.get(campaign.id),
            budget=campaign.stored.budget,
            may_change=request.state.holder.may_change(campaign),
            **context,
        )

    return show


ShowDep = Annotated[Callable[..., HTMLResponse], Depends(campaign_page)]


@router.get("/campaigns/{campaign}")
def show_campaign(
    request: Request,
    campaign: CampaignDep,
    store: StoreDep,
    show: ShowDep,
    wanted: TrialFilterDep,
    objective: Ranking = None,
    front: Front = False,
    within: Within = None,
    sort: Sort = None,
    order: Order = "asc",
    column: Annotated[list[str] | None, Query(max_length=MAX_COLUMNS)] = None,
    facet: Annotated[Annotated[str, SortKeyOf(LISTING_SORT_KEYS)] | None, Query()] = None,
    offset: Annotated[int, Query(ge=0, le=MAX_ID)] = 0,
    jump: Annotated[int | None, Query(ge=1, le=MAX_ID)] = None,
) -> Response:
    """The winner in sentences, and 100 rows of the leaderboard."""
    if jump is not None:
        return _to_trial(request, store, campaign, jump, objective)
    table = leaderboard_table(
        store,
        campaign,
        LeaderboardListing(
            front=front, wanted=wanted, within_percent=within, sort=sort, descending=order == "desc"
        ),
        objective=objective or campaign.objective,
        columns=column or (),
        offset=offset,
        opened=facet,
    )
    finding = finding_of(store, campaign)
    return show(
        "campaign.html",
        finding=finding,
        lead=lead(finding),
        table=table,
        objectives=OBJECTIVES,
        cheap=store.trials.ended_probes(campaign.id, cheap=True),
        csv=_table_address(request, campaign, "csv"),
        parquet=_table_address(request, campaign, "parquet"),
    )


def _table_address(request: Request, campaign: CampaignRecord, form: str) -> str:
    """The address of the listed layouts as a measurement table."""
    query = request.query_params
    asked = {name: query.getlist(name) for name in query if name not in _OF_PAGE}
    path = f"/v1{campaign_path(request, campaign)}/leaderboard"
    return page_url(request, path, **asked, format=form, intervals="true", limit=1000)


def _to_trial(
    request: Request, store: Store, campaign: CampaignRecord, number: int, objective: str | None
) -> Response:
    """Goes to the page of the whole leaderboard that has a trial."""
    trial = store.trials.by_number(campaign.id, number)
    rank = store.leaderboard.rank_of(campaign.id, trial.id, objective)
    path = campaign_path(request, campaign)
    if rank is None:
        return go_to(request, path, done="unranked", objective=objective)
    offset = (rank - 1) // PAGE * PAGE
    address = page_url(request, path, offset=offset or None, objective=objective)
    return RedirectResponse(f"{address}#rank-{rank}", HTTPStatus.SEE_OTHER)
