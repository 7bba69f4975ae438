"""Trials side by side, and campaigns side by side, with what differs marked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Final, NamedTuple

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse

from api.dependencies import CampaignName, StoreDep, campaign_named
from api.errors import ComparisonInvalidError
from api.formatting import budget_words, figure, objective_figure, state_words, unit
from api.html.rendering import render
from api.html.result_sentences import CampaignFinding, bounds, finding_of, ratio_interval
from api.html.trial_facts import TrialFacts, knob_text
from api.plots.bars import keys, stacked
from api.schemas.text_types import campaign_reference, id_in
from results_db.store import Store
from search_spaces.protocol.worker_messages import TrialId
from search_spaces.spec.layout import KNOBS, Layout
from search_spaces.terminal.plurals import counted

FEWEST: Final = 2
MOST_TRIALS: Final = 6
MOST_CAMPAIGNS: Final = 8
"""Trials and campaigns that are compared at once."""

_OWN: Final = ("trial", "measured")
"""Figures in which trials always differ."""

router = APIRouter()


class Row(NamedTuple):
    """A line of a comparison."""

    name: str
    values: Sequence[str]
    """One for each trial or campaign, in their order."""

    @property
    def differs(self) -> bool:
        """Whether they differ in it."""
        return len(set(self.values)) > 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedWinner:
    """The winner of a campaign over the winner of the first."""

    campaign: str
    ratio: float = 0.0
    interval: tuple[float, float] = (0.0, 0.0)
    """The 95 % interval of the ratio."""
    why_not: str = ""
    """Why they cannot be compared; empty: they can."""


@router.get("/compare")
def show_trial_comparison(
    request: Request,
    store: StoreDep,
    trial: Annotated[list[TrialId] | None, Query(max_length=100)] = None,
    trials: Annotated[str, Query(max_length=200, pattern=r"^[0-9 ,]*$")] = "",
) -> HTMLResponse:
    """Two to six trials side by side.

    Their ids are in several `trial`, or in one `trials`, which the form sends.
    """
    typed = [number for word in trials.replace(",", " ").split() if (number := id_in(word))]
    asked = list(dict.fromkeys((*(trial or ()), *typed)))
    compared, problem = [], None
    if FEWEST <= len(asked) <= MOST_TRIALS:
        compared = [TrialFacts.of(store, trial_id) for trial_id in asked]
    elif asked:
        were = "trial was" if len(asked) == 1 else "trials were"
        problem = f"{len(asked)} {were} named; a comparison has {FEWEST} to {MOST_TRIALS}."
    whole = max((sum(max(p.size, 0.0) for p in facts.parts) for facts in compared), default=0.0)
    top = max((facts.most_bytes for facts in compared), default=0)
    return render(
        request,
        "compare.html",
        asked=asked,
        problem=problem,
        status=HTTPStatus.UNPROCESSABLE_ENTITY if problem else HTTPStatus.OK,
        trials=compared,
        knobs=_knobs([facts.trial.layout for facts in compared]),
        figures=_figures(compared),
        bars=[
            (facts, stacked(facts.parts, whole=whole), keys(facts.parts))
            for facts in compared
            if facts.parts
        ],
        memories=[(facts, drawn) for facts in compared if (drawn := facts.memory(top_bytes=top))],
    )


@router.get("/compare-campaigns")
def show_campaign_comparison(
    request: Request,
    store: StoreDep,
    campaign: Annotated[list[CampaignName] | None, Query()] = None,
) -> HTMLResponse:
    """Campaigns side by side, and their winners relative to that of the first.

    Raises:
        ComparisonInvalidError: these are less than two campaigns, or more than `MOST_CAMPAIGNS`.
        CampaignNotFoundError: one of them does not exist.
    """
    names = list(dict.fromkeys(campaign or ()))
    if not FEWEST <= len(names) <= MOST_CAMPAIGNS:
        raise ComparisonInvalidError(
            f"{counted(len(names), 'campaign')} cannot be compared: tick {FEWEST} to "
            f"{MOST_CAMPAIGNS} campaigns in the list"
        )
    found = [finding_of(store, campaign_named(campaign_reference(name), store)) for name in names]
    return render(
        request,
        "compare_campaigns.html",
        campaigns=[each.campaign for each in found],
        rows=_properties(store, found),
        knobs=_knobs([each.winner.trial.layout if each.winner else None for each in found]),
        winners=[_compared(found[0], other) for other in found[1:]],
    )


def _knobs(layouts: Sequence[Layout | None]) -> list[Row]:
    """Every knob that is not at its default in all of them; None: there is no layout."""
    known = [layout for layout in layouts if layout is not None]
    rows = [
        Row(knob.label, ["-" if each is None else knob_text(each, knob.name) for each in layouts])
        for knob in KNOBS.values()
        if knob.is_shown
        and (knob.heading or any(getattr(each, knob.name) != knob.default for each in known))
    ]
    batches = ["-" if each is None else str(each.global_batch_size) for each in layouts]
    return [*rows, Row("global batch", batches)]


def _figures(trials: list[TrialFacts]) -> list[Row]:
    """What they measured, and what they are."""
    told = [dict(facts.figures) for facts in trials]
    names = dict.fromkeys(name for each in told for name in each if name not in _OWN)
    ranks = ["-" if facts.ranked is None else str(facts.ranked.rank) for facts in trials]
    return [
        Row("campaign", [facts.campaign.name for facts in trials]),
        Row("state", [state_words(facts.trial.state, facts.trial.reason) for facts in trials]),
        Row("rank", ranks),
        *(Row(name, [each.get(name, "-") for each in told]) for name in names),
    ]


def _properties(store: Store, found: list[CampaignFinding]) -> list[Row]:
    """What the campaigns are, and what they have found."""
    campaigns = [each.campaign for each in found]
    counts = store.campaigns.count_trials_of([campaign.id for campaign in campaigns])
    failed = [counts[each.id]["FAILED"] + counts[each.id]["INFEASIBLE"] for each in campaigns]
    return [
        Row("state", [state_words(each.state, each.reason) for each in campaigns]),
        Row("model", [each.model_name for each in campaigns]),
        Row("cluster", [each.cluster_name for each in campaigns]),
        Row("nodes of the cluster", [str(each.spec["cluster"]["num_nodes"]) for each in campaigns]),
        Row("objective", [", ".join(map(unit, each.objectives)) for each in campaigns]),
        Row("strategy", [each.strategy for each in campaigns]),
        Row("budget", [budget_words(each.spec.get("budget", {})) for each in campaigns]),
        Row("legal layouts", [f"{each.num_legal_layouts:,}" for each in campaigns]),
        Row("completed probes", [f"{counts[each.id]['COMPLETED']:,}" for each in campaigns]),
        Row("probes without a result", [f"{number:,}" for number in failed]),
        Row("node-hours", [figure(each.node_seconds / 3600) for each in campaigns]),
        Row("best value", [_best(each) for each in found]),
        Row(
            "layouts that tie with it",
            [str(len(each.tied)) if each.winner else "-" for each in found],
        ),
    ]


def _best(finding: CampaignFinding) -> str:
    objective, winner = finding.campaign.objective, finding.winner
    if winner is None:
        return "none yet"
    value = f"{objective_figure(objective, winner.value)} {unit(objective)}"
    return f"{value}, {bounds(objective, winner)}"


def _compared(first: CampaignFinding, other: CampaignFinding) -> ComparedWinner:
    one, two, name = first.campaign, other.campaign, other.campaign.name
    if first.winner is None or other.winner is None:
        missing = (one if first.winner is None else two).name
        return ComparedWinner(
            campaign=name, why_not=f"{missing} has measured no layout to the end."
        )
    if one.objective != two.objective:
        ranks = f"{name} ranks by {unit(two.objective)}, and {one.name} by {unit(one.objective)}."
        return ComparedWinner(campaign=name, why_not=ranks)
    if one.spec["model"] != two.spec["model"]:
        trains = f"{name} trains {two.model_name}, and {one.name} {one.model_name}."
        return ComparedWinner(campaign=name, why_not=trains)
    return ComparedWinner(
        campaign=name,
        ratio=other.winner.value / first.winner.value,
        interval=ratio_interval(other.winner, first.winner),
    )
