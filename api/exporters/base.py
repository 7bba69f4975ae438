"""What every exporter takes and gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from search_spaces.layout import Layout
from search_spaces.model_shape import ModelShape


class ExportError(ValueError):
    """Base of what exporters refuse."""


class ExportFormatUnknownError(ExportError):
    """There is no exporter of that name."""


class ExportImpossibleError(ExportError):
    """The format cannot express the layout."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportSource:
    """What is exported: one trial's layout, with the model it was measured for."""

    campaign: str
    """Name of the campaign."""
    trial: int
    """Number of the trial in its campaign."""
    model: ModelShape
    layout: Layout
    seed: int
    """Of the campaign: same initial weights and tokens as the probes."""
    warmup: int
    """Untimed iterations of a probe; the training job leaves the same number out of its figure."""
    compile: bool = False
    """Whether the probes went through torch.compile."""

    @property
    def ranks_per_node(self) -> int:
        """Ranks on each node that the layout occupies."""
        return -(-self.layout.num_devices // self.layout.num_nodes)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportFile:
    """One file of a training job."""

    name: str
    """File name, without a folder."""
    content: str
    executable: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportBundle:
    """All files of a training job, and what the format could not say."""

    format: str
    target_version: str
    """Version of the framework that the files were written for."""
    files: tuple[ExportFile, ...]
    notes: tuple[str, ...] = ()
    """What the user must know or add, one sentence each."""


Exporter = Callable[[ExportSource], ExportBundle]
"""Renders a bundle; raises `ExportImpossibleError`."""
