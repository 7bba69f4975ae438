"""Trials side by side, and campaigns side by side, with what differs marked."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Final, NamedTuple

from fastapi import Query, Request
from fastapi.responses import HTMLResponse

from layout_tuner.api.dependencies import CampaignName, StoreDep, get_campaign
from layout_tuner.api.errors import ComparisonInvalidError
from layout_tuner.api.formatting import budget_words, node_time, objective_figure, state_words, unit
from layout_tuner.api.html.rendering import render
from layout_tuner.api.html.result_sentences import (
    CampaignFinding,
    bounds,
    finding_of,
    ratio_interval,
)
from layout_tuner.api.html.trial_facts import TrialFacts, job_text, knob_text
from layout_tuner.api.http.lazy_routes import LazyRouter
from layout_tuner.api.plots.bars import keys, stacked
from layout_tuner.api.schemas.text_types import id_in
from layout_tuner.predictions.belief.plan_parts.layout_comparison import LayoutComparison
from layout_tuner.protocol.worker_messages import TrialId
from layout_tuner.results_db.campaigns.imported_tables import IMPORTED
from layout_tuner.results_db.leaderboard.leaderboard_records import RankedLayout
from layout_tuner.results_db.records import CampaignRecord
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.layouts.layout import KNOBS, Layout
from layout_tuner.search_spaces.tables.table import software_of_source
from layout_tuner.terminal.plurals import counted
from layout_tuner.trainers.simulator import says_simulated

FEWEST: Final = 2
MOST_TRIALS: Final = 6
MOST_CAMPAIGNS: Final = 8
"""Trials and campaigns that are compared at once."""

_OWN: Final = ("trial", "measured")
"""Figures in which trials always differ."""
_WORDS: Final = ("95 % interval", "step time, 95 %", "runs", "trainer", "memory is", "cheap probe")
"""Figures whose difference is no percentage."""
_FIGURE: Final = re.compile(r"(-?[\d,]*\.?\d+(?:e[+-]\d+)?)( ?[^\s,]*)")
"""A number and its unit."""

router = LazyRouter()


class Row(NamedTuple):
    """A line of a comparison."""

    name: str
    values: Sequence[str]
    """One for each trial or campaign, in their order."""
    is_figure: bool = False
    """Whether a difference is given in percent: the values begin with numbers."""

    @property
    def difference(self) -> str:
        """The others relative to the first, or that they differ; empty: they do not differ."""
        if len(set(self.values)) == 1:
            return ""
        found = [_FIGURE.match(value) for value in self.values if self.is_figure]
        numbers = [float(each[1].replace(",", "")) for each in found if each]
        same_unit = len({each[2] for each in found if each}) == 1
        if len(numbers) < len(self.values) or not same_unit or not numbers[0]:
            return "differs"
        return ", ".join(f"{number / numbers[0] - 1:+.1%}" for number in numbers[1:])


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """A trial, or the winner of a campaign, over the first."""

    name: str
    first: str
    objective: str = ""
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
    trials: Annotated[str, Query(max_length=500)] = "",
) -> HTMLResponse:
    """Two to six trials side by side.

    Their ids are in several `trial`; `trials`, which the form sends, has their numbers.

    Raises:
        ComparisonInvalidError: a word of `trials` names no trial, or there are too few or too many.
        CampaignNotFoundError: it names a campaign that does not exist.
        TrialNotFoundError: a trial does not exist.
    """
    asked = list(dict.fromkeys((*(trial or ()), *_typed(store, trials))))
    _refuse_number(len(asked), "trial", MOST_TRIALS)
    compared = [TrialFacts.of(store, trial_id) for trial_id in asked]
    whole = max(sum(max(p.size, 0.0) for p in facts.parts) for facts in compared)
    top = max(facts.most_bytes for facts in compared)
    return render(
        request,
        "compare.html",
        asked=trials or " ".join(f"{each.campaign.name}/{each.trial.number}" for each in compared),
        trials=compared,
        verdicts=_verdicts(
            store,
            [
                (f"trial {e.trial.number} of {e.campaign.name}", e.campaign, e.ranked)
                for e in compared
            ],
        ),
        knobs=_knobs(
            [facts.trial.layout for facts in compared], [facts.campaign for facts in compared]
        ),
        figures=_figures(compared),
        bars=[
            (facts, stacked(facts.parts, whole=whole), keys(facts.parts))
            for facts in compared
            if facts.parts
        ],
        memories=[(facts, drawn) for facts in compared if (drawn := facts.memory(top_bytes=top))],
        difference=_difference(store, compared),
    )


def _difference(store: Store, trials: Sequence[TrialFacts]) -> LayoutComparison | None:
    """Two different layouts of one readable campaign, compared by prediction; else None."""
    campaign, layouts = trials[0].campaign, [facts.trial.stands_for for facts in trials]
    if len(trials) != FEWEST or layouts[0] == layouts[1] or campaign.stored.damage:
        return None
    if trials[1].campaign.id != campaign.id:
        return None
    source = store.imports.source(campaign.id) if campaign.strategy == IMPORTED else None
    software = None if source is None else software_of_source(source)
    return store.plans.compare(campaign, *layouts, software=software)


def _refuse_number(number: int, kind: str, most: int) -> None:
    if not FEWEST <= number <= most:
        raise ComparisonInvalidError(
            f"{counted(number, kind)} cannot be compared: tick {FEWEST} to {most} {kind}s in the list"
        )


def _typed(store: Store, words: str) -> Iterator[int]:
    """The ids of trials that are named as pages show them: `first/3 5` is 3 and 5 of "first"."""
    campaign = None
    for word in words.replace(",", " ").split():
        named, _, digits = word.rpartition("/")
        if named:
            campaign = get_campaign(named, store)
        number = id_in(digits)
        if campaign is None or not number:
            raise ComparisonInvalidError(
                f"{word!r} names no trial: write the campaign and the number, such as first/3 5"
            )
        yield store.trials.by_number(campaign.id, number).id


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
    _refuse_number(len(names), "campaign", MOST_CAMPAIGNS)
    found = [finding_of(store, get_campaign(name, store)) for name in names]
    return render(
        request,
        "compare_campaigns.html",
        campaigns=[each.campaign for each in found],
        rows=_properties(store, found),
        knobs=_knobs(
            [each.winner.trial.layout if each.winner else None for each in found],
            [each.campaign for each in found],
        ),
        verdicts=_verdicts(
            store, [(f"the winner of {e.campaign.name}", e.campaign, e.winner) for e in found]
        ),
    )


def _knobs(layouts: Sequence[Layout | None], campaigns: Sequence[CampaignRecord]) -> list[Row]:
    """Every knob that is not at its default in all of them; None: there is no layout.

    Job knobs are those that the campaigns search, or that the layouts set.
    """
    known = [layout for layout in layouts if layout is not None]
    rows = [
        Row(knob.label, ["-" if each is None else knob_text(each, knob.name) for each in layouts])
        for knob in KNOBS.values()
        if knob.is_shown
        and (knob.heading or any(getattr(each, knob.name) != knob.default for each in known))
    ]
    batches = ["-" if each is None else str(each.global_batch_size) for each in layouts]
    shown = [each.stored.shown_knobs for each in campaigns]
    names = dict.fromkeys(
        (*(name for each in shown for name in each), *(name for each in known for name in each.job))
    )
    pairs = list(zip(layouts, shown, strict=True))
    of_jobs = [
        Row(name, ["-" if each is None else job_text(each, name, knobs) for each, knobs in pairs])
        for name in names
    ]
    return [*rows, Row("global batch", batches), *of_jobs]


def _figures(trials: list[TrialFacts]) -> list[Row]:
    figures = [dict(facts.figures) for facts in trials]
    names = dict.fromkeys(name for each in figures for name in each if name not in _OWN)
    ranks = ["-" if facts.ranked is None else str(facts.ranked.rank) for facts in trials]
    return [
        Row("campaign", [facts.campaign.name for facts in trials]),
        Row("state", [state_words(facts.trial.state, facts.trial.reason) for facts in trials]),
        *_simulated([facts.campaign for facts in trials]),
        Row("rank", ranks),
        *(
            Row(name, [each.get(name, "-") for each in figures], is_figure=name not in _WORDS)
            for name in names
        ),
    ]


def _simulated(campaigns: Sequence[CampaignRecord]) -> Iterator[Row]:
    """Which of the campaigns are simulated, if one is."""
    if any(each.is_simulated for each in campaigns):
        kinds = [each.simulated.words if each.simulated else "measured" for each in campaigns]
        yield Row("simulated", kinds)


def _properties(store: Store, found: list[CampaignFinding]) -> list[Row]:
    campaigns = [each.campaign for each in found]
    counts = store.campaigns.count_trials_of([campaign.id for campaign in campaigns])
    failed = [counts[each.id]["FAILED"] + counts[each.id]["INFEASIBLE"] for each in campaigns]
    return [
        Row("state", [state_words(each.state, each.reason) for each in campaigns]),
        *_simulated(campaigns),
        Row("model", [each.model_title for each in campaigns]),
        Row("cluster", [each.cluster_name for each in campaigns]),
        Row(
            "nodes of the cluster",
            [
                str(each.stored.cluster.num_nodes) if each.stored.cluster else "-"
                for each in campaigns
            ],
        ),
        Row("objective", [", ".join(map(unit, each.objectives)) for each in campaigns]),
        Row("strategy", [each.strategy for each in campaigns]),
        Row("budget", [budget_words(each.stored.budget) for each in campaigns]),
        Row("legal layouts", [f"{each.num_legal_layouts:,}" for each in campaigns]),
        Row("completed probes", [f"{counts[each.id]['COMPLETED']:,}" for each in campaigns]),
        Row("probes without a result", [f"{number:,}" for number in failed]),
        Row("node-hours", [node_time(each.node_seconds) for each in campaigns], is_figure=True),
        Row("best value", [_best(each) for each in found], is_figure=True),
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
    return f"{value}, {bounds(winner)}{'; disturbed' if winner.disturbed else ''}"


_Named = tuple[str, CampaignRecord, RankedLayout | None]
"""What a layout is called, its campaign, and the layout as it is ranked there; None: it is not."""


def _verdicts(store: Store, named: Sequence[_Named]) -> list[Compared]:
    """Each but the first over the first."""
    return [_compared(store, named[0], other) for other in named[1:]]


def _simulator_of(store: Store, campaign: CampaignRecord) -> str:
    """The simulator of a campaign or an imported table, for a comparison; empty: measured."""
    if campaign.strategy == IMPORTED:
        source = store.imports.source(campaign.id) or ""
        return source if says_simulated(source) else ""
    return campaign.trainer if campaign.is_simulated else ""


def _compared(store: Store, first: _Named, other: _Named) -> Compared:
    (one, of_one, one_ranked), (two, of_two, two_ranked) = first, other
    if one_ranked is None or two_ranked is None:
        missing = one if one_ranked is None else two
        return Compared(name=two, first=one, why_not=f"{missing} has no measurement that is ranked")
    why_not = ""
    if of_one.objective != of_two.objective:
        why_not = f"they are ranked by {unit(of_two.objective)} and by {unit(of_one.objective)}"
    elif (by_one := _simulator_of(store, of_one)) != (by_two := _simulator_of(store, of_two)):
        why_not = f"one is {by_two or 'measured'}, the other {by_one or 'measured'}"
    elif (of_one.model_name, of_one.stored.model) != (of_two.model_name, of_two.stored.model):
        why_not = f"they train {of_two.model_title} and {of_one.model_title}"
    return Compared(
        name=two,
        first=one,
        why_not=why_not,
        objective=of_one.objective,
        ratio=two_ranked.value / one_ranked.value,
        interval=ratio_interval(two_ranked, one_ranked),
    )
