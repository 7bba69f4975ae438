"""What a campaign may start from: trials of other campaigns, as they stood when it was created.

The set is fixed by the campaign's creation: a driver that is started again finds the same. Why it is
keyed by cluster, device and release of torch is in decision 21.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

from sqlalchemy import ColumnElement, Select, and_, false, func, or_, select
from sqlalchemy.orm import Session

from results_db.import_tables import Import
from results_db.models import Attempt, Campaign, MeasurementRow, Trial
from results_db.part import StorePart
from results_db.records import CampaignRecord, TrialState
from results_db.rows import trial_layout
from results_db.worker_tables import Worker
from search_spaces.layout import Layout
from search_spaces.tables.table import software_of_source

MAX_KNOWN_TRIALS: Final = 2000
"""Trials of other campaigns that one campaign starts from, at most; the newest."""

_TEACHING_STATES: Final = ("COMPLETED", "INFEASIBLE", "FAILED")


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownTrial:
    """What became of a layout in another campaign."""

    model: Mapping[str, Any]
    """What was trained: a model's fields by name."""
    cluster: Mapping[str, Any]
    """Where it ran: a cluster's fields by name."""
    layout: Layout
    state: TrialState
    step_time_s: float | None
    """There if and only if COMPLETED."""
    peak_memory_bytes: int | None
    """Of the fullest rank, where it was measured."""
    software: str
    """What ran it; empty: what will run the campaign that asks."""


class Knowledge(StorePart):
    """The part of the store that knows what campaigns have in common."""

    def known_trials(self, campaign: CampaignRecord) -> list[KnownTrial]:
        """Trials that the campaign starts from, the oldest first.

        Without `knowledge: none`, those of campaigns that had ended on the same cluster and under the
        same software; besides, those of the campaigns that `start_from` names, whatever they ran on.
        """
        with self._db.read() as session:
            sources = _Sources.of(session, campaign)
            rows = session.execute(
                _known(campaign, sources, Trial, MeasurementRow, Worker.versions)
                .order_by(Trial.ended_at.desc(), Trial.id.desc())
                .limit(MAX_KNOWN_TRIALS)
            )
            found = [_known_trial(sources, *row) for row in rows]
        return found[::-1]

    def count_known_trials(self, campaign: CampaignRecord) -> int:
        """How many trials of other campaigns the campaign starts from."""
        with self._db.read() as session:
            query = _known(campaign, _Sources.of(session, campaign), Trial.id)
            limited = query.limit(MAX_KNOWN_TRIALS).subquery()
            return session.scalar(select(func.count()).select_from(limited)) or 0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sources:
    """Which campaigns and workers' sessions count."""

    specs: Mapping[int, Mapping[str, Any]]
    """Descriptions of the campaigns, by id."""
    alike: tuple[int, ...]
    """Campaigns on the same hardware, which had ended."""
    named: tuple[int, ...]
    """Campaigns that are named."""
    software: str | None
    """Of the newest worker when the campaign was created; None where there was none."""
    workers: tuple[str, ...]
    """Sessions under the same software."""
    imported: Mapping[int, str]
    """What ran the imported ones of the campaigns, as far as their source tells, by id."""

    @classmethod
    def of(cls, session: Session, campaign: CampaignRecord) -> _Sources:
        alike = _alike(session, campaign)
        names = campaign.spec.get("start_from", ())
        named = session.scalars(
            select(Campaign).where(Campaign.name.in_(names), Campaign.id != campaign.id)
        ).all()
        sessions = session.execute(
            select(Worker.id, Worker.versions)
            .where(
                Worker.cluster == campaign.cluster_name,
                Worker.registered_at <= campaign.created_at,
            )
            .order_by(Worker.registered_at, Worker.id)
        ).all()
        software = software_of(sessions[-1].versions) if sessions else None
        ids = [row.id for row in named]
        imported = session.scalars(select(Import).where(Import.campaign_id.in_(ids)))
        return cls(
            imported={row.campaign_id: software_of_source(row.source) for row in imported},
            specs={row.id: row.spec for row in (*alike, *named)},
            alike=tuple(row.id for row in alike),
            named=tuple(row.id for row in named),
            software=software,
            workers=tuple(row.id for row in sessions if software_of(row.versions) == software),
        )


def software_of(versions: Mapping[str, Any]) -> str:
    """The part of a worker's versions that measurements are keyed by: the release of torch.

    Its last number is for corrections, and what follows a plus names the build.
    """
    release = str(versions.get("torch", "")).partition("+")[0].split(".")[:2]
    return f"torch {'.'.join(release)}" if release != [""] else ""


def _alike(session: Session, campaign: CampaignRecord) -> list[Campaign]:
    if campaign.spec.get("knowledge", "auto") == "none":
        return []
    query = select(Campaign).where(
        Campaign.cluster_name == campaign.cluster_name,
        Campaign.id != campaign.id,
        Campaign.ended_at <= campaign.created_at,
    )
    machine = _hardware(campaign.spec)
    return [row for row in session.scalars(query) if _hardware(row.spec) == machine]


def _hardware(spec: Mapping[str, Any]) -> tuple[Any, ...]:
    cluster = spec["cluster"]
    return cluster.get("device"), cluster.get("devices_per_node")


def _known(campaign: CampaignRecord, sources: _Sources, *columns: Any) -> Select[Any]:
    return (
        select(*columns)
        .select_from(Trial)
        .outerjoin(MeasurementRow, MeasurementRow.trial_id == Trial.id)
        .outerjoin(Attempt, and_(Attempt.trial_id == Trial.id, Attempt.attempt == Trial.attempt))
        .outerjoin(Worker, Worker.id == Attempt.worker_id)
        .where(
            Trial.state.in_(_TEACHING_STATES),
            Trial.ended_at <= campaign.created_at,
            # A lost node says nothing of the layout, and ranks that shared devices are slow for that.
            func.coalesce(Trial.reason, "") != "node_lost",
            func.coalesce(MeasurementRow.oversubscribed, false()).is_(false()),
            _from(sources),
        )
    )


def _from(sources: _Sources) -> ColumnElement[bool]:
    return or_(
        Trial.campaign_id.in_(sources.named),
        and_(Trial.campaign_id.in_(sources.alike), Attempt.worker_id.in_(sources.workers)),
    )


def _known_trial(
    sources: _Sources,
    trial: Trial,
    measurement: MeasurementRow | None,
    versions: Mapping[str, Any] | None,
) -> KnownTrial:
    spec = sources.specs[trial.campaign_id]
    completed = measurement if trial.state == "COMPLETED" else None
    if versions is None:
        software = sources.imported.get(trial.campaign_id, "")
    else:
        ran = software_of(versions)
        software = "" if ran == sources.software else ran
    return KnownTrial(
        model=spec["model"],
        cluster=spec["cluster"],
        layout=trial_layout(trial),
        state=cast("TrialState", trial.state),
        step_time_s=None if completed is None else completed.step_time_s,
        peak_memory_bytes=None if completed is None else completed.peak_memory_bytes,
        software=software,
    )
