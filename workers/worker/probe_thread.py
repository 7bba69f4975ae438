"""The thread that runs the probe of a trial."""

from __future__ import annotations

import logging
import time
import traceback

from search_spaces.documents.limits import visible_line
from search_spaces.protocol.outcome import MAX_MESSAGE_LENGTH, Outcome
from workers.errors import RanksLeftError
from workers.launchers.group_launcher import GroupLauncher
from workers.worker.events import Events, ProbeEnded, in_background
from workers.worker.held_trial import HeldTrial

_LOG = logging.getLogger(__name__)


def start_probe(launcher: GroupLauncher, trial: HeldTrial, events: Events) -> None:
    """Runs the probe of a trial that has devices; the end of the probe is the event `ProbeEnded`.

    A failure of the launcher is no fault of the layout, so its reason is a lost node.
    """
    # Copied now: the owner of the trial may change it while the thread runs.
    request, placement = trial.request, trial.placement
    stop, progress = trial.stop, trial.progress
    started = time.monotonic()

    def node_lost(message: str, node: str = "") -> Outcome:
        return Outcome(
            state="failed",
            reason="node_lost",
            message=visible_line(message, MAX_MESSAGE_LENGTH),
            node=node,
            duration_s=time.monotonic() - started,
        )

    def run() -> ProbeEnded:
        try:
            outcome = launcher.run(
                request, shares=placement, on_event=progress.note, cancelled=stop.is_set
            )
        except RanksLeftError as error:
            held = tuple(share.node for share in placement)
            unclean = held if error.node is None else (error.node,)
            outcome = node_lost(str(error), launcher.nodes[unclean[0]].name)
            return ProbeEnded(
                trial=trial, outcome=outcome, unclean=str(error), unclean_nodes=unclean
            )
        return ProbeEnded(trial=trial, outcome=outcome)

    def failed(error: Exception) -> ProbeEnded:
        _LOG.error("the launcher failed with the probe of %s", trial.title, exc_info=error)
        (last_line,) = traceback.format_exception_only(error)[-1:]
        return ProbeEnded(
            trial=trial, outcome=node_lost(f"the launcher failed: {last_line.strip()}")
        )

    in_background(events, run, name=f"probe-{trial.key}", failed=failed)
