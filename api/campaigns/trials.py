"""Trials for the API and the pages: one page of a campaign's, and cheap probes among them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from layout_tuner.api.errors import PageInvalidError
from layout_tuner.api.http.cursors import read_trial_cursor, write_trial_cursor
from layout_tuner.predictions.belief.cheap_probe_step_time import CheapProbe
from layout_tuner.results_db.records import CampaignRecord, TrialRecord
from layout_tuner.results_db.store import Store
from layout_tuner.results_db.trials.filter import PageEnd, TrialFilter, TrialOrder
from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec
from layout_tuner.search_spaces.campaigns.stored_campaign import Damaged
from layout_tuner.search_spaces.layouts.layout import Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class ListedTrials:
    """A page of trials, and the cursors of the pages before and after it."""

    trials: Sequence[TrialRecord]
    next_cursor: str | None
    previous_cursor: str | None
    total: int
    """Trials that pass the filters."""
    is_total_exact: bool


def page_of_trials(
    store: Store,
    campaign: CampaignRecord,
    wanted: TrialFilter,
    order: TrialOrder,
    *,
    cursor: str | None,
    before: str | None,
    limit: int,
) -> ListedTrials:
    """Reads the page after `cursor`, or the page before `before`; the first one without them.

    Raises:
        PageInvalidError: both cursors are given, or one is of another list.
    """
    if cursor is not None and before is not None:
        raise PageInvalidError("cursor and before exclude each other; leave one of them out")

    def read(given: str | None) -> PageEnd | None:
        return None if given is None else read_trial_cursor(given, campaign.id, order)

    def write(edge: PageEnd | None) -> str | None:
        return None if edge is None else write_trial_cursor(edge, campaign.id, order)

    page = store.trial_pages.page(
        campaign.id,
        wanted=wanted,
        order=order,
        after=read(cursor),
        before=read(before),
        limit=limit,
    )
    total, is_exact = store.trial_pages.count(campaign.id, wanted=wanted)
    return ListedTrials(
        trials=page.trials,
        next_cursor=write(page.end),
        previous_cursor=write(page.start),
        total=total,
        is_total_exact=is_exact,
    )


def cheap_probes(store: Store, trials: Iterable[TrialRecord]) -> dict[int, CheapProbe]:
    """The cheap probes among trials, with the extrapolated steps, by ids of trials."""

    @cache
    def spec_of(campaign_id: int) -> CampaignSpec | Damaged:
        return store.campaigns.get(campaign_id).stored.read

    found = {}
    for trial in trials:
        layout, num_layers = trial.full_layout, trial.num_layers
        if layout is None or num_layers is None:
            continue
        if not isinstance(spec := spec_of(trial.campaign_id), Damaged):
            found[trial.id] = _probe(spec, trial, layout, num_layers)
    return found


def _probe(spec: CampaignSpec, trial: TrialRecord, layout: Layout, num_layers: int) -> CheapProbe:
    measured = trial.measurement if trial.state == "COMPLETED" else None
    return CheapProbe.of(
        layout,
        trial.layout,
        num_layers,
        spec.model,
        spec.cluster,
        software=spec.software,
        measured_s=None if measured is None else measured.step_time_s,
    )
