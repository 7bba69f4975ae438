"""Jobs that are read from uploaded files: nothing is executed, and no other file is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from layout_tuner.errors import SearchSpaceError
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.models.model_presets import resolve_model
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.trainers.found_jobs.completed_job import CompletedJob
from layout_tuner.trainers.found_jobs.found_job import FoundJob
from layout_tuner.trainers.found_jobs.job_file import JobFile


@dataclass(frozen=True, kw_only=True, slots=True)
class JobUpload:
    """The file of a job, with what the user states beside it."""

    name: str
    text: str
    config: str = ""
    """The content of the model's config.json; empty: there is none."""
    seq_length: int | None = None
    num_nodes: int | None = None
    cluster: Cluster | None = None
    """The machine; None: it is not named yet."""
    job: str = ""
    """Which job, where the file has several."""
    stated: Mapping[str, Any] = field(default_factory=dict)
    """Values by field, over those of the file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UploadedJob:
    """What was read of an uploaded file."""

    jobs: tuple[str, ...] = ()
    """The names of its jobs, where there are several."""
    found: FoundJob | None = None
    """None: there are several, and none of them was named."""
    completed: CompletedJob | None = None
    """None: something is missing; `problem` says what."""
    model: ModelShape | None = None
    problem: str | None = None
    remarks: tuple[str, ...] = ()
    """Where file and user contradict each other, as sentences."""


def read_upload(upload: JobUpload) -> UploadedJob:
    """Reads the job of an uploaded file.

    Raises:
        SearchSpaceError: the file holds no job, there is no job of that name, or config.json is
            wrong.
    """
    # Readers and known models are slow to import, and few services are given a job.
    from layout_tuner.search_spaces.campaigns.job_on_cluster import SEQ_LENGTH
    from layout_tuner.trainers.found_jobs.read_job import read_jobs

    file = JobFile.of(upload.name, upload.text.encode("utf-8", "backslashreplace"))
    jobs = read_jobs(file)
    names = tuple(each.name for each in jobs) if len(jobs) > 1 else ()
    chosen = [each for each in jobs if not upload.job or each.name == upload.job]
    if len(chosen) != 1:
        what = f"no job {upload.job}" if upload.job else f"{len(jobs)} jobs"
        problem = f"{file.name} has {what}: choose one of {', '.join(names)}"
        return UploadedJob(jobs=names, problem=problem)
    stated = dict(upload.stated)
    if upload.num_nodes is not None:
        stated["num_nodes"] = upload.num_nodes
    if upload.seq_length is not None:
        stated[SEQ_LENGTH] = upload.seq_length
    found = chosen[0].with_stated(stated) if stated else chosen[0]
    return _completed(upload, names, found)


def _completed(upload: JobUpload, names: tuple[str, ...], found: FoundJob) -> UploadedJob:
    from layout_tuner.search_spaces.campaigns.job_on_cluster import job_on_cluster, model_of

    model, named = None, partial(_model, upload.config) if upload.config else None
    try:
        model, _ = model_of(found, named)
        job, remarks = job_on_cluster(found, upload.cluster, named, upload.num_nodes)
    except SearchSpaceError as error:
        return UploadedJob(jobs=names, found=found, model=model, problem=str(error))
    return UploadedJob(jobs=names, found=found, model=job.model, completed=job, remarks=remarks)


def _model(config: str, length: int | None) -> ModelShape:
    """The shape of the uploaded config.json."""
    from layout_tuner.search_spaces.models.model_files import model_of_content

    # The root has no name, which would become that of the model.
    path = Path("/config.json")
    return resolve_model(model_of_content(config.encode(), path, seq_length=length))
