"""Exports of layouts that were predicted and not measured; no service is needed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from layout_tuner.api.formatting import figure, memory
from layout_tuner.cli.service.campaign_changes import read_document_file
from layout_tuner.errors import SearchSpaceError
from layout_tuner.predictions.belief.plan import make_plan
from layout_tuner.protocol.connection.data_home import default_data_dir
from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec
from layout_tuner.search_spaces.clusters.calibration_file import with_measured_constants
from layout_tuner.search_spaces.clusters.site import cluster_part
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.trainers.embedded import EMBEDDED_TRAINER
from layout_tuner.trainers.exports.export import export
from layout_tuner.trainers.exports.export_source import ExportError, ExportSource
from layout_tuner.trainers.exports.exported import ExportRead


def of_plan(
    file: Path, rank: int, format_name: str, *, data_dir: Path | None, without: Collection[str]
) -> ExportRead:
    """The files of a training job with a layout of the plan of a campaign's file."""
    document = read_document_file(file, "the campaign")
    plan = f"rank {rank} of the plan of"
    return _exported(document, rank, plan, "", format_name, data_dir, without)  # as it was printed


def of_layout(
    model: str,
    cluster: str,
    key: str,
    format_name: str,
    *,
    data_dir: Path | None,
    without: Collection[str],
) -> ExportRead:
    """The files of a training job with any layout.

    Model and cluster are presets or files.
    """
    try:
        layout = Layout.of_key(key)
    except SearchSpaceError as error:
        raise click.UsageError(f"--layout: {error}") from error
    knobs = layout.to_mapping(every_knob=True)
    del knobs["num_microbatches"]  # it follows from the fixed batch
    space = {**knobs, "global_batch_size": layout.global_batch_size, "allow_tp_across_nodes": True}
    named = {"model": _described(model, "the model"), "cluster": _described(cluster, "the cluster")}
    document = {"name": "layout", **named, "space": space, "budget": {"trials": 1}}
    software = "" if format_name == EMBEDDED_TRAINER else format_name
    return _exported(document, 1, "", software, format_name, data_dir, without)


def _described(named: str, what: str) -> Any:
    """A preset's name, or the content of a file."""
    path = Path(named)
    return cluster_part(read_document_file(path, what)) if path.is_file() else named


def _exported(
    document: Mapping[str, Any],
    rank: int,
    where: str,
    software: str,
    format_name: str,
    data_dir: Path | None,
    without: Collection[str],
) -> ExportRead:
    try:
        directory = data_dir or default_data_dir()
        if "cluster" in document:
            measured = with_measured_constants(document["cluster"], directory)
            document = {**document, "cluster": measured}
        spec = CampaignSpec.from_document(document)
        plan = make_plan(spec, software=software, top=rank)
    except SearchSpaceError as error:
        raise click.ClickException("\n".join(str(part) for part in error.parts)) from error
    if rank > len(plan.layouts):
        raise click.UsageError(f"--rank {rank} is more than the {len(plan.layouts)} legal layouts")
    planned = plan.layouts[rank - 1]
    figures = planned.predicted
    predicted = (
        f"predicted: a step of {figure(figures.step_time_s)} s (95 %: "
        f"{figure(figures.step_time_low_s)} to {figure(figures.step_time_high_s)} s), "
        f"{figure(figures.tokens_per_s)} tokens/s, a peak of {memory(figures.peak_memory_bytes)} that "
        f"fits with probability {figures.fits:.2f}"
    )
    job = spec.job_of(planned.layout)
    name = f"{where} {spec.name}" if where else f"{spec.model.name} on {spec.cluster.name}"
    source = ExportSource(campaign=name, trial=None, job=job, comments=(predicted,))
    try:
        bundle = export(format_name, source, without=without)
    except ExportError as error:
        raise click.ClickException(str(error)) from error
    # Not every format has comments: the notes say it of all.
    notes = [*source.head[:1], *source.comments, *spec.warnings, *bundle.notes]
    return replace(bundle, notes=notes)
