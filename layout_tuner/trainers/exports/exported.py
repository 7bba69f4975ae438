"""An exported training job: its files, and the commands that run it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportFileRead:
    """One file of a training job."""

    name: str
    content: str
    executable: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportCommandRead:
    """A command line that runs the job."""

    when: str
    """Where or with what it runs, for example "under torchrun"."""
    words: list[str]
    """Program and arguments; the name of a file stands for its path."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportRead:
    """The files of a training job, and notes on what their format cannot express."""

    format: str
    trial: int | None
    """Number of the exported trial; null: the layout was predicted, and not measured."""
    target_version: str
    """Version of the framework that the files are written for."""
    files: list[ExportFileRead]
    commands: list[ExportCommandRead]
    notes: list[str]
    model: dict[str, Any] = field(default_factory=dict)
    """The shape of the model that is trained; empty: from a service that does not say it."""
    layout: dict[str, Any] = field(default_factory=dict)
    """The layout that it is trained in, with the settings of the job; empty: likewise."""
