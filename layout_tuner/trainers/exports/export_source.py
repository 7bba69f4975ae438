"""The input and the output of exporters."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Final

from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.trainers.adapter import TrainerAdapter, TrainerJob
from layout_tuner.trainers.exports.exported import ExportCommandRead, ExportFileRead

PREDICTED: Final = "predicted, not measured"
"""How the files of a layout that no trial measured begin."""


class ExportError(ValueError):
    """Base of the errors of exporters."""


class ExportFormatUnknownError(ExportError):
    """There is no exporter of that name."""


class ExportImpossibleError(ExportError):
    """The format cannot express the layout, or the layout does not suit what was asked for."""


class KnobsLackingError(ExportImpossibleError):
    """The trainer lacks knobs of the layout, which the user may accept to be dropped."""

    def __init__(self, message: str, knobs: Collection[str]) -> None:
        super().__init__(message)
        self.knobs = tuple(knobs)
        """The knobs that nobody accepted to be dropped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportSource:
    """The input of an exporter: the training job of a trial, and where it comes from."""

    campaign: str
    """Name of the campaign; for a predicted layout, what predicts it."""
    trial: int | None
    """Number of the trial in its campaign; None: the layout was predicted, and not measured."""
    job: TrainerJob
    """What is trained, and in which layout."""
    comments: tuple[str, ...] = ()
    """What the files say at their top, beside campaign, trial and layout: measured figures, the
    gain over the baseline; one sentence each."""
    changes: tuple[str, ...] = ()
    """In what the job differs from the one that was measured; one sentence each."""
    measured: Layout | None = None
    """The layout that was measured; None: the job's."""

    @property
    def head(self) -> tuple[str, ...]:
        """The lines at the top of every file that can have comments."""
        measured = self.measured or self.job.layout
        first = f"campaign {self.campaign}, trial {self.trial}: {measured.key}"
        if self.trial is None:
            first = f"{PREDICTED}: {self.campaign}: {measured.key}"
        return (first, *self.comments, *self.remarks)

    @property
    def remarks(self) -> tuple[str, ...]:
        """The changes, and that their result was not measured; empty: there are none."""
        if not self.changes:
            return ()
        # The trainer may do without a knob what no layout says: then the layout stays.
        is_other = self.job.layout != self.measured
        job = self.job.layout.key if is_other else "a job with other knobs than this layout"
        return (f"this file is for {job}, which was not measured", *self.changes)

    def changed(self, job: TrainerJob, *changes: str) -> ExportSource:
        """The source with another job than the one that was measured."""
        measured = self.measured or self.job.layout
        return replace(self, job=job, changes=(*self.changes, *changes), measured=measured)


@dataclass(frozen=True, kw_only=True, slots=True)
class RenderedJob:
    """All files of a training job, with the commands that run it."""

    files: tuple[ExportFileRead, ...]
    commands: tuple[ExportCommandRead, ...]
    notes: tuple[str, ...] = ()
    """What the user must know or add, in one sentence each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportFormat:
    """A format: the trainer that it is for, and how its files are written."""

    adapter: TrainerAdapter
    render: Callable[[ExportSource], RenderedJob]
    """Writes the files of a job that the adapter does not refuse."""
