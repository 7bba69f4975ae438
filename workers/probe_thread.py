"""A probe on a thread of its own: whatever becomes of it, its trial gets an outcome."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Sequence

from search_spaces.outcome import Outcome
from workers.background import in_background
from workers.errors import RanksLeftError
from workers.held_trial import HeldTrial
from workers.launchers.base import Launcher
from workers.worker_events import Events, ProbeEnded, WorkerEvent

_LOG = logging.getLogger(__name__)


def start_probe(launcher: Launcher, trial: HeldTrial, events: Events) -> None:
    """Starts the probe of a trial that has devices; `ProbeEnded` says how it ended."""
    # What the thread uses is taken now: the trial is the owner's, which may change it.
    request, placement = trial.request, trial.placement
    stop, progress = trial.stop, trial.progress
    started = time.monotonic()

    def run() -> WorkerEvent:
        try:
            outcome = launcher.run(
                request, shares=placement, on_event=progress.note, cancelled=stop.is_set
            )
        except RanksLeftError as error:
            return _unclean(
                trial,
                error,
                names=[node.name for node in launcher.nodes],
                duration_s=time.monotonic() - started,
            )
        return ProbeEnded(trial=trial, outcome=outcome)

    def failed(error: Exception) -> WorkerEvent:
        _LOG.error("the probe of %s broke its launcher", trial.title, exc_info=error)
        (last_line,) = traceback.format_exception_only(error)[-1:]
        message = f"the launcher broke down: {last_line.strip()}"
        # Whatever that was, it says nothing about the layout.
        outcome = Outcome(
            state="failed",
            reason="node_lost",
            message=message,
            duration_s=time.monotonic() - started,
        )
        return ProbeEnded(trial=trial, outcome=outcome)

    in_background(events, run, name=f"probe-{trial.key}", failed=failed)


def _unclean(
    trial: HeldTrial, error: RanksLeftError, *, names: Sequence[str], duration_s: float
) -> ProbeEnded:
    """Nodes of the probe can't be used again: that says nothing about the layout."""
    held = tuple(share.node for share in trial.placement)
    unclean = held if error.node is None else (error.node,)
    outcome = Outcome(
        state="failed",
        reason="node_lost",
        message=str(error),
        node=names[unclean[0]],
        duration_s=duration_s,
    )
    return ProbeEnded(trial=trial, outcome=outcome, unclean=str(error), unclean_nodes=unclean)
