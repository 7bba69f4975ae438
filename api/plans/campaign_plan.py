"""Makes the plan of a campaign's document with the measurements that the service has."""

from __future__ import annotations

from typing import Any, Final

from api.campaigns.submission import Submission
from results_db.campaigns.plans import PlanOptions
from results_db.records import PlanRecord
from results_db.store import Store
from search_spaces.belief.plan import Plan
from search_spaces.errors import CampaignInvalidError

MAX_AT_ONCE: Final = 50_000
"""Most legal layouts that are planned while a client waits; the driver plans larger spaces."""


def plan_of(document: Any, submission: Submission, store: Store, options: PlanOptions) -> Plan:
    """The plan of a document that could be submitted; nothing is stored.

    It knows the measurements from which the campaign would start if it were submitted now.

    Raises:
        SearchSpaceError: the document would be refused, or has too many legal layouts.
    """
    planned = plan_or_request(document, submission, store, options, is_stored=False)
    assert isinstance(planned, Plan), "nothing is left to the driver"
    return planned


def plan_or_request(
    document: Any,
    submission: Submission,
    store: Store,
    options: PlanOptions,
    *,
    is_stored: bool = True,
) -> Plan | PlanRecord:
    """The same; the plan of a large space is requested of the driver.

    Args:
        document: the campaign's.
        submission: resolves the names of models, clusters and campaigns.
        store: has the measurements.
        options: what the plan lists and assumes.
        is_stored: whether a large space may be left to the driver.

    Raises:
        SearchSpaceError: the document would be refused, or has too many legal layouts.
        PlanLimitError: too many plans wait for the driver.
    """
    spec = submission.resolve(document)
    submission.refuse_unknown_sources(spec)
    legal = spec.legal_set()
    if len(legal) <= MAX_AT_ONCE:
        return store.plans.make(spec, options, legal=legal)
    if is_stored:
        spec.refuse_if_too_large(legal)
        return store.plans.request(spec.to_mapping(), options)
    raise CampaignInvalidError(
        f"{len(legal):,} legal layouts are more than {MAX_AT_ONCE:,}, the most that this page plans; "
        "use `layout-tuner campaign submit FILE --dry-run` or `layout-tuner plan FILE`",
        field="space",
    )
