"""Live events: progress of running trials, workers, nodes and plans, computed from two states.

They are sent to those who watch at the moment, and never stored: they have no number, and a watcher
that was away does not get them again (decision 34).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any, Final

from fastapi.sse import format_sse_event
from pydantic_core import to_json

from layout_tuner.results_db.events.live_state import (
    LiveState,
    NodeKey,
    NodeStatus,
    RunningCampaign,
    RunningTrial,
)
from layout_tuner.results_db.records import EventRead, LiveEventKind
from layout_tuner.units import SECONDS_PER_HOUR

MAX_LISTED: Final = 100
"""Most trials or nodes that one event lists."""

_NOTHING: Final = LiveState()


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveEvent:
    """An event that is not stored."""

    kind: LiveEventKind
    campaign_id: int | None
    """None: it concerns a worker, nodes or a plan, and only watchers of all campaigns get it."""
    owner: str | None
    """The only owner who gets it, beside administrators; None: everybody who sees the campaign."""
    content: bytes
    """In the format of the stream, without an id: a watcher resumes after a stored event."""


def live_events(before: LiveState, now: LiveState, at: datetime) -> list[LiveEvent]:
    """The events for everything that has changed between two states."""
    return [
        *_of_campaigns(before, now, at),
        *_of_workers(before, now, at),
        *_of_nodes(before, now, at),
        *_of_plans(before, now, at),
    ]


def first_events(
    opened: LiveState, now: LiveState, at: datetime, campaign_id: int | None
) -> list[LiveEvent]:
    """The events with which a watcher begins.

    It has read its pages since its stream opened; `now` is the state of the newest events that
    others got.

    Returns:
        What has changed since, and the progress of every campaign with running trials: a watcher
        that lost its stream may have missed that.
    """
    running = {id_ for id_, campaign in now.campaigns.items() if campaign.trials}
    fresh = [event for event in _of_campaigns(_NOTHING, now, at) if event.campaign_id in running]
    changed = (
        []
        if opened is now
        else [event for event in live_events(opened, now, at) if event.campaign_id not in running]
    )
    return [
        event
        for event in (*fresh, *changed)
        if campaign_id is None or event.campaign_id == campaign_id
    ]


def _of_campaigns(before: LiveState, now: LiveState, at: datetime) -> Iterator[LiveEvent]:
    for id_, campaign in now.campaigns.items():
        then = before.campaigns.get(id_)
        if then is None and not campaign.trials and not campaign.node_seconds:
            continue  # new, and nothing has run
        if then is None or (then.trials, then.node_seconds) != (
            campaign.trials,
            campaign.node_seconds,
        ):
            trials = _most_wanted(() if then is None else then.trials, campaign)
            data = {
                "node_hours": campaign.node_seconds / SECONDS_PER_HOUR,
                "num_running": len(campaign.trials),
                "trials": [trial._asdict() for trial in trials],
            }
            yield _event("campaign.progress", at, data, campaign_id=id_)


def _most_wanted(before: Iterable[RunningTrial], campaign: RunningCampaign) -> list[RunningTrial]:
    """The running trials by number; of too many, those that have changed come first."""
    if len(campaign.trials) <= MAX_LISTED:
        return list(campaign.trials)
    known = set(before)
    return sorted(campaign.trials, key=lambda trial: (trial in known, trial.number))[:MAX_LISTED]


def _of_workers(before: LiveState, now: LiveState, at: datetime) -> Iterator[LiveEvent]:
    ended = {
        id_: replace(worker, state="ended")
        for id_, worker in before.workers.items()
        if id_ not in now.workers
    }
    for id_, worker in {**now.workers, **ended}.items():
        then = before.workers.get(id_)
        if then is None or then.state != worker.state:
            yield _event("worker.changed", at, {"worker_id": id_, **asdict(worker)})


def _of_nodes(before: LiveState, now: LiveState, at: datetime) -> Iterator[LiveEvent]:
    changed = sorted(
        key
        for key in before.nodes.keys() | now.nodes.keys()
        if before.nodes.get(key) != now.nodes.get(key)
    )
    for cluster in sorted({cluster for cluster, _ in changed}):
        keys = [key for key in changed if key[0] == cluster]
        data = {
            "cluster": cluster,
            "num_changed": len(keys),
            "nodes": [_node(key, now.nodes.get(key)) for key in keys[:MAX_LISTED]],
        }
        yield _event("nodes.changed", at, data)


def _of_plans(before: LiveState, now: LiveState, at: datetime) -> Iterator[LiveEvent]:
    for id_, (state, owner) in now.plans.items():
        then, _ = before.plans.get(id_, ("WAITING", owner))
        if state != "WAITING" and then == "WAITING":
            yield _event("plan.ended", at, {"plan_id": id_, "state": state}, owner=owner)


def _node(key: NodeKey, status: NodeStatus | None) -> dict[str, Any]:
    _, name = key
    return {
        "name": name,
        "state": None if status is None else status.state,
        "quarantine": None if status is None else status.quarantine,
    }


def _event(
    kind: LiveEventKind,
    at: datetime,
    data: dict[str, Any],
    *,
    campaign_id: int | None = None,
    owner: str | None = None,
) -> LiveEvent:
    document = EventRead(
        seq=None, kind=kind, at=at, campaign_id=campaign_id, trial_id=None, data=data
    )
    content = format_sse_event(data_str=to_json(document).decode(), event=kind)
    return LiveEvent(kind=kind, campaign_id=campaign_id, owner=owner, content=content)
