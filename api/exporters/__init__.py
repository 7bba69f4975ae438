"""Exporters: a layout as the files of a training job.

What a format's trainer accepts and how it is configured stands in its adapter
(`search_spaces.trainers`); the modules here write its files.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Final

from api.exporters.accelerate import ACCELERATE_FORMAT
from api.exporters.base import (
    ExportBundle,
    ExportCommand,
    ExportFile,
    ExportFormat,
    ExportFormatUnknownError,
    ExportImpossibleError,
    ExportSource,
    KnobsLackingError,
)
from api.exporters.command import COMMAND_FORMAT
from api.exporters.deepspeed import DEEPSPEED_FORMAT
from api.exporters.embedded import EMBEDDED_FORMAT
from api.exporters.megatron_bridge import MEGATRON_BRIDGE_FORMAT
from api.exporters.megatron_deepspeed import MEGATRON_DEEPSPEED_FORMAT
from api.exporters.megatron_lm import MEGATRON_LM_FORMAT
from api.exporters.nanotron import NANOTRON_FORMAT
from api.exporters.torchtitan import (
    TORCHTITAN_0_2_FORMAT,
    TORCHTITAN_0_3_FORMAT,
    TORCHTITAN_MAIN_FORMAT,
)
from search_spaces.trainers.base import TrainerAdapter

FORMATS: Final[Mapping[str, ExportFormat]] = MappingProxyType(
    {
        form.adapter.name: form
        for form in (
            EMBEDDED_FORMAT,
            MEGATRON_LM_FORMAT,
            MEGATRON_DEEPSPEED_FORMAT,
            MEGATRON_BRIDGE_FORMAT,
            DEEPSPEED_FORMAT,
            TORCHTITAN_0_2_FORMAT,
            TORCHTITAN_0_3_FORMAT,
            TORCHTITAN_MAIN_FORMAT,
            NANOTRON_FORMAT,
            ACCELERATE_FORMAT,
            COMMAND_FORMAT,
        )
    }
)
"""Formats by name."""

ALIASES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "trainer": EMBEDDED_FORMAT.adapter.name,
        "torchtitan": TORCHTITAN_0_3_FORMAT.adapter.name,
    }
)
"""Other names of formats: a former one, and a trainer's for its newest release."""


def export(
    format_name: str, source: ExportSource, *, without: Collection[str] = ()
) -> ExportBundle:
    """Renders the files of a training job.

    Args:
        format_name: the name of a format, or a former name.
        source: the job, and where it comes from.
        without: knobs that the trainer lacks and that are dropped.

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
    return ExportBundle(
        format=adapter.name,
        target_version=adapter.target_version,
        files=rendered.files,
        commands=rendered.commands,
        notes=(*source.remarks, *adapter.notes(source.job), *rendered.notes),
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


__all__ = [
    "ALIASES",
    "FORMATS",
    "ExportBundle",
    "ExportCommand",
    "ExportFile",
    "ExportFormat",
    "ExportFormatUnknownError",
    "ExportImpossibleError",
    "ExportSource",
    "KnobsLackingError",
    "export",
]
