"""Exporters: a layout as the files of a training job.

Each exporter is a pure function of a campaign's model and one layout. The bundle's notes say what
the format cannot express.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from api.exporters.base import (
    ExportBundle,
    ExportCommand,
    Exporter,
    ExportFile,
    ExportFormatUnknownError,
    ExportImpossibleError,
    ExportSource,
)
from api.exporters.megatron_lm import export_megatron_lm
from api.exporters.trainer import export_trainer

FORMATS: Final[Mapping[str, Exporter]] = MappingProxyType(
    {"megatron-lm": export_megatron_lm, "trainer": export_trainer}
)
"""Exporters by the names of their formats."""


def export(format_name: str, source: ExportSource) -> ExportBundle:
    """Renders the files of a training job.

    Raises:
        ExportFormatUnknownError: there is no such format.
        ExportImpossibleError: the format cannot express the layout.
    """
    exporter = FORMATS.get(format_name)
    if exporter is None:
        raise ExportFormatUnknownError(
            f"unknown export format {format_name!r}; the formats are {', '.join(FORMATS)}"
        )
    return exporter(source)


__all__ = [
    "FORMATS",
    "ExportBundle",
    "ExportCommand",
    "ExportFile",
    "ExportFormatUnknownError",
    "ExportImpossibleError",
    "ExportSource",
    "Exporter",
    "export",
]
