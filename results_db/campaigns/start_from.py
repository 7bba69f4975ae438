"""Trials of other campaigns from which a campaign starts, as of its creation.

The time of creation fixes the set, so that a restarted driver finds the same. The set is keyed by
cluster, device and release of torch, because measurements of others mislead more than they help.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import Any, Final, cast

from sqlalchemy import ColumnElement, Select, and_, false, func, or_, select
from sqlalchemy.orm import Session, aliased

from layout_tuner.predictions.belief.known_measurements import Knowledge, Sample
from layout_tuner.predictions.belief.observation import ObservationState
from layout_tuner.protocol.measurement import IMPORTED_TRAINER
from layout_tuner.protocol.outcome import NOT_OF_THE_LAYOUT
from layout_tuner.protocol.states import TrialState
from layout_tuner.results_db.access.visibility import may_see
from layout_tuner.results_db.database.store_base import StoreSection
from layout_tuner.results_db.models.service_tables import WorkerRow
from layout_tuner.results_db.models.tables import Attempt, Campaign, Import, MeasurementRow, Trial
from layout_tuner.results_db.records import CampaignRecord, CampaignState
from layout_tuner.results_db.rows import own_first, record_of, trial_layout
from layout_tuner.search_spaces.campaigns.fidelity import with_layers
from layout_tuner.search_spaces.campaigns.stored_campaign import StoredCampaign
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.tables.table import software_of_source
from layout_tuner.trainers.embedded import EMBEDDED_TRAINER
from layout_tuner.trainers.simulator import SIMULATED, SIMULATED_LAUNCHER, is_simulator

MAX_KNOWN_TRIALS: Final = 2000
"""Most trials of other campaigns that one campaign starts from; the newest are taken."""

_SAMPLE_STATES: Final[Mapping[str, ObservationState]] = {
    "COMPLETED": "completed",
    "INFEASIBLE": "infeasible",
    "FAILED": "failed",
}
"""The states of trials that show something about their layouts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedCampaign:
    """A campaign that was not submitted; its fields are those of a `CampaignRecord`."""

    stored: StoredCampaign
    cluster_name: str
    trainer: str
    created_at: datetime
    created_by: str
    id: None = None


StartingCampaign = CampaignRecord | PlannedCampaign


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownTrial:
    """The result of a layout in another campaign."""

    campaign: StoredCampaign
    """The campaign, which has the model and the cluster on which it ran."""
    layout: Layout
    """The layout that ran; of a cheap probe, the part."""
    state: TrialState
    step_time_s: float | None
    """Present if and only if COMPLETED."""
    peak_memory_bytes: int | None
    """Of the fullest rank, where it was measured."""
    software: str
    """The software that ran it, as estimates name it: that of the new campaign where both ran on
    the same version; else with the version."""
    num_layers: int | None = None
    """Of a cheap probe, the layers of the model that was trained; None: all."""


class EarlierTrials(StoreSection):
    """The store's methods for trials of other campaigns."""

    def known_trials(self, campaign: StartingCampaign) -> list[KnownTrial]:
        """Trials that the campaign starts from, the oldest first.

        Unless `knowledge` is none: trials of campaigns that had ended on the same cluster with the
        same software. Also those of the campaigns in `start_from`, on any cluster. Of all of them
        those that the campaign's owner may see, and the reader too.
        """
        with self._db.seen_by(*self._db.owners, campaign.created_by).read() as session:
            sources = _Sources.of(session, campaign)
            rows = session.execute(
                _known(campaign, sources, Trial, MeasurementRow, WorkerRow)
                .order_by(Trial.ended_at.desc(), Trial.id.desc())
                .limit(MAX_KNOWN_TRIALS)
            )
            found = [_known_trial(sources, campaign, *row) for row in rows]
        return found[::-1]

    def count_known_trials(self, campaign: StartingCampaign) -> int:
        with self._db.seen_by(*self._db.owners, campaign.created_by).read() as session:
            query = _known(campaign, _Sources.of(session, campaign), Trial.id)
            limited = query.limit(MAX_KNOWN_TRIALS).subquery()
            return session.scalar(select(func.count()).select_from(limited)) or 0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sources:
    """The campaigns and worker sessions that count."""

    campaigns: Mapping[int, StoredCampaign]
    """The campaigns, by id."""
    alike: tuple[int, ...]
    """Campaigns on the same hardware that had ended."""
    named: tuple[int, ...]
    """Campaigns in `start_from`."""
    software: str | None
    """Software of the newest worker when the campaign was created; None: there was none."""
    workers: tuple[str, ...]
    """Worker sessions with the same software."""
    imported: Mapping[int, str]
    """By id, the software of imported campaigns, as far as their source names it."""

    @classmethod
    def of(cls, session: Session, campaign: StartingCampaign) -> _Sources:
        alike = _alike(session, campaign)
        names = campaign.stored.start_from
        of_name = session.scalars(
            select(Campaign)
            .where(
                Campaign.name.in_(names),
                Campaign.id != campaign.id,
                Campaign.created_at <= campaign.created_at,
                may_calibrate(campaign.trainer),
            )
            .order_by(*own_first(campaign.created_by))
        )
        # Of several campaigns of a name, the one that the name finds: it comes first.
        named = list({row.name: row for row in reversed(of_name.all())}.values())
        trainer = campaign.trainer
        registered = session.scalars(
            select(WorkerRow)
            .where(
                WorkerRow.cluster == campaign.cluster_name,
                WorkerRow.registered_at <= campaign.created_at,
            )
            .order_by(WorkerRow.registered_at, WorkerRow.id)
        )
        # A simulated worker is no word on the software of real ones, nor the other way round.
        sessions = [
            row
            for row in registered
            if is_simulator(trainer) == (row.launcher == SIMULATED_LAUNCHER)
        ]
        software = _software(sessions[-1], trainer) if sessions else None
        ids = [row.id for row in named]
        imported = session.scalars(select(Import).where(Import.campaign_id.in_(ids)))
        return cls(
            imported={row.campaign_id: software_of_source(row.source) for row in imported},
            campaigns={row.id: row.stored for row in (*alike, *named)},
            alike=tuple(row.id for row in alike),
            named=tuple(row.id for row in named),
            software=software,
            workers=tuple(row.id for row in sessions if _software(row, trainer) == software),
        )


def software_of(versions: Mapping[str, Any]) -> str:
    """The key of measurements among a worker's versions: the release of torch.

    Without its last number, which stands for fixes, and without the name of the build after "+".
    """
    release = str(versions.get("torch", "")).partition("+")[0].split(".")[:2]
    return f"torch {'.'.join(release)}" if release != [""] else ""


def _software(worker: WorkerRow, trainer: str) -> str:
    """The key of a worker session's measurements with a trainer."""
    if trainer == EMBEDDED_TRAINER:
        return software_of(worker.versions)
    return f"{trainer} {worker.trainers.get(trainer, '')}"


def may_calibrate(trainer: str) -> ColumnElement[bool]:
    """Whether a campaign's measurements apply to a trainer; those of imported tables do.

    No imported table does that is simulated.
    """
    simulated = select(Import.campaign_id).where(Import.source.istartswith(SIMULATED))
    is_measured = (Campaign.trainer == IMPORTED_TRAINER) & Campaign.id.not_in(simulated)
    return (Campaign.trainer == trainer) | is_measured


def _alike(session: Session, campaign: StartingCampaign) -> list[Campaign]:
    if not campaign.stored.knows_earlier:
        return []
    query = select(Campaign).where(
        Campaign.cluster_name == campaign.cluster_name,
        Campaign.trainer == campaign.trainer,
        Campaign.id != campaign.id,
        Campaign.ended_at <= campaign.created_at,
    )
    machine = campaign.stored.hardware
    return [row for row in session.scalars(query) if row.stored.hardware == machine]


def _known(campaign: StartingCampaign, sources: _Sources, *columns: Any) -> Select[Any]:
    return (
        select(*columns)
        .select_from(Trial)
        .outerjoin(MeasurementRow, MeasurementRow.trial_id == Trial.id)
        .outerjoin(Attempt, and_(Attempt.trial_id == Trial.id, Attempt.attempt == Trial.attempt))
        .outerjoin(WorkerRow, WorkerRow.id == Attempt.worker_id)
        .where(
            Trial.state.in_(_SAMPLE_STATES),
            Trial.ended_at <= campaign.created_at,
            # A node's fault says nothing of the layout; oversubscription itself makes ranks slow.
            func.coalesce(Trial.reason, "").not_in(NOT_OF_THE_LAYOUT),
            func.coalesce(MeasurementRow.oversubscribed, false()).is_(false()),
            or_(
                Trial.campaign_id.in_(sources.named),
                and_(Trial.campaign_id.in_(sources.alike), Attempt.worker_id.in_(sources.workers)),
            ),
        )
    )


def _known_trial(
    sources: _Sources,
    campaign: StartingCampaign,
    trial: Trial,
    measurement: MeasurementRow | None,
    worker: WorkerRow | None,
) -> KnownTrial:
    completed = measurement if trial.state == "COMPLETED" else None
    if worker is None:
        software = sources.imported.get(trial.campaign_id, "")
    else:
        ran = _software(worker, campaign.trainer)
        software = campaign.stored.software if ran == sources.software else ran
    return KnownTrial(
        campaign=sources.campaigns[trial.campaign_id],
        layout=trial_layout(trial),
        state=cast("TrialState", trial.state),
        step_time_s=None if completed is None else completed.step_time_s,
        peak_memory_bytes=None if completed is None else completed.peak_memory_bytes,
        software=software,
        num_layers=trial.num_layers,
    )


def knowledge_of(trials: Iterable[KnownTrial]) -> Knowledge:
    """Trials of other campaigns as samples, in their order.

    Those of a campaign whose model or cluster cannot be read are left out.
    """
    # Samples of one model are told by its object: those of one campaign share it.
    trained = cache(with_layers)
    found = []
    for trial in trials:
        model, cluster = trial.campaign.model, trial.campaign.cluster
        if model is None or cluster is None:
            continue
        if trial.num_layers is not None and trial.num_layers != model.num_layers:
            model = trained(model, trial.num_layers)
        state = _SAMPLE_STATES[trial.state]
        found.append(record_of(Sample, trial, model=model, cluster=cluster, state=state))
    return Knowledge(samples=tuple(found))


def dependents(session: Session, campaign_id: int) -> list[tuple[int, str, CampaignState]]:
    """Ids, names and states of the campaigns that start from a campaign, the newest first.

    Those that mean another one of its name are not among them: their owners do not see this one, or
    made them before it.
    """
    other = aliased(Campaign)
    query = (
        select(other, Campaign.name)
        .join(Campaign, Campaign.id == campaign_id)
        .where(other.created_at >= Campaign.created_at, may_see(other.created_by))
        .order_by(other.id.desc())
    )
    return [
        (row.id, row.name, cast("CampaignState", row.state))
        for row, name in session.execute(query)
        if name in row.stored.start_from
    ]
