"""The page that shows what an export of a trial contains."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from io import BytesIO
from typing import Annotated, Final
from urllib.parse import quote
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

from fastapi import Depends, Query, Request
from fastapi.responses import HTMLResponse, Response

from layout_tuner.api.campaigns.exported_trial import export_of
from layout_tuner.api.dependencies import CampaignDep, StoreDep
from layout_tuner.api.errors import ExportUnavailableError
from layout_tuner.api.html.rendering import render
from layout_tuner.api.http.lazy_routes import LazyRouter
from layout_tuner.api.schemas.text_types import id_in
from layout_tuner.documents.reading import MAX_COUNT
from layout_tuner.results_db.errors import TrialNotFoundError
from layout_tuner.results_db.records import CampaignRecord
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.layouts.layout import KNOBS
from layout_tuner.trainers.exports.export import FORMATS
from layout_tuner.trainers.exports.export_source import ExportError, KnobsLackingError
from layout_tuner.trainers.exports.exported import ExportRead

router = LazyRouter()

ARCHIVE: Final = "all.zip"
"""Stands for all files in one archive, in place of a file's name."""

Text = Annotated[str, Query(max_length=20)]
Format = Annotated[str, Query(max_length=64)]
Knobs = Annotated[list[Annotated[str, Query(max_length=64)]], Query(max_length=len(KNOBS))]


@dataclass(frozen=True, kw_only=True)
class _ExportForm:
    """The fields of the form, as they were sent."""

    trial: str = ""
    nodes: str = ""
    format: str = "embedded"
    without: tuple[str, ...] = ()


def _asked(
    trial: Text = "",
    nodes: Text = "",
    format: Format = "embedded",  # noqa: A002 - the parameter's name in the URL
    without: Knobs = [],  # noqa: B006 - FastAPI copies it
) -> _ExportForm:
    return _ExportForm(trial=trial, nodes=nodes, format=format, without=tuple(without))


AskedDep = Annotated[_ExportForm, Depends(_asked)]

_REFUSALS = (ExportError, ExportUnavailableError, TrialNotFoundError)


@router.get("/campaigns/{campaign}/export")
def show_export(
    request: Request, campaign: CampaignDep, store: StoreDep, asked: AskedDep
) -> HTMLResponse:
    """The files of a training job, before they are downloaded, or why there are none."""
    bundle, refusal, lacking = None, "", asked.without
    try:
        bundle = _bundle(store, campaign, asked)
    except _REFUSALS as error:
        refusal = str(error)
        if isinstance(error, KnobsLackingError):
            lacking = (*asked.without, *error.knobs)
    best = store.leaderboard.winner(campaign.id, campaign.objective)
    return render(
        request,
        "export.html",
        campaign=campaign,
        asked=asked,
        formats=[form.adapter for form in FORMATS.values()],
        lacking={
            name: KNOBS[name].label if name in KNOBS else name
            for name in lacking
            if name in KNOBS or name in campaign.stored.job_knobs
        },
        best=best.trial.number if best else None,
        bundle=bundle,
        refusal=refusal,
        command=_command(campaign.name, asked, bundle),
        shell=shlex.join,
    )


@router.get("/campaigns/{campaign}/export/{file}")
def show_export_file(
    campaign: CampaignDep, store: StoreDep, file: str, asked: AskedDep
) -> Response:
    """A file of the export, or an archive of all, as a download."""
    bundle = _bundle(store, campaign, asked)
    if file == ARCHIVE:
        packed = BytesIO()
        with ZipFile(packed, "w", ZIP_DEFLATED) as archive:
            for each in bundle.files:
                entry = ZipInfo(each.name)
                entry.external_attr = (0o755 if each.executable else 0o644) << 16
                archive.writestr(entry, each.content)
        name = f"{campaign.name}-{bundle.trial}-{bundle.format}.zip"
        return _download(packed.getvalue(), name, "application/zip")
    for each in bundle.files:
        if each.name == file:
            return _download(each.content, each.name, "text/plain; charset=utf-8")
    names = ", ".join(each.name for each in bundle.files)
    raise ExportUnavailableError(f"the export has no file {file[:80]!r}; it has {names}")


def _download(content: bytes | str, name: str, media_type: str) -> Response:
    headers = {
        "Content-Disposition": f"attachment; filename*=UTF-8''{quote(name)}",
        "Cache-Control": "private, no-cache",
    }
    return Response(content, media_type=media_type, headers=headers)


def _bundle(store: Store, campaign: CampaignRecord, asked: _ExportForm) -> ExportRead:
    trial, nodes = id_in(asked.trial), id_in(asked.nodes)
    if asked.trial and not trial:
        raise ExportUnavailableError(
            f"{asked.trial!r} is not the number of a trial; leave the field empty for the best one"
        )
    if asked.nodes and not (nodes and nodes <= MAX_COUNT):
        raise ExportUnavailableError(
            f"{asked.nodes!r} is not a number of nodes from 1 to {MAX_COUNT}; leave the field empty "
            "for those that the layout was measured on"
        )
    return export_of(
        store, campaign, asked.format, trial or None, nodes=nodes or None, without=asked.without
    )


def _command(campaign: str, asked: _ExportForm, bundle: ExportRead | None) -> str:
    words = ["layout-tuner", "export", campaign, "--format", asked.format]
    if bundle is not None:
        words += ["--trial", str(bundle.trial)]
    words += ["--nodes", asked.nodes] if asked.nodes else []
    words += [word for knob in asked.without for word in ("--without", knob)]
    return shlex.join([*words, "--out", "job"])
