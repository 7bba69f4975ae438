"""Analyses: which of a campaign's knobs matter, as the driver worked it out."""

from __future__ import annotations

from dataclasses import asdict

from fastapi import APIRouter

from api.dependencies import CampaignDep, StoreDep
from api.errors import AnalysisUnavailableError
from api.schemas import AnalysisRead, KnobImportance, KnobStepRead
from results_db.imports import IMPORTED

router = APIRouter(prefix="/v1", tags=["campaigns"])


@router.get("/campaigns/{campaign}/analysis")
def read_analysis(campaign: CampaignDep, store: StoreDep) -> AnalysisRead:
    """Read which knobs matter in a campaign, and what one step in each does to its winner.

    Worked out when the campaign ends, and now and then while it runs. 404 while there is none.
    """
    analysis = store.analysis(campaign.id)
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
    winner = store.trial(analysis.winner_id)
    assert analysis.computed_at is not None  # it was kept
    return AnalysisRead(
        campaign=campaign.name,
        objective=analysis.objective,
        winner=winner.number,
        winner_layout=winner.layout_key,
        num_layouts=analysis.num_trials,
        method=analysis.method,
        importances=[
            KnobImportance(knob=knob, importance=share)
            for knob, share in analysis.importances.items()
        ],
        steps=[
            KnobStepRead(**{**asdict(step), "also": list(step.also)}) for step in analysis.steps
        ],
        computed_at=analysis.computed_at,
    )
