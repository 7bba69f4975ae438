"""Exports: a trial's layout as the files of a training job."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query

from layout_tuner.api.campaigns.exported_trial import export_of
from layout_tuner.api.dependencies import CampaignDep, StoreDep
from layout_tuner.api.http.lazy_routes import LazyRouter
from layout_tuner.api.schemas.campaigns_and_trials import ExportFormatPage, ExportFormatRead
from layout_tuner.documents.limits import MAX_ID
from layout_tuner.documents.reading import MAX_COUNT
from layout_tuner.search_spaces.layouts.job_settings import MAX_JOB_KNOBS
from layout_tuner.search_spaces.layouts.layout import LAYOUT_FIELDS
from layout_tuner.trainers.exports.export import FORMATS
from layout_tuner.trainers.exports.exported import ExportRead

router = LazyRouter(prefix="/v1", tags=["exports"])


@router.get("/exports/formats")
def list_export_formats() -> ExportFormatPage:
    """List the formats of exports, with what each needs to run."""
    return ExportFormatPage(
        formats=[ExportFormatRead.of(form.adapter) for form in FORMATS.values()]
    )


@router.get("/campaigns/{campaign}/exports")
def export_trial(
    campaign: CampaignDep,
    store: StoreDep,
    format: Annotated[  # noqa: A002 - the parameter's name in the URL
        str, Query(description=f"One of {', '.join(FORMATS)}.", max_length=64)
    ],
    trial: Annotated[
        int | None,
        Query(ge=1, le=MAX_ID, description="Number of the trial; by default the best one."),
    ] = None,
    nodes: Annotated[
        int | None,
        Query(
            ge=1,
            le=MAX_COUNT,
            description="Nodes to scale the layout to, with the same global batch; by default those "
            "that it was measured on.",
        ),
    ] = None,
    without: Annotated[
        list[Annotated[str, Query(max_length=64)]] | None,
        Query(
            max_length=len(LAYOUT_FIELDS) + MAX_JOB_KNOBS,
            description="Knobs of the layout or the job that the trainer lacks, and that are "
            "dropped.",
        ),
    ] = None,
) -> ExportRead:
    """Write the files of a training job with the layout of the best trial, or of another one.

    Of a cheap probe, the layout that it stands for; the notes say what was measured of it.

    409 if the campaign has no ranked trial yet, if the other trial is not COMPLETED, or if an
    imported layout is not legal: it is unknown whether such a job would run. 422 if the trainer
    refuses the layout, lacks a knob of it that is not in `without`, or if the layout does not scale
    to `nodes`.
    """
    return export_of(store, campaign, format, trial, nodes=nodes, without=without or ())
