"""Makes the plan of a campaign's document with the measurements that the service has."""

from __future__ import annotations

from typing import Any, Final

from api.service.submission import Submission
from results_db.campaigns.start_from import PlannedCampaign, knowledge_of
from results_db.store import Store
from search_spaces.belief.plan import Plan, make_plan
from search_spaces.errors import CampaignInvalidError
from search_spaces.statistics.training_job import TrainingJob

MAX_PLANNED: Final = 50_000
"""Most legal layouts that a request may plan."""


def plan_of(
    document: Any,
    submission: Submission,
    store: Store,
    *,
    top: int,
    probe_start_s: float,
    job: TrainingJob | None = None,
) -> Plan:
    """The plan of a document that could be submitted; nothing is stored.

    It knows the measurements from which the campaign would start if it were submitted now.

    Raises:
        SearchSpaceError: the document would be refused, or has too many legal layouts.
    """
    spec = submission.resolve(document)
    submission.refuse_unknown_sources(spec)
    legal = spec.legal_set()
    if len(legal) > MAX_PLANNED:
        raise CampaignInvalidError(
            f"{len(legal):,} legal layouts are more than {MAX_PLANNED:,}, the most that the service "
            "plans; plan it with `layout-tuner plan FILE` on your own machine",
            field="space",
        )
    planned = PlannedCampaign(
        spec=spec.to_mapping(),
        cluster_name=spec.cluster.name,
        trainer=spec.probe.trainer,
        created_at=store.now(),
    )
    return make_plan(
        spec,
        legal=legal,
        knowledge=knowledge_of(store.known_trials(planned)),
        top=top,
        probe_start_s=probe_start_s,
        job=job,
    )
