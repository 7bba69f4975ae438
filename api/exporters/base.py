"""The input and the output of exporters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from search_spaces.spec.layout import Layout
from search_spaces.spec.model_shape import ModelShape


class ExportError(ValueError):
    """Base of the errors of exporters."""


class ExportFormatUnknownError(ExportError):
    """There is no exporter of that name."""


class ExportImpossibleError(ExportError):
    """The format cannot express the layout."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportSource:
    """The input of an exporter: the layout of a trial, and the campaign's model."""

    campaign: str
    """Name of the campaign."""
    trial: int
    """Number of the trial in its campaign."""
    model: ModelShape
    layout: Layout
    seed: int
    """The campaign's seed, for the same initial weights and tokens as in the probes."""
    warmup: int
    """Untimed iterations of a probe; the training job does not time as many."""
    compile: bool = False
    """Whether the probes used torch.compile."""
    gain: str = ""
    """What the layout gains over the campaign's baseline, as a sentence; empty: unknown."""

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
class ExportCommand:
    """A command line that runs the job."""

    when: str
    """Where it runs, such as "under torchrun"."""
    words: tuple[str, ...]
    """Program and arguments; the name of a file of the bundle stands for its path."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportBundle:
    """All files of a training job, and notes on them."""

    format: str
    target_version: str
    """The framework's version that the files are for."""
    files: tuple[ExportFile, ...]
    commands: tuple[ExportCommand, ...]
    notes: tuple[str, ...] = ()
    """What the user must know or add, in one sentence each."""


Exporter = Callable[[ExportSource], ExportBundle]
"""Renders a bundle; raises `ExportImpossibleError`."""
