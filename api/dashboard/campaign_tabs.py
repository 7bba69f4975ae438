"""Tabs of a campaign: its plots, its timeline, its trials, its failures, and its events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Query
from fastapi.responses import HTMLResponse, JSONResponse

from api.campaigns.trials import cheap_probes, page_of_trials
from api.dashboard.campaign_page import ShowDep
from api.dependencies import CampaignDep, StoreDep
from api.formatting import unit
from api.html.rendering import PAGE_HEADERS
from api.html.result_sentences import REASONS, end_of_log
from api.http.cursors import MAX_CURSOR
from api.http.query_parameters import TrialFilterDep
from api.plot_data.campaign_plots import CampaignPlots, PlotChoices, PlotName
from results_db.campaigns.history_and_timeline import FailureCount
from results_db.events.event_log import EventRecord
from results_db.records import CampaignRecord, TrialDetail
from results_db.store import Store
from results_db.trials.filter import TrialFilter, TrialOrder
from search_spaces.documents.limits import MAX_ID
from search_spaces.protocol.states import TrialState
from search_spaces.spec.layout import KNOBS
from search_spaces.spec.objectives import ALL_OBJECTIVES

PAGE: Final = 100
"""Trials or events on one page."""

MOST_NODES: Final = 12
"""Nodes with a column in the table of failures; the others share one."""

_NEWEST_FIRST: Final = TrialOrder(key="number", descending=True)
_WITHOUT_RESULT: Final[tuple[TrialState, ...]] = ("FAILED", "INFEASIBLE")

Cursor = Annotated[str | None, Query(max_length=MAX_CURSOR)]

router = APIRouter(prefix="/campaigns/{campaign}")


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


async def plots_of(
    campaign: CampaignDep, store: StoreDep, choices: Annotated[PlotChoices, Depends()]
) -> CampaignPlots:
    """The plots of the campaign, as the reader has chosen them."""
    return CampaignPlots(store=store, campaign=campaign, choices=choices)


PlotsDep = Annotated[CampaignPlots, Depends(plots_of)]


@router.get("/plots")
def show_plots(show: ShowDep, plots: PlotsDep) -> HTMLResponse:
    return show(
        "plots.html",
        plots=plots,
        knobs=KNOBS,
        objectives=[(name, unit(name)) for name in ALL_OBJECTIVES],
        pairs=[(name, KNOBS[name].label) for name in plots.facts.varying or KNOBS],
    )


@router.get("/figures/{name}.json")
def show_plot_data(name: PlotName, plots: PlotsDep) -> JSONResponse:
    """The data of one plot, for the script of the page."""
    headers = {name: PAGE_HEADERS[name] for name in ("Cache-Control", "Vary")}
    return JSONResponse(plots.data_of(name, plots.choices.knob).document(), headers=headers)


@router.get("/timeline")
def show_timeline(show: ShowDep, plots: PlotsDep) -> HTMLResponse:
    """The attempts of a campaign against time, and its failures by reason and node."""
    failures = plots.store.history.failures(plots.campaign.id)
    return show(
        "timeline.html",
        plots=plots,
        failures=failure_table(failures),
        num_failures=sum(each.num_trials for each in failures),
    )


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
    listed = page_of_trials(
        store, campaign, wanted, _NEWEST_FIRST, cursor=cursor, before=before, limit=PAGE
    )
    return show(
        "campaign_trials.html",
        listed=listed,
        cheap_probes=cheap_probes(store, listed.trials),
        phases=store.reports.running_phases(campaign.id),
        wanted=wanted,
    )


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
    listed = page_of_trials(
        store, campaign, wanted, _NEWEST_FIRST, cursor=cursor, before=before, limit=PAGE
    )
    return show(
        "campaign_failures.html",
        reasons=_reasons(store, campaign),
        listed=listed,
        cheap_probes=cheap_probes(store, listed.trials),
        wanted=wanted,
    )


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


def failure_table(found: Sequence[FailureCount]) -> dict[str, Any]:
    """Failures with a row for each reason and a column for each node, the most first."""
    by_node: Counter[str] = Counter()
    by_reason: Counter[tuple[str, str]] = Counter()
    cells: Counter[tuple[tuple[str, str], str]] = Counter()
    for each in found:
        reason = (each.reason, each.state)
        by_node[each.node] += each.num_trials
        by_reason[reason] += each.num_trials
        cells[reason, each.node] += each.num_trials
    shown = [node for node, _ in by_node.most_common(MOST_NODES)]
    others = [node for node in by_node if node not in shown]
    headings = [node or "node unknown" for node in shown]
    rows = []
    for reason, total in by_reason.most_common():
        counts = [cells[reason, node] for node in shown]
        if others:
            counts.append(sum(cells[reason, node] for node in others))
        rows.append((*reason, *(f"{count:,}" if count else "" for count in counts), f"{total:,}"))
    if others:
        headings.append(f"{len(others)} other nodes")
    return {
        "headings": ("reason", "state", *(f">{name}" for name in headings), ">all"),
        "rows": rows,
    }


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
    "campaign.paused": "The campaign was paused.",
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


def event_sentence(event: EventRecord) -> str:
    data = event.data
    return _SENTENCES.get(event.kind, f"{event.kind}.").format(
        state=data.get("state"),
        because=f" ({data['reason']})" if data.get("reason") else "",
        attempt=data.get("attempt"),
        fields=" and ".join(map(str, data.get("fields", ()))),
    )
