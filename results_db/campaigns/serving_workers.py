"""Whether some worker could serve a campaign now: its wall time passes only meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import select
from sqlalchemy.orm import Session

from results_db.models.service_tables import WorkerRow, is_there
from results_db.models.tables import Campaign, Trial
from results_db.records import WorkerRecord
from results_db.rows import record_of


def working(session: Session, now: datetime) -> list[WorkerRecord]:
    """The live workers that still lease trials."""
    rows = session.scalars(select(WorkerRow).where(is_there(now), WorkerRow.state != "draining"))
    return [record_of(WorkerRecord, row) for row in rows]


def could_be_served(session: Session, campaign: Campaign, workers: Sequence[WorkerRecord]) -> bool:
    """Whether a trial of the campaign runs, or one of the workers could run one.

    Where trials wait, the worker must be large enough for one of them; where none waits, the driver
    may add one.
    """
    sizes = session.execute(
        select(Trial.state, Trial.num_nodes, Trial.num_devices)
        .where(Trial.campaign_id == campaign.id, Trial.state.in_(("PENDING", "RUNNING")))
        .distinct()
    ).all()
    if any(state == "RUNNING" for state, *_ in sizes):
        return True
    cluster, trainer = campaign.cluster_name, campaign.trainer
    able = [each for each in workers if each.cluster == cluster and each.runs(trainer)]
    if not sizes:
        return bool(able)
    return any(each.holds(nodes, devices) for each in able for _, nodes, devices in sizes)
