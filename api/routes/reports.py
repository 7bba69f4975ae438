"""Results of a campaign: its report, and the analysis of its knobs."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends
from fastapi.responses import HTMLResponse

from layout_tuner.api.dependencies import CampaignDep, StoreDep
from layout_tuner.api.errors import AnalysisUnavailableError
from layout_tuner.api.html.theme_colours import coloured
from layout_tuner.api.http.lazy_routes import LazyRouter
from layout_tuner.api.http.query_parameters import JobDep
from layout_tuner.api.plot_data.campaign_plots import CampaignPlots, PlotChoices, PlotName
from layout_tuner.api.report.document import POLICY, report
from layout_tuner.api.schemas.campaigns_and_trials import AnalysisRead, KnobImportance, PlotRead
from layout_tuner.results_db.campaigns.imported_tables import IMPORTED

router = LazyRouter(prefix="/v1/campaigns", tags=["campaigns"])


@router.get("/{campaign}/report", response_class=HTMLResponse)
def read_report(campaign: CampaignDep, store: StoreDep, job: JobDep) -> HTMLResponse:
    """Read a campaign's report: one HTML document that loads no other file and runs no script.

    For a campaign that has not ended it shows the results so far. With `tokens` it has the days of
    the training job with each of the best layouts.
    """
    headers = {
        "Content-Security-Policy": POLICY,
        "Content-Disposition": f'inline; filename="{campaign.name}.html"',
    }
    return HTMLResponse(report(store, campaign, store.now(), job), headers=headers)


@router.get("/{campaign}/plots/{name}")
def read_plot(
    campaign: CampaignDep,
    store: StoreDep,
    name: PlotName,
    choices: Annotated[PlotChoices, Depends()],
) -> PlotRead:
    """Read a plot of a campaign as plotly draws it, with its caption.

    Without choices it is that of the campaign's page. Its colours are those of the light theme.
    """
    plots = CampaignPlots(store=store, campaign=campaign, choices=choices)
    data = plots.data_of(name, choices.knob)
    return PlotRead(**coloured(data.document()), says=list(data.says))


@router.get("/{campaign}/analysis")
def read_analysis(campaign: CampaignDep, store: StoreDep) -> AnalysisRead:
    """Read which knobs matter in a campaign, and how one step in each changes its winner.

    The driver computes the analysis when the campaign ends, and every minute or so while it runs.
    404 while there is none.
    """
    analysis = store.reports.analysis(campaign.id)
    if analysis is None and campaign.strategy == IMPORTED:
        raise AnalysisUnavailableError(
            f"campaign {campaign.name!r} is imported, and has no analysis: what was chosen elsewhere, "
            "and why, is not known here"
        )
    if analysis is None:
        raise AnalysisUnavailableError(
            f"campaign {campaign.name!r} ({campaign.state}) has no analysis yet: it is made when the "
            "campaign ends, and every minute or so while trials complete"
        )
    winner = store.trials.get(analysis.winner_id)
    return AnalysisRead.of(
        analysis,
        campaign=campaign.name,
        winner=winner.number,
        winner_layout=winner.layout_key,
        num_layouts=analysis.num_trials,
        importances=[
            KnobImportance(knob=knob, importance=share)
            for knob, share in analysis.importances.items()
        ],
    )
