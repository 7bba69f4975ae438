"""Exports: a trial's layout as the files of a training job."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from api import exporters
from api.dependencies import CampaignDep, StoreDep
from api.errors import ExportUnavailableError
from api.schemas.campaigns_and_trials import ExportRead
from api.service.formatting import gain_sentence
from results_db.campaigns.imports import IMPORTED
from results_db.records import CampaignRecord, TrialRecord
from results_db.store import Store
from search_spaces.documents.limits import MAX_ID
from search_spaces.spec.campaign import CampaignSpec
from search_spaces.spec.rules import violations
from search_spaces.trainers.base import TrainerJob

router = APIRouter(prefix="/v1", tags=["exports"])


@router.get("/campaigns/{campaign}/exports")
def export_trial(
    campaign: CampaignDep,
    store: StoreDep,
    format: Annotated[  # noqa: A002 - the parameter's name in the URL
        str,
        Query(description=f"One of {', '.join(exporters.FORMATS)}.", max_length=64),
    ],
    trial: Annotated[
        int | None,
        Query(ge=1, le=MAX_ID, description="Number of the trial; by default the best one."),
    ] = None,
) -> ExportRead:
    """Write the files of a training job with the layout of the best trial, or of another one.

    409 if the campaign has no ranked trial yet, if the other trial is not COMPLETED, or if an
    imported layout is not legal: it is unknown whether such a job would run.
    """
    return export_of(store, campaign, format, trial)


def export_of(
    store: Store, campaign: CampaignRecord, format_name: str, trial: int | None
) -> ExportRead:
    """The files of a training job for a trial by its number; None: for the best.

    Raises:
        ExportUnavailableError: there is no such trial to export.
        ExportFormatUnknownError: there is no such format.
        ExportImpossibleError: the format cannot express the layout.
    """
    chosen = _best(store, campaign) if trial is None else _completed(store, campaign, trial)
    notes: list[str] = []
    if campaign.strategy == IMPORTED:
        _refuse_illegal(campaign, chosen)
        source = store.import_source(campaign.id) or "a table that does not say where"
        notes.append(f"the layout was not measured here: it is imported, from {source}")
    gain = _gain(store, campaign, chosen)
    notes += [gain] if gain else []
    bundle = exporters.export(format_name, _source(campaign, chosen, gain))
    return ExportRead.of(bundle, trial=chosen.number, notes=[*notes, *bundle.notes])


def _best(store: Store, campaign: CampaignRecord) -> TrialRecord:
    best = store.winner(campaign.id, campaign.objective)
    if best is not None:
        return best.trial
    raise ExportUnavailableError(
        f"campaign {campaign.name!r} has no ranked trial to export; wait for one, or name a trial"
    )


def _completed(store: Store, campaign: CampaignRecord, number: int) -> TrialRecord:
    trial = store.trial_by_number(campaign.id, number)
    if trial.state == "COMPLETED":
        return trial
    why = f" ({trial.reason})" if trial.reason else ""
    raise ExportUnavailableError(
        f"trial {number} of campaign {campaign.name!r} is {trial.state}{why}; only COMPLETED trials "
        "are exported: name one of the leaderboard"
    )


def _refuse_illegal(campaign: CampaignRecord, trial: TrialRecord) -> None:
    """Other trainers run layouts that ours does not: uneven stages, or tp across nodes."""
    spec = CampaignSpec.from_stored(campaign.spec)
    sentences = violations(
        trial.layout,
        spec.model,
        spec.cluster,
        allow_tp_across_nodes=spec.space.allow_tp_across_nodes,
    )
    if sentences:
        raise ExportUnavailableError(
            f"trial {trial.number} of the imported campaign {campaign.name!r} is not legal here: "
            f"{'; '.join(sentences)}; name a trial that is"
        )


def _gain(store: Store, campaign: CampaignRecord, trial: TrialRecord) -> str:
    """What the trial's layout gains over the campaign's baseline; empty: unknown."""
    baseline = store.baselines([campaign]).get(campaign.id)
    gain = store.gain_over_baseline(campaign, trial.layout_key)
    if baseline is None or gain is None:
        return ""
    return gain_sentence(gain, baseline, campaign.objective)


def _source(campaign: CampaignRecord, trial: TrialRecord, gain: str) -> exporters.ExportSource:
    spec = CampaignSpec.from_stored(campaign.spec)
    job = TrainerJob(
        model=spec.model,
        layout=trial.layout,
        seed=spec.seed,
        warmup=spec.probe.warmup,
        compile=spec.probe.compile,
    )
    return exporters.ExportSource(
        campaign=campaign.name, trial=trial.number, job=job, comments=(gain,) if gain else ()
    )
