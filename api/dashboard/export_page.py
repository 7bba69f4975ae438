"""The page that shows what an export of a trial contains."""

from __future__ import annotations

import shlex
from typing import Annotated
from urllib.parse import quote

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, Response

from api import exporters
from api.dashboard.rendering import render
from api.dependencies import CampaignDep, StoreDep
from api.errors import ExportUnavailableError
from api.exporters.base import ExportError
from api.routes.exports import export_of
from api.schemas.campaigns_and_trials import ExportRead
from api.schemas.text_types import id_in
from results_db.errors import TrialNotFoundError
from results_db.records import CampaignRecord
from results_db.store import Store

router = APIRouter()

Trial = Annotated[str, Query(max_length=20)]
Format = Annotated[str, Query(max_length=64)]

_REFUSALS = (ExportError, ExportUnavailableError, TrialNotFoundError)


@router.get("/campaigns/{campaign}/export")
def show_export(
    request: Request,
    campaign: CampaignDep,
    store: StoreDep,
    trial: Trial = "",
    format: Format = "embedded",  # noqa: A002 - the parameter's name in the URL
) -> HTMLResponse:
    """The files of a training job, before they are downloaded, or why there are none."""
    bundle, refusal = None, ""
    try:
        bundle = _bundle(store, campaign, trial, format)
    except _REFUSALS as error:
        refusal = str(error)
    best = store.winner(campaign.id, campaign.objective)
    return render(
        request,
        "export.html",
        campaign=campaign,
        trial=trial,
        format=format,
        formats=tuple(exporters.FORMATS),
        best=best.trial.number if best else None,
        bundle=bundle,
        refusal=refusal,
        command=_command(campaign.name, format, bundle),
        shell=shlex.join,
    )


@router.get("/campaigns/{campaign}/export/{file}")
def show_export_file(
    campaign: CampaignDep,
    store: StoreDep,
    file: str,
    trial: Trial = "",
    format: Format = "embedded",  # noqa: A002 - the parameter's name in the URL
) -> Response:
    """A file of the export, as a download."""
    bundle = _bundle(store, campaign, trial, format)
    for each in bundle.files:
        if each.name == file:
            return Response(
                each.content,
                media_type="text/plain; charset=utf-8",
                headers={
                    "Content-Disposition": f"attachment; filename*=UTF-8''{quote(each.name)}",
                    "Cache-Control": "private, no-cache",
                },
            )
    names = ", ".join(each.name for each in bundle.files)
    raise ExportUnavailableError(f"the export has no file {file[:80]!r}; it has {names}")


def _bundle(store: Store, campaign: CampaignRecord, trial: str, format_name: str) -> ExportRead:
    number = None
    if trial:
        number = id_in(trial)
        if not number:
            raise ExportUnavailableError(
                f"{trial!r} is not the number of a trial; leave the field empty for the best one"
            )
    return export_of(store, campaign, format_name, number)


def _command(campaign: str, format_name: str, bundle: ExportRead | None) -> str:
    """The command line that writes the same files."""
    words = ["layout-tuner", "export", campaign, "--format", format_name]
    if bundle is not None:
        words += ["--trial", str(bundle.trial)]
    return shlex.join([*words, "--out", "job"])
