"""Exporters: a layout as the files of a training job.

What a format's trainer accepts and how it is configured stands in its adapter
(`search_spaces.trainers`); the modules here write its files.
"""

from __future__ import annotations

from collections.abc import Mapping
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
)
from api.exporters.command import COMMAND_FORMAT
from api.exporters.deepspeed import DEEPSPEED_FORMAT
from api.exporters.embedded import EMBEDDED_FORMAT
from api.exporters.megatron_lm import MEGATRON_LM_FORMAT
from api.exporters.nanotron import NANOTRON_FORMAT
from api.exporters.torchtitan import (
    TORCHTITAN_0_2_FORMAT,
    TORCHTITAN_0_3_FORMAT,
    TORCHTITAN_MAIN_FORMAT,
)

FORMATS: Final[Mapping[str, ExportFormat]] = MappingProxyType(
    {
        form.adapter.name: form
        for form in (
            EMBEDDED_FORMAT,
            MEGATRON_LM_FORMAT,
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


def export(format_name: str, source: ExportSource) -> ExportBundle:
    """Renders the files of a training job.

    Raises:
        ExportFormatUnknownError: there is no such format.
        ExportImpossibleError: the trainer lacks a knob of the layout, or refuses the job.
    """
    form = FORMATS.get(ALIASES.get(format_name, format_name))
    if form is None:
        raise ExportFormatUnknownError(
            f"unknown export format {format_name!r}; the formats are {', '.join(FORMATS)}"
        )
    adapter = form.adapter
    lacking = [f"{knob}: {without}" for knob, without in adapter.lacking(source.job).items()]
    if reasons := [*lacking, *adapter.refusals(source.job)]:
        raise ExportImpossibleError("; ".join(reasons))
    rendered = form.render(source)
    return ExportBundle(
        format=adapter.name,
        target_version=adapter.target_version,
        files=rendered.files,
        commands=rendered.commands,
        notes=(*adapter.notes(source.job), *rendered.notes),
    )


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
    "export",
]
