"""Exporters: a layout as the files of a training job.

What a format's trainer accepts and how it is configured stands in its adapter
(`search_spaces.trainers`); the modules here write its files.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from api.exporters import formats, torchtitan
from api.exporters.base import (
    ExportBundle,
    ExportFormat,
    ExportFormatUnknownError,
    ExportImpossibleError,
    ExportSource,
    KnobsLackingError,
)
from search_spaces.trainers.accelerate import ACCELERATE
from search_spaces.trainers.base import TrainerAdapter
from search_spaces.trainers.command import COMMAND
from search_spaces.trainers.deepspeed import DEEPSPEED
from search_spaces.trainers.embedded import EMBEDDED
from search_spaces.trainers.megatron_bridge import MEGATRON_BRIDGE
from search_spaces.trainers.megatron_deepspeed import MEGATRON_DEEPSPEED
from search_spaces.trainers.megatron_lm import MEGATRON_LM
from search_spaces.trainers.nanotron import NANOTRON
from search_spaces.trainers.torchtitan import TORCHTITAN_0_2, TORCHTITAN_0_3, TORCHTITAN_MAIN

FORMATS: Final[Mapping[str, ExportFormat]] = {
    adapter.name: ExportFormat(adapter=adapter, render=render)
    for adapter, render in (
        (EMBEDDED, formats.embedded),
        (MEGATRON_LM, formats.megatron_lm),
        (MEGATRON_DEEPSPEED, formats.megatron_deepspeed),
        (MEGATRON_BRIDGE, formats.megatron_bridge),
        (DEEPSPEED, formats.deepspeed),
        (TORCHTITAN_0_2, torchtitan.torchtitan_0_2),
        (TORCHTITAN_0_3, torchtitan.torchtitan_0_3),
        (TORCHTITAN_MAIN, torchtitan.torchtitan_main),
        (NANOTRON, formats.nanotron),
        (ACCELERATE, formats.accelerate),
        (COMMAND, formats.command),
    )
}

ALIASES: Final[Mapping[str, str]] = {"trainer": EMBEDDED.name, "torchtitan": TORCHTITAN_0_3.name}
"""Other names of formats: a former one, and a trainer's for its newest release."""


def export(
    format_name: str, source: ExportSource, *, without: Collection[str] = ()
) -> ExportBundle:
    """Renders the files of a training job.

    Raises:
        ExportFormatUnknownError: there is no such format.
        KnobsLackingError: the trainer lacks a knob of the layout that is not in `without`.
        ExportImpossibleError: the trainer refuses the job, or does not lack a knob of `without`.
    """
    form = FORMATS.get(ALIASES.get(format_name, format_name))
    if form is None:
        raise ExportFormatUnknownError(
            f"unknown export format {format_name!r}; the formats are {', '.join(FORMATS)}"
        )
    adapter = form.adapter
    source = _with_knobs_dropped(adapter, source, without)
    if refusals := adapter.refusals(source.job):
        raise ExportImpossibleError("; ".join(refusals))
    rendered = form.render(source)
    model = source.job.model
    lacks = (f"{model.name} as published also has {model.lacks}",) if model.lacks else ()
    return ExportBundle(
        format=adapter.name,
        target_version=adapter.target_version,
        files=rendered.files,
        commands=rendered.commands,
        notes=(*source.remarks, *lacks, *adapter.notes(source.job), *rendered.notes),
    )


def _with_knobs_dropped(
    adapter: TrainerAdapter, source: ExportSource, without: Collection[str]
) -> ExportSource:
    """The source without the knobs that the trainer lacks, if the user accepted all of them."""
    lacking = adapter.lacking(source.job)
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
            "or export another trial",
            tuple(missing),
        )
    if not lacking:
        return source
    changes = (f"without {knob}: {why}" for knob, why in lacking.items())
    return source.changed(source.job.without(lacking), *changes)
