"""What a probe is told when its trial is leased: the step time at which it would only equal the best."""

from __future__ import annotations

from results_db.records import LeaseRecord
from results_db.store import Store
from search_spaces.campaign import CampaignSpec
from search_spaces.columns import LayoutColumns
from search_spaces.early_stop import LEAST_TIMED
from search_spaces.objectives import objective_factors


def step_time_to_beat(store: Store, spec: CampaignSpec, lease: LeaseRecord) -> float | None:
    """The step time above which the leased layout is no better than the best so far; None: none."""
    if not has_something_to_beat(spec, lease):
        return None
    best = store.value_to_beat(lease.campaign_id)
    return None if best is None else step_time_at(best, spec, lease)


def has_something_to_beat(spec: CampaignSpec, lease: LeaseRecord) -> bool:
    """Whether a slow run of the leased layout is to be stopped early.

    The best is taken at the low end of its interval: a layout is then slower than it really is, not
    than what one lucky run of it showed. There is nothing to beat in a repeat, which is made to be
    compared, in an exhaustive campaign, which wants every layout's figure, and where several
    objectives are weighed: a slow layout may be on the front.
    """
    if not spec.stop.early or spec.strategy == "exhaustive" or len(spec.objectives) > 1:
        return False
    return lease.repeat_of is None and spec.probe.iterations > LEAST_TIMED


def step_time_at(best: float, spec: CampaignSpec, lease: LeaseRecord) -> float:
    """The step time at which the leased layout would have the best's objective."""
    columns = LayoutColumns.of(lease.layout)
    factor = float(objective_factors(spec.objective, columns, spec.model, spec.cluster))
    return factor / best
