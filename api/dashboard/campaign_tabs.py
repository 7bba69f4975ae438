"""Tabs of a campaign: its trials, its failures, and its events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

from fastapi import Query
from fastapi.responses import HTMLResponse

from layout_tuner.api.campaigns.trials import cheap_probes, page_of_trials
from layout_tuner.api.dashboard.campaign_page import ShowDep
from layout_tuner.api.dependencies import CampaignDep, StoreDep
from layout_tuner.api.html.result_sentences import REASONS, end_of_log
from layout_tuner.api.http.cursors import MAX_CURSOR
from layout_tuner.api.http.lazy_routes import LazyRouter
from layout_tuner.api.http.query_parameters import TrialFilterDep
from layout_tuner.documents.limits import MAX_ID
from layout_tuner.protocol.states import TrialState
from layout_tuner.results_db.campaigns.history_and_timeline import FailureCount
from layout_tuner.results_db.records import CampaignRecord, EventRead, TrialDetail
from layout_tuner.results_db.store import Store
from layout_tuner.results_db.trials.filter import TrialFilter, TrialOrder

PAGE: Final = 100
"""Trials or events on one page."""

_NEWEST_FIRST: Final = TrialOrder(key="number", descending=True)
_WITHOUT_RESULT: Final[tuple[TrialState, ...]] = ("FAILED", "INFEASIBLE")

Cursor = Annotated[str | None, Query(max_length=MAX_CURSOR)]

router = LazyRouter(prefix="/campaigns/{campaign}")


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureReason:
    """The trials of a campaign without a result, for one reason."""

    state: str
    reason: str
    meaning: str
    num_trials: int
    nodes: Sequence[tuple[str, int]]
    """Nodes where the failure occurred first with their numbers of trials, the most first."""
    example: TrialDetail
    """The newest of these trials."""
    log: str
    """The last lines of its log."""


@router.get("/trials")
def show_trials(
    campaign: CampaignDep,
    store: StoreDep,
    show: ShowDep,
    wanted: TrialFilterDep,
    cursor: Cursor = None,
    before: Cursor = None,
) -> HTMLResponse:
    """All trials with their states, the newest first."""
    phases = store.reports.running_phases(campaign.id)
    listed = _listed(store, campaign, wanted, cursor, before)
    return show("campaign_trials.html", phases=phases, **listed)


@router.get("/failures")
def show_failures(
    campaign: CampaignDep,
    store: StoreDep,
    show: ShowDep,
    wanted: TrialFilterDep,
    cursor: Cursor = None,
    before: Cursor = None,
) -> HTMLResponse:
    """Failures by reason, each with an example, and the trials that failed."""
    if not wanted.states:
        wanted = TrialFilter(**wanted.stated, states=_WITHOUT_RESULT)
    listed = _listed(store, campaign, wanted, cursor, before)
    return show("campaign_failures.html", reasons=_reasons(store, campaign), **listed)


def _listed(
    store: Store,
    campaign: CampaignRecord,
    wanted: TrialFilter,
    cursor: str | None,
    before: str | None,
) -> dict[str, Any]:
    """What a tab shows of a page of trials."""
    listed = page_of_trials(
        store, campaign, wanted, _NEWEST_FIRST, cursor=cursor, before=before, limit=PAGE
    )
    probes = cheap_probes(store, listed.trials)
    return {"listed": listed, "cheap_probes": probes, "wanted": wanted}


@router.get("/events")
def show_events(
    campaign: CampaignDep,
    store: StoreDep,
    show: ShowDep,
    before: Annotated[int | None, Query(ge=1, le=MAX_ID)] = None,
) -> HTMLResponse:
    """What happened in the campaign, the newest first."""
    # One event more than the page shows whether there are older ones.
    found = store.events.newest(campaign.id, before=before, limit=PAGE + 1)
    return show(
        "campaign_events.html",
        events=[(event, event_sentence(event)) for event in found[:PAGE]],
        older=found[PAGE - 1].seq if len(found) > PAGE else None,
        is_newest=before is None,
    )


def _reasons(store: Store, campaign: CampaignRecord) -> list[FailureReason]:
    """The failures by reason, the most frequent first."""
    counts: dict[tuple[str, str], list[FailureCount]] = {}
    for each in store.history.failures(campaign.id):
        counts.setdefault((each.state, each.reason), []).append(each)
    found = []
    for (state, reason), of_nodes in counts.items():
        newest = max(each.last_number for each in of_nodes)
        example = store.trials.detail(store.trials.by_number(campaign.id, newest).id)
        nodes: Counter[str] = Counter()
        for each in of_nodes:
            nodes[each.node] += each.num_trials
        found.append(
            FailureReason(
                state=state,
                reason=reason or state.lower(),
                meaning=REASONS.get(reason, ""),
                num_trials=nodes.total(),
                nodes=nodes.most_common(),
                example=example,
                log=end_of_log(example.log_tail),
            )
        )
    return sorted(found, key=lambda each: -each.num_trials)


_SENTENCES: Final[Mapping[str, str]] = {
    "campaign.created": "The campaign was submitted.",
    "campaign.paused": "The campaign was paused{because}.",
    "campaign.resumed": "The campaign was resumed.",
    "campaign.deleted": "The campaign was deleted.",
    "campaign.analysed": "A new analysis of the knobs is available.",
    "campaign.changed": "The campaign's {fields} changed.",
    "campaign.ended": "The campaign ended: {state}{because}.",
    "trial.added": "waits for a worker.",
    "trial.leased": "was leased to a worker, attempt {attempt}.",
    "trial.returned": "was returned or lost by its worker and is {state}{because} now.",
    "trial.judged": "is {state}{because} now, after a comparison of losses.",
    "trial.ended": "ended as {state}{because}.",
}
"""What events say; the template puts a link on the number of a trial before its sentence."""


def event_sentence(event: EventRead) -> str:
    data = event.data
    return _SENTENCES.get(event.kind, f"{event.kind}.").format(
        state=data.get("state"),
        because=f" ({data['reason']})" if data.get("reason") else "",
        attempt=data.get("attempt"),
        fields=" and ".join(map(str, data.get("fields", ()))),
    )
