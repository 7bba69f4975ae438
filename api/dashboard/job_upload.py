"""The form of a new campaign, filled in from the files of a job that runs already."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Annotated, Any, Final

from fastapi import Depends, Request
from fastapi.responses import Response

from layout_tuner.api.campaigns.found_jobs import JobUpload, UploadedJob, read_upload
from layout_tuner.api.campaigns.named_models_and_clusters import written_out
from layout_tuner.api.dashboard.job_form import JobForm, read_job_form
from layout_tuner.api.dashboard.submit import SubmitPage, fields_of
from layout_tuner.api.dependencies import StoreDep
from layout_tuner.api.errors import ApiError
from layout_tuner.api.http.lazy_routes import LazyRouter
from layout_tuner.api.http.request_bodies import BodyRoute
from layout_tuner.api.routes.campaigns import SubmissionDep
from layout_tuner.documents.numbers import read_whole
from layout_tuner.documents.reading import MAX_COUNT, shown
from layout_tuner.errors import SearchSpaceError
from layout_tuner.results_db.errors import ResultsDbError
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.campaigns.campaign_of_job import campaign_name, campaign_on_machine
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.clusters.cluster_presets import resolve_cluster
from layout_tuner.trainers.found_jobs.found_job import JobFileInvalidError
from layout_tuner.trainers.found_jobs.stated_fields import read_stated

router = LazyRouter(route_class=BodyRoute)

_REFUSED: Final = (SearchSpaceError, ApiError, ResultsDbError)


@router.post("/submit/job")
def do_read_job(
    request: Request,
    store: StoreDep,
    submission: SubmissionDep,
    form: Annotated[JobForm, Depends(read_job_form)],
) -> Response:
    """Reads a job and a model of uploaded files, and shows them in the form of a campaign."""
    document: dict[str, Any] = {}
    try:
        if form.problem:
            raise JobFileInvalidError(form.problem)
        upload = _upload(store, form.fields)
        uploaded = read_upload(upload)
        document, remarks = _document(uploaded, form.fields["cluster"], upload.cluster)
        uploaded = replace(uploaded, remarks=uploaded.remarks + remarks)
    except _REFUSED as error:
        uploaded = UploadedJob(problem=str(error))
    page = SubmitPage(
        request=request,
        store=store,
        submission=submission,
        form=fields_of(document, "form"),
        job=replace(form, uploaded=uploaded),
    )
    return page.show(is_checked=uploaded.completed is not None)


def _upload(store: Store, form: dict[str, str]) -> JobUpload:
    cluster = form["cluster"]
    machine = resolve_cluster(written_out(store, "cluster", cluster))[0] if cluster else None
    return JobUpload(
        name=form["file_name"] or "job",
        text=form["file_text"],
        config=form["config_text"],
        num_nodes=_number(form["num_nodes"], "Nodes"),
        seq_length=_number(form["seq_length"], "Tokens of a sequence"),
        cluster=machine,
        job=form["job"],
        stated=read_stated(each for each in form["stated"].replace(",", " ").split()),
    )


def _document(
    uploaded: UploadedJob, cluster: str, machine: Cluster | None
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The campaign of the job, as far as it is known, and remarks on its machine."""
    remarks: tuple[str, ...] = ()
    if uploaded.completed is not None:
        document, remarks = campaign_on_machine(uploaded.completed, cluster, machine)
    else:
        named = {} if uploaded.found is None else {"name": campaign_name(uploaded.found.file)}
        shape = {} if uploaded.model is None else {"model": uploaded.model.to_mapping()}
        document = {**named, **shape, "cluster": cluster}
    if not cluster:
        del document["cluster"]
    return document, remarks


def _number(text: str, label: str) -> int | None:
    if not text:
        return None
    with suppress(ValueError):
        if 1 <= (number := read_whole(text)) <= MAX_COUNT:
            return number
    raise JobFileInvalidError(f"{label}: {shown(text)} is not a whole number of at least 1")
