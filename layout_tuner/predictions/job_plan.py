"""Plans of jobs that run already: what is predicted of one, its rank, and what is better.

The job is read from its launch script or its trainer's configuration (`trainers.found_jobs`). It
becomes the baseline of a campaign over all sensible layouts, and that campaign is planned. A log of
the job calibrates the plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from layout_tuner.documents.json_and_yaml import described, read_file
from layout_tuner.documents.reading import read_mapping
from layout_tuner.predictions.belief.known_measurements import Sample
from layout_tuner.predictions.belief.plan import Plan, PlannedLayout
from layout_tuner.predictions.plan_and_estimate import Described, plan, read_campaign
from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec
from layout_tuner.search_spaces.campaigns.campaign_of_job import campaign_on_machine
from layout_tuner.search_spaces.campaigns.job_on_cluster import SEQ_LENGTH, job_on_cluster
from layout_tuner.search_spaces.clusters.cluster_presets import resolve_cluster
from layout_tuner.search_spaces.clusters.site import cluster_part
from layout_tuner.search_spaces.models.model_files import described_model, is_config
from layout_tuner.search_spaces.models.model_presets import resolve_model
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.search_spaces.tables.table import own_source
from layout_tuner.search_spaces.tables.writing import (
    layout_values,
    machine_values,
    model_values,
    table_text,
)
from layout_tuner.trainers.found_jobs.completed_job import CompletedJob
from layout_tuner.trainers.found_jobs.found_job import JobFileInvalidError
from layout_tuner.trainers.found_jobs.job_file import JobFile
from layout_tuner.trainers.found_jobs.probing.job_log import JobLog, read_log
from layout_tuner.trainers.found_jobs.probing.probe_entry import ProbeEntry, probe_entry
from layout_tuner.trainers.found_jobs.read_job import read_job


@dataclass(frozen=True, kw_only=True, slots=True)
class JobAsked:
    """What a user states beside the file of a job."""

    cluster: Described | None = None
    """The machine; it is required."""
    num_nodes: int | None = None
    """Nodes of the job, over those of its file."""
    model: Described | None = None
    """Its shape, where its file does not state it."""
    seq_length: int | None = None
    """Tokens of a sequence, over those of its file and of the model."""
    stated: Mapping[str, Any] | None = None
    """Values by field, over those of the file (`found_jobs.stated_fields`)."""
    job: str = ""
    """The name of the job, where the file has several."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobCampaign:
    """A job of a file, and the campaign that has it as its baseline."""

    job: CompletedJob
    document: Mapping[str, Any]
    """The campaign as users write it."""
    spec: CampaignSpec
    """The same, read."""
    remarks: tuple[str, ...] = ()
    """Where file and user contradict each other, as sentences."""
    log: JobLog | None = None

    @property
    def sample(self) -> Sample | None:
        """The measured step of the log, as other campaigns know it; None: there is no log."""
        if self.log is None or self.spec.baseline is None:
            return None
        return Sample(
            model=self.spec.model,
            cluster=self.spec.cluster,
            layout=self.spec.baseline,
            state="completed",
            step_time_s=self.log.step_time_s,
            peak_memory_bytes=self.log.peak_memory_bytes,
            software=self.spec.software,
        )

    @property
    def table(self) -> str:
        """The same as a measurement table (CSV); empty: there is no log."""
        if (sample := self.sample) is None or sample.step_time_s is None:
            return ""
        tokens = sample.layout.global_batch_size * sample.model.seq_length
        trainer = self.spec.probe.trainer
        row = {
            "source": sample.software or own_source(self.spec.name, trainer),
            **machine_values(sample.cluster),
            **model_values(sample.model),
            **layout_values(sample.layout),
            "status": "completed",
            "tokens_per_s": tokens / sample.step_time_s,
            "step_time_s": sample.step_time_s,
            "peak_memory_bytes": sample.peak_memory_bytes,
        }
        return table_text([row])


@dataclass(frozen=True, kw_only=True, slots=True)
class LogEffect:
    """What a log of the job changes in its plan."""

    log: JobLog
    predicted_s: float
    """Predicted step time of the job without the log."""
    factor: float
    """Measured over that."""
    best_before: PlannedLayout
    """The best layout without the log."""
    rank_now: int | None
    """Its rank with the log; None: behind the listed layouts."""
    rank_before: int | None
    """Rank without the log of the layout that is the best with it; None: behind the listed ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobPlan:
    """The plan of a job that was found in a file."""

    campaign: JobCampaign
    plan: Plan
    log: LogEffect | None = None


def job_campaign(
    path: str | Path, asked: JobAsked, *, log: Path | None = None, data_dir: Path | None = None
) -> JobCampaign:
    """Reads a job from its file, and makes the campaign of which it is the baseline.

    Args:
        path: launch script or configuration; nothing in it is executed.
        asked: what the user states beside it.
        log: a log of the job, by which its step is measured.
        data_dir: where `layout-tuner calibrate` keeps constants; None: the environment's.

    Raises:
        SearchSpaceError: the file, a field, the machine or the log is wrong; or a field is missing
            or not understood, and the user does not state it.
    """
    path = Path(path)
    if asked.cluster is None:
        raise JobFileInvalidError(
            f"{path.name} does not say on which machine the job runs; name it with --cluster: a "
            "preset such as h100-sxm, a cluster of the service, or a file"
        )
    found = read_job(JobFile.open(path), asked.job)
    stated = dict(asked.stated or {})
    if asked.num_nodes is not None:
        stated["num_nodes"] = asked.num_nodes
    if asked.seq_length is not None:
        stated[SEQ_LENGTH] = asked.seq_length
    found = found.with_stated(stated) if stated else found
    cluster = cluster_part(described(asked.cluster))
    machine = resolve_cluster(cluster)[0]
    model = None if asked.model is None else partial(_model, asked.model)
    job, remarks = job_on_cluster(found, machine, model, asked.num_nodes)
    document, more = campaign_on_machine(job, cluster, machine)
    remarks += more
    spec = read_campaign(document, data_dir=data_dir)
    campaign = JobCampaign(job=job, document=document, spec=spec, remarks=remarks)
    if log is None or spec.baseline is None:
        return campaign
    found_log = read_log(log, found.trainer, spec.model, spec.baseline)
    return replace(campaign, log=found_log)


def probe_entry_of(campaign: JobCampaign, path: Path) -> ProbeEntry | str:
    """See `probe_entry`; `path` is the job's file."""
    return probe_entry(
        campaign.job,
        path,
        lambda file: read_mapping(read_file(file), JobFileInvalidError, file.name),
    )


def plan_job(
    path: str | Path,
    asked: JobAsked,
    *,
    log: Path | None = None,
    data_dir: Path | None = None,
    **options: Any,
) -> JobPlan:
    """Plans the campaign of a job (`job_campaign`); `options` are those of `plan`.

    With a log the plan is made twice, to say what the log changes.
    """
    campaign = job_campaign(path, asked, log=log, data_dir=data_dir)
    options["data_dir"] = data_dir
    if (sample := campaign.sample) is None:
        return JobPlan(campaign=campaign, plan=plan(campaign.document, **options))
    if (software := options.get("software")) and software != campaign.spec.probe.trainer:
        raise JobFileInvalidError(
            f"--log is a log of {campaign.spec.probe.trainer}: leave --software {software} out"
        )
    options["software"] = ""
    before = plan(campaign.document, **options)
    now = plan(campaign.document, measured=(sample,), **options)
    return JobPlan(campaign=campaign, plan=now, log=_effect(campaign, before, now))


def _model(named: Described, length: int | None) -> ModelShape:
    """The shape that the user names; a config.json needs the tokens of a sequence."""
    given = length if is_config(named) else None
    return resolve_model(described_model(named, seq_length=given))


def _effect(campaign: JobCampaign, before: Plan, now: Plan) -> LogEffect:
    assert campaign.log is not None
    assert before.baseline is not None
    predicted_s = before.baseline.planned.predicted.step_time_s
    return LogEffect(
        log=campaign.log,
        predicted_s=predicted_s,
        factor=campaign.log.step_time_s / predicted_s,
        best_before=before.best,
        rank_now=_rank(now, before.best),
        rank_before=_rank(before, now.best),
    )


def _rank(of: Plan, layout: PlannedLayout) -> int | None:
    """The rank of a layout in a plan; None: it is not listed."""
    key = layout.layout_key
    return next((each.rank for each in of.layouts if each.layout_key == key), None)
