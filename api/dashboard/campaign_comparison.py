"""Two to eight campaigns side by side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse

from api.dashboard.campaign_view import campaign_path
from api.dashboard.rendering import render
from api.dependencies import CampaignName, StoreDep, campaign_named, campaign_reference
from api.errors import ComparisonInvalidError
from api.service.findings import CampaignFinding, finding_of, ratio_interval
from api.service.formatting import duration, figure, unit
from results_db.records import CampaignRecord
from results_db.store import Store
from search_spaces.spec.layout import KNOBS
from search_spaces.terminal.plurals import counted

MOST: Final = 8
"""Most campaigns that are compared at once."""

_DERIVED: Final = {"num_devices": "devices", "global_batch_size": "global batch"}
"""Figures that follow from the knobs, with their names."""

router = APIRouter()


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedRow:
    """A property of the compared campaigns."""

    name: str
    values: tuple[str, ...]
    """One for each campaign, in their order."""

    @property
    def differs(self) -> bool:
        """Whether the campaigns differ in it."""
        return len(set(self.values)) > 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedWinner:
    """The winner of a campaign over the winner of the first."""

    campaign: str
    ratio: float | None
    """None: they cannot be compared, for the reason `why_not`."""
    low: float | None
    high: float | None
    why_not: str


@router.get("/compare-campaigns", include_in_schema=False)
def show_campaign_comparison(
    request: Request,
    store: StoreDep,
    campaign: Annotated[list[CampaignName] | None, Query()] = None,
) -> HTMLResponse:
    """Campaigns side by side, and their winners relative to that of the first.

    Raises:
        ComparisonInvalidError: these are less than two campaigns, or more than `MOST`.
        CampaignNotFoundError: one of them does not exist.
    """
    names = list(dict.fromkeys(campaign or ()))
    if not 2 <= len(names) <= MOST:
        raise ComparisonInvalidError(
            f"{counted(len(names), 'campaign')} cannot be compared: tick 2 to {MOST} campaigns in "
            "the list"
        )
    found = [finding_of(store, campaign_named(campaign_reference(name), store)) for name in names]
    campaigns = [each.campaign for each in found]
    return render(
        request,
        "campaign_comparison.html",
        findings=found,
        paths=[campaign_path(each) for each in campaigns],
        follows=" ".join(str(each.id) for each in campaigns),
        rows=_rows(store, campaigns),
        knobs=_knobs(found),
        winners=[_compared(found[0], other) for other in found[1:]],
    )


def _rows(store: Store, campaigns: list[CampaignRecord]) -> list[ComparedRow]:
    counts = store.count_trials_of([campaign.id for campaign in campaigns])
    failed = [counts[each.id]["FAILED"] + counts[each.id]["INFEASIBLE"] for each in campaigns]
    found = (
        ("model", [each.model_name for each in campaigns]),
        ("cluster", [each.cluster_name for each in campaigns]),
        ("nodes of the cluster", [str(each.spec["cluster"]["num_nodes"]) for each in campaigns]),
        ("objective", [", ".join(map(unit, each.objectives)) for each in campaigns]),
        ("strategy", [each.strategy for each in campaigns]),
        ("budget", [budget_words(each) for each in campaigns]),
        ("legal layouts", [f"{each.num_legal_layouts:,}" for each in campaigns]),
        ("completed probes", [f"{counts[each.id]['COMPLETED']:,}" for each in campaigns]),
        ("probes without a result", [f"{number:,}" for number in failed]),
        ("node-hours", [figure(each.node_seconds / 3600) for each in campaigns]),
    )
    return [ComparedRow(name=name, values=tuple(values)) for name, values in found]


def budget_words(campaign: CampaignRecord) -> str:
    """The bounds of a campaign's budget."""
    budget = campaign.spec.get("budget", {})
    words = []
    if (trials := budget.get("trials")) is not None:
        words.append(counted(trials, "trial"))
    if (hours := budget.get("node_hours")) is not None:
        words.append(f"{hours:g} node-hours")
    if (seconds := budget.get("wall_time_s")) is not None:
        words.append(duration(seconds))
    return ", ".join(words) or "no bound"


def _knobs(found: list[CampaignFinding]) -> list[ComparedRow]:
    def value(finding: CampaignFinding, name: str) -> str:
        winner = finding.winner
        if winner is None:
            return "-"
        chosen = getattr(winner.trial.layout, name)
        return ("yes" if chosen else "no") if isinstance(chosen, bool) else str(chosen)

    return [
        ComparedRow(
            name=KNOBS[name].label if name in KNOBS else _DERIVED[name],
            values=tuple(value(each, name) for each in found),
        )
        for name in (*KNOBS, *_DERIVED)
    ]


def _compared(first: CampaignFinding, other: CampaignFinding) -> ComparedWinner:
    why_not = _why_not(first, other)
    ratio: float | None = None
    interval: tuple[float, float] | None = None
    if not why_not:
        assert first.winner is not None
        assert other.winner is not None
        ratio = other.winner.value / first.winner.value
        interval = ratio_interval(other.winner, first.winner)
    return ComparedWinner(
        campaign=other.campaign.name,
        ratio=ratio,
        low=None if interval is None else interval[0],
        high=None if interval is None else interval[1],
        why_not=why_not,
    )


def _why_not(first: CampaignFinding, other: CampaignFinding) -> str:
    """Why the winners of two campaigns cannot be compared; empty: they can."""
    one, two = first.campaign, other.campaign
    for each in (first, other):
        if each.winner is None:
            return f"{each.campaign.name} has measured no layout to the end."
    if one.objective != two.objective:
        return (
            f"{two.name} ranks by {unit(two.objective)}, and {one.name} by {unit(one.objective)}."
        )
    if _shape(one) != _shape(two):
        return f"{two.name} trains {two.model_name}, and {one.name} {one.model_name}."
    return ""


def _shape(campaign: CampaignRecord) -> Any:
    return campaign.spec["model"]
