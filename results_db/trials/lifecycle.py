"""The state machine of trials and attempts; the caller holds the transaction.

A trial becomes RUNNING when it is leased, PENDING again when its attempt is lost or returned, and
ends once. Attempts carry the cost: each attempt's node-seconds are counted once, however the trial
ends.
"""

from __future__ import annotations

from datetime import datetime
from typing import Final

from sqlalchemy.orm import Session

from layout_tuner.protocol.states import TrialState
from layout_tuner.results_db.access.shares import note_use
from layout_tuner.results_db.database.events import emit, tell
from layout_tuner.results_db.models.tables import Attempt, Campaign, Trial
from layout_tuner.results_db.records import AttemptEnding, Cost
from layout_tuner.results_db.rows import COST_COLUMNS, cost_of
from layout_tuner.results_db.wall_time import stop_clock

MAX_LOST_ATTEMPTS: Final = 3
"""Lost attempts after which a trial ends."""
MAX_HOST_FAILURES: Final = 3
"""Trials of a campaign that fail because a host lacks a resource, after which it is paused."""


def end_trial(
    campaign: Campaign,
    trial: Trial,
    state: TrialState,
    now: datetime,
    *,
    reason: str | None = None,
    message: str = "",
    node: str = "",
) -> None:
    """Ends a trial, and sets its position in the order of ends."""
    campaign.last_ended_seq += 1
    trial.ended_seq = campaign.last_ended_seq
    trial.ended_at = now
    trial.state = state
    trial.reason = reason
    trial.message = message
    trial.node = node
    if trial.attempt:
        note_use(campaign, now, trials=1)
    _drop_lease(trial)
    tell(trial, "trial.ended", now)


def count_host_failure(session: Session, campaign: Campaign, trial: Trial, now: datetime) -> None:
    """Counts an ended trial whose host lacks a resource, and pauses its campaign after three.

    The next ones would fail alike, and nothing was learnt about their layouts.
    """
    campaign.host_failures += 1
    if campaign.host_failures < MAX_HOST_FAILURES or campaign.state != "RUNNING":
        return
    stop_clock(campaign, now)
    campaign.state = "PAUSED"
    where = f" on {trial.node}" if trial.node else ""
    campaign.message = (
        f"paused after {campaign.host_failures} trials that failed because a host lacks a resource, "
        f"which says nothing about their layouts; the last, trial {trial.number}{where}: "
        f"{trial.message}; then requeue these trials and resume the campaign"
    )
    reason = trial.reason
    emit(session, campaign.id, "campaign.paused", now=now, state=campaign.state, reason=reason)


def charge(campaign: Campaign, trial: Trial, attempt: Attempt, cost: Cost, now: datetime) -> None:
    """Sets an attempt's cost, and updates the sums of the trial, the campaign and its day."""
    if campaign.started_at is None:
        # The lease of its first trial did not wait for the campaign's row.
        campaign.started_at = attempt.started_at
    sums: tuple[Trial | Campaign, ...] = (trial, campaign)
    changes = {}
    for name, column in COST_COLUMNS.items():
        changes[name] = more = getattr(cost, name) - getattr(attempt, column)
        setattr(attempt, column, getattr(cost, name))
        for row in sums:
            # Rounding may leave a small negative rest.
            setattr(row, column, max(getattr(row, column) + more, 0.0))
    work = changes.pop("iterations") + changes.pop("start")
    changes["probes" if trial.repeat_of is None else "repeats"] = work
    note_use(campaign, attempt.ended_at or now, **changes)
    attempt.node_seconds = cost.total
    for row in sums:
        row.node_seconds = cost_of(row).total


def held_so_far_s(attempt: Attempt) -> float:
    """Seconds that an attempt held its nodes, up to the last heartbeat."""
    if attempt.held_s is not None:
        return attempt.held_s
    if attempt.phase == "waiting":
        return 0.0
    return max((attempt.seen_at - attempt.started_at).total_seconds(), 0.0)


def nodes_of(trial: Trial, attempt: Attempt) -> float:
    """Nodes that an attempt holds; may be a fraction."""
    return trial.num_nodes if attempt.nodes_held is None else attempt.nodes_held


def close_attempt(
    campaign: Campaign, trial: Trial, attempt: Attempt, ending: AttemptEnding, now: datetime
) -> None:
    """Ends an attempt without an outcome; it is charged up to the last heartbeat."""
    attempt.ending = ending
    attempt.ended_at = now
    lost = Cost(lost=held_so_far_s(attempt) * nodes_of(trial, attempt))
    charge(campaign, trial, attempt, lost, now)


def lose_attempt(
    campaign: Campaign, trial: Trial, attempt: Attempt, now: datetime, why: str, *, host: str
) -> None:
    """Records that the running attempt was lost with its worker; it has no result.

    An attempt that was waiting for devices had not begun, and counts as returned.
    """
    if attempt.phase == "waiting":
        return return_attempt(campaign, trial, attempt, now, why)
    close_attempt(campaign, trial, attempt, "lost", now)
    return count_lost_attempt(campaign, trial, now, why, node=host)


def count_lost_attempt(
    campaign: Campaign, trial: Trial, now: datetime, why: str, *, node: str
) -> None:
    """Puts a trial back to PENDING after a lost attempt, or ends it after too many."""
    trial.lost_attempts += 1
    if not trial.cancel_requested and trial.lost_attempts >= MAX_LOST_ATTEMPTS:
        message = f"{trial.lost_attempts} attempts were lost; the last: {why}"
        end_trial(campaign, trial, "FAILED", now, reason="node_lost", message=message, node=node)
    else:
        put_back_or_cancel(campaign, trial, now, why)


def return_attempt(
    campaign: Campaign, trial: Trial, attempt: Attempt, now: datetime, why: str
) -> None:
    """Records that the worker returned the running attempt; it does not count as lost."""
    close_attempt(campaign, trial, attempt, "returned", now)
    put_back_or_cancel(campaign, trial, now, why)


def put_back_or_cancel(campaign: Campaign, trial: Trial, now: datetime, why: str) -> None:
    """Puts a trial back to PENDING, or cancels it if that was requested."""
    if trial.cancel_requested:
        end_trial(campaign, trial, "CANCELLED", now, reason="cancelled", message=why)
    else:
        trial.state = "PENDING"
        trial.iterations_done = 0
        _drop_lease(trial)
        tell(trial, "trial.returned", now)


def cancel_trial(campaign: Campaign, trial: Trial, now: datetime, why: str) -> None:
    """Cancels an open trial: at once if it waits, through its worker if it runs."""
    if trial.state == "PENDING":
        end_trial(campaign, trial, "CANCELLED", now, reason="cancelled", message=why)
    elif trial.state == "RUNNING":
        trial.cancel_requested = True


def running_attempt(session: Session, trial: Trial) -> Attempt:
    return session.get_one(Attempt, (trial.id, trial.attempt))


def _drop_lease(trial: Trial) -> None:
    trial.worker_id = None
    trial.lease_expires_at = None
