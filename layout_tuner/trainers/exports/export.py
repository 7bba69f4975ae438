"""Exporters: a layout as the files of a training job.

What a format's trainer accepts and how it is configured stands in its adapter
(`trainers`); the modules here write its files.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from layout_tuner.trainers.adapter import TrainerAdapter
from layout_tuner.trainers.embedded import EMBEDDED_TRAINER
from layout_tuner.trainers.exports import job_files, torchtitan_files
from layout_tuner.trainers.exports.export_source import (
    ExportFormat,
    ExportFormatUnknownError,
    ExportImpossibleError,
    ExportSource,
    KnobsLackingError,
)
from layout_tuner.trainers.exports.exported import ExportRead
from layout_tuner.trainers.registry import ADAPTERS, full_name

FORMATS: Final[Mapping[str, ExportFormat]] = {
    name: ExportFormat(adapter=ADAPTERS[name], render=render)
    for name, render in (
        (EMBEDDED_TRAINER, job_files.embedded),
        ("megatron-lm", job_files.megatron_lm),
        ("megatron-deepspeed", job_files.megatron_deepspeed),
        ("megatron-bridge", job_files.megatron_bridge),
        ("deepspeed", job_files.deepspeed),
        ("torchtitan-0.2", torchtitan_files.torchtitan_0_2),
        ("torchtitan-0.3", torchtitan_files.torchtitan_0_3),
        ("torchtitan-main", torchtitan_files.torchtitan_main),
        ("nanotron", job_files.nanotron),
        ("accelerate", job_files.accelerate),
        ("axonn", job_files.axonn),
        ("command", job_files.command),
    )
}


def export(format_name: str, source: ExportSource, *, without: Collection[str] = ()) -> ExportRead:
    """Renders the files of a training job.

    Raises:
        ExportFormatUnknownError: there is no such format.
        KnobsLackingError: the trainer lacks a knob of the layout that is not in `without`.
        ExportImpossibleError: the trainer refuses the job, or does not lack a knob of `without`.
    """
    form = FORMATS.get(full_name(format_name))
    if form is None:
        raise ExportFormatUnknownError(
            f"unknown export format {format_name!r}; the formats are {', '.join(FORMATS)}"
        )
    adapter = form.adapter
    if refusals := adapter.refusals(source.job, of_model=True):  # no knob to leave out changes it
        raise ExportImpossibleError("; ".join(refusals))
    source = _with_knobs_dropped(adapter, source, without)
    if refusals := adapter.refusals(source.job):
        raise ExportImpossibleError("; ".join(refusals))
    rendered = form.render(source)
    model = source.job.model
    lacks = (f"{model.name} as published also has {model.lacks}",) if model.lacks else ()
    return ExportRead(
        format=adapter.name,
        trial=source.trial,
        target_version=adapter.target_version,
        model=model.to_mapping(),
        layout=source.job.layout.to_mapping(),
        files=[*rendered.files],
        commands=[*rendered.commands],
        notes=[*source.remarks, *lacks, *adapter.notes(source.job), *rendered.notes],
    )


def _with_knobs_dropped(
    adapter: TrainerAdapter, source: ExportSource, without: Collection[str]
) -> ExportSource:
    """The source without the knobs that the trainer lacks, if the user accepted all of them."""
    lacking = adapter.all_lacking(source.job)
    if unasked := [knob for knob in without if knob not in lacking]:
        knobs = f"it lacks {', '.join(lacking)}" if lacking else "it lacks none"
        raise ExportImpossibleError(
            f"without={unasked[0]} is not a knob of this layout that {adapter.name} lacks ({knobs}); "
            "leave it out"
        )
    if missing := {knob: why for knob, why in lacking.items() if knob not in without}:
        sentences = "; ".join(f"{knob}: {why}" for knob, why in missing.items())
        accepting = " ".join(f"--without {knob}" for knob in lacking)
        raise KnobsLackingError(
            f"{adapter.name} lacks knobs of this layout; {sentences}; accept that with {accepting}, "
            "or export another layout",
            tuple(missing),
        )
    if not lacking:
        return source
    changes = (f"without {knob}: {why}" for knob, why in lacking.items())
    return source.changed(source.job.without(lacking), *changes)
