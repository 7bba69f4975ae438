"""Exports of layouts that were predicted and not measured; no service is needed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from layout_tuner.api.formatting import figure, memory
from layout_tuner.cli.options.prediction_options import campaign_document, written_out
from layout_tuner.cli.options.refusals import refuse
from layout_tuner.errors import SearchSpaceError
from layout_tuner.predictions import plan_and_estimate
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_files import described_model
from layout_tuner.trainers.embedded import EMBEDDED_TRAINER, OWN_SOFTWARE
from layout_tuner.trainers.exports.export import export
from layout_tuner.trainers.exports.export_source import ExportError, ExportSource
from layout_tuner.trainers.exports.exported import ExportRead
from layout_tuner.trainers.registry import adapter_named, full_name


def of_plan(
    file: Path,
    rank: int,
    format_name: str,
    *,
    cluster: str | None,
    data_dir: Path | None,
    without: Collection[str],
    **options: Any,
) -> tuple[ExportRead, str]:
    """The files of a training job with a layout of the plan of a campaign's file.

    `options` are `software` and `calibrate_from`, as `_software_of` and `plan` take them, and
    `written_as`: another format to write, where `format_name` is only what it is predicted for.

    Returns:
        The files, and the software that they were predicted for.
    """
    document = campaign_document(file, cluster, data_dir)
    where = f"rank {rank} of the plan of"
    return _exported(document, rank, where, format_name, data_dir, without, **options)


def of_layout(
    model: str,
    key: str,
    format_name: str,
    *,
    seq_length: int | None,
    cluster: str,
    data_dir: Path | None,
    without: Collection[str],
    **options: Any,
) -> tuple[ExportRead, str]:
    """The files of a training job with any layout; options and result are those of `of_plan`."""
    try:
        layout = Layout.of_key(key)
    except SearchSpaceError as error:
        refuse(f"--layout: {error}")
    knobs = layout.to_mapping(every_knob=True)
    del knobs["num_microbatches"]  # it follows from the fixed batch
    if adapter := adapter_named(format_name):
        # The export names settings that its trainer lacks; the plan has the others.
        had = {name: knob for name, knob in adapter.job_knobs.items() if name in layout.job}
        knobs["job"] = {
            name: layout.job[name] for name in had if had[name].problem(layout.job[name]) is None
        }
    space = {**knobs, "global_batch_size": layout.global_batch_size, "allow_tp_across_nodes": True}
    shape = described_model(model, seq_length=seq_length)
    named = {"model": shape, "cluster": written_out(cluster, data_dir)}
    document = {"name": "layout", **named, "space": space, "budget": {"trials": 1}}
    if layout.job:
        document["probe"] = {"trainer": full_name(format_name)}
    return _exported(document, 1, "", format_name, data_dir, without, layout=layout, **options)


def _software_of(format_name: str, software: str | None, probed_by: str) -> str:
    """What a predicted export is planned for.

    The stated software; else the trainer of the campaign's probes, if the campaign states one; else
    the format's trainer.
    """
    return software or _named(format_name if probed_by == EMBEDDED_TRAINER else probed_by)


def _named(trainer: str) -> str:
    """A trainer or an alias as the option `software` names it."""
    trainer = full_name(trainer)
    return OWN_SOFTWARE if trainer == EMBEDDED_TRAINER else trainer


def _exported(
    document: Mapping[str, Any],
    rank: int,
    where: str,
    format_name: str,
    data_dir: Path | None,
    without: Collection[str],
    *,
    software: str | None,
    calibrate_from: Collection[str],
    layout: Layout | None = None,
    written_as: str = "",
) -> tuple[ExportRead, str]:
    spec = plan_and_estimate.read_campaign(document, data_dir=data_dir)
    if software is None and spec.space.job:  # whose knobs are searched
        software = _named(spec.probe.trainer)
    software = _software_of(format_name, software, spec.probe.trainer)
    plan = plan_and_estimate.plan(
        document,
        software=software,
        calibrate_from=calibrate_from,
        data_dir=data_dir,
        top=rank,
    )
    if rank > len(plan.layouts):
        refuse(f"--rank {rank} is more than the {len(plan.layouts)} legal layouts")
    planned = plan.layouts[rank - 1]
    figures = planned.predicted
    predicted = (
        f"predicted for {software}: a step of {figure(figures.step_time_s)} s (95 %: "
        f"{figure(figures.step_time_low_s)} to {figure(figures.step_time_high_s)} s), "
        f"{figure(figures.tokens_per_s)} tokens/s, a peak of "
        f"{memory(figures.peak_memory_median_bytes)} (80 %: {memory(figures.peak_memory_low_bytes)} to "
        f"{memory(figures.peak_memory_high_bytes)}) that "
        f"fits with probability {figures.fits:.2f}"
    )
    if software != _named(format_name):
        predicted += f"; this file is for {_named(format_name)}, whose step and memory may differ"
    if plan.fits_depend_on is not None:
        predicted += f"; {plan.fits_depend_on.words}"
    settings = planned.layout.job if layout is None else layout.job
    job = spec.job_of(replace(planned.layout, job=settings))
    name = f"{where} {spec.name}" if where else f"{spec.model.title} on {spec.cluster.name}"
    source = ExportSource(campaign=name, trial=None, job=job, comments=(predicted,))
    try:
        bundle = export(written_as or format_name, source, without=without)
    except ExportError as error:
        refuse(str(error))
    # Not every format has comments: the notes say it of all.
    notes = [*source.head[:1], *source.comments, *spec.warnings, *bundle.notes]
    return replace(bundle, notes=notes), software
