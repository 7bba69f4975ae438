"""Plans of campaigns: made from what the database knows, at once or by the driver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any, Final, Self

from sqlalchemy import delete, func, select

from layout_tuner.predictions.belief.layout_predictions import LayoutPredictions
from layout_tuner.predictions.belief.plan import DEFAULT_TOP, Plan, make_plan
from layout_tuner.predictions.belief.plan_parts.layout_comparison import (
    LayoutComparison,
    compare_layouts,
)
from layout_tuner.predictions.statistics.job_duration import TrainingJob
from layout_tuner.results_db.campaigns.start_from import (
    EarlierTrials,
    PlannedCampaign,
    knowledge_of,
)
from layout_tuner.results_db.database.retry import retried
from layout_tuner.results_db.errors import PlanLimitError, PlanNotFoundError
from layout_tuner.results_db.models.service_tables import PlanRow
from layout_tuner.results_db.records import CampaignRecord, PlanRecord
from layout_tuner.results_db.rows import record_of
from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec
from layout_tuner.search_spaces.campaigns.fidelity import PROBE_START_S
from layout_tuner.search_spaces.campaigns.stored_campaign import StoredCampaign
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.spaces.search_space import LegalSet

MAX_WAITING: Final = 8
"""Most plans of one owner that wait for the driver."""
KEPT: Final = timedelta(days=1)
"""How long a plan can be read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """The layouts of a plan, and its assumptions."""

    top: int = DEFAULT_TOP
    """How many layouts are listed."""
    probe_start_s: float = PROBE_START_S
    """Assumed seconds of a probe outside of its iterations."""
    job: TrainingJob | None = None
    """The training job to be predicted with each listed layout."""
    compare: tuple[str, str] | None = None
    """Two layouts to be compared, by rank or key."""

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """Reads back what `asdict` gave."""
        job, keys = mapping["job"], mapping.get("compare")
        given = {
            "job": None if job is None else TrainingJob(**job),
            "compare": None if keys is None else tuple(keys),
        }
        return cls(**{**mapping, **given})


class Plans(EarlierTrials):
    """The store's methods for plans."""

    def make(
        self,
        spec: CampaignSpec,
        options: PlanOptions,
        *,
        legal: LegalSet | None = None,
        at: datetime | None = None,
        owner: str | None = None,
    ) -> Plan:
        """Makes a plan with the measurements from which the campaign would start.

        It was requested `at` this time by an `owner` (None: the actor's); `legal` is the legal set,
        if the caller has it already. Raises SearchSpaceError if the campaign would be refused.
        """
        planned = PlannedCampaign(
            stored=StoredCampaign(document=spec.to_mapping()),
            cluster_name=spec.cluster.name,
            trainer=spec.trainer,
            created_at=at or self._clock(),
            created_by=self._actor.owner if owner is None else owner,
        )
        return make_plan(
            spec,
            legal=legal,
            knowledge=knowledge_of(self.known_trials(planned)),
            top=options.top,
            probe_start_s=options.probe_start_s,
            job=options.job,
            compare=options.compare,
        )

    def compare(
        self,
        campaign: CampaignRecord,
        first: Layout,
        second: Layout,
        *,
        software: str | None = None,
    ) -> LayoutComparison:
        """The difference of two layouts by what the campaign knew when it began.

        `software` is what ran it; None: the trainer of its probes. Raises SearchSpaceError if its
        document is damaged.
        """
        spec = campaign.stored.spec
        predictions = LayoutPredictions(
            spec=spec,
            software=spec.software if software is None else software,
            knowledge=knowledge_of(self.known_trials(campaign)),
        )
        return compare_layouts(predictions, first, second)

    @retried
    def request(self, spec: Mapping[str, Any], options: PlanOptions) -> PlanRecord:
        """Stores a campaign for the driver to plan, and deletes plans of yesterday.

        Raises PlanLimitError if too many plans of the same owner wait.
        """
        now = self._clock()
        with self._db.write() as session:
            session.execute(delete(PlanRow).where(PlanRow.created_at < now - KEPT))
            own = (PlanRow.state == "WAITING") & (PlanRow.created_by == self._actor.owner)
            waiting = select(func.count()).where(own)
            if (session.scalar(waiting) or 0) >= MAX_WAITING:
                raise PlanLimitError(
                    f"{MAX_WAITING} plans of {self._actor.owner!r} wait for the driver, and no more may; try again "
                    "later, or use `layout-tuner plan FILE` on your own machine"
                )
            row = PlanRow(
                state="WAITING",
                created_by=self._actor.owner,
                created_at=now,
                spec=dict(spec),
                options=asdict(options),
                answer={},
                problem="",
            )
            session.add(row)
            session.flush()
            return record_of(PlanRecord, row)

    def get(self, plan_id: int) -> PlanRecord:
        """One plan. Raises PlanNotFoundError if there is none of this id."""
        with self._db.read() as session:
            row = session.get(PlanRow, plan_id)
            if row is None:
                raise PlanNotFoundError(
                    f"there is no plan {plan_id}; plans are deleted after a day"
                )
            return record_of(PlanRecord, row)

    def waiting(self) -> Sequence[tuple[int, str]]:
        """The ids and owners of the plans that wait for the driver, the oldest first."""
        query = select(PlanRow.id, PlanRow.created_by).where(PlanRow.state == "WAITING")
        with self._db.read() as session:
            return session.execute(query.order_by(PlanRow.id)).all()

    @retried
    def end(self, plan_id: int, result: Plan | str) -> None:
        """Stores a plan, or why it could not be made; a plan that was deleted is left so."""
        with self._db.write() as session:
            row = session.get(PlanRow, plan_id, with_for_update=True)
            if row is None or row.state != "WAITING":
                return
            row.ended_at = self._clock()
            if isinstance(result, str):
                row.state, row.problem = "FAILED", result
            else:
                row.state, row.answer = "DONE", asdict(result)
