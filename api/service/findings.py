"""What a campaign has found, in sentences: for its page, its report, and comparisons.

A sentence is a sequence of phrases. A phrase that carries the result is strong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from api.service.formatting import layout_extras, memory_of, objective_figure, unit, zero
from results_db.leaderboard.ranked_layout import RankedLayout
from results_db.records import CampaignRecord
from results_db.store import Store
from search_spaces.spec.layout import KNOBS, Layout

TIES_LOOKED_AT: Final = 60
"""Layouts of the leaderboard that are checked for ties."""

REASONS: Final[Mapping[str, str]] = {
    "out_of_memory": "a device's memory was not enough; the layout cannot run there",
    "crashed": "a rank ended with an error",
    "timeout": "the probe did not end by its deadline",
    "diverged": "its losses were not finite, or are off those of the other layouts",
    "implausible": "it measured more than the device can do",
    "unsupported": "the trainer does not run such a layout",
    "node_lost": "its attempts were lost with their nodes or workers",
}
"""Why trials have no result, with the meaning of each reason."""

Phrase = tuple[str, bool]
"""A part of a sentence, and whether it is strong."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankedSummary:
    """All layouts of a leaderboard in numbers."""

    num_ranked: int
    num_shortened: int
    """Ranked layouts that were stopped early; their values are estimates."""
    median_value: float | None
    """The median of all, including those that were stopped early: those are slow, and without them
    the median would be that of the better layouts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The result of a campaign."""

    campaign: CampaignRecord
    best: Sequence[RankedLayout]
    """The first layouts of the leaderboard."""
    summary: RankedSummary

    @property
    def winner(self) -> RankedLayout | None:
        """The best layout; None if it was stopped early."""
        first = self.best[0] if self.best else None
        return None if first is None or first.shortened else first

    @property
    def tied(self) -> list[RankedLayout]:
        """Layouts that are statistically tied with the winner, among the first."""
        return [ranked for ranked in self.best[1:] if ranked.is_tied]


def finding_of(store: Store, campaign: CampaignRecord) -> Finding:
    """Reads the result of a campaign."""
    values = store.ranked_values(campaign.id)
    return Finding(
        campaign=campaign,
        best=store.ranked_layouts(campaign.id, campaign.objective, limit=TIES_LOOKED_AT),
        summary=RankedSummary(
            num_ranked=len(values),
            num_shortened=sum(shortened for _value, shortened in values),
            median_value=median(value for value, _ in values) if values else None,
        ),
    )


def lead(finding: Finding) -> Iterator[Phrase]:
    """The answer in a paragraph: the winner, its interval and ties, its gain over the median."""
    campaign, winner = finding.campaign, finding.winner
    if campaign.ended_at is None:
        yield f"The campaign is {campaign.state}: what follows may change. ", False
    if winner is None:
        yield f"No layout has been measured to the end. {campaign.message}", False
        return
    best = objective_figure(campaign.objective, winner.value)
    yield "The best of ", False
    yield f"{finding.summary.num_ranked:,} measured layouts", True
    yield " runs at ", False
    yield f"{best} {unit(campaign.objective)}", True
    yield f", {bounds(campaign.objective, winner)}: ", False
    yield short_layout(winner.trial.layout), True
    yield ". ", False
    yield tie_words(finding), False
    yield gain_over_median(finding), False


def tie_words(finding: Finding) -> str:
    """A sentence on the layouts that are as good as the winner; empty: too little is known."""
    tied = len(finding.tied)
    if tied:
        return (
            f"{tied} other{'s' if tied > 1 else ''} cannot be told apart from it with 95 % "
            "confidence; they are named below. "
        )
    if (
        finding.winner is not None
        and finding.summary.num_ranked > 1
        and finding.winner.low is not None
    ):
        return "All others are slower with 95 % confidence. "
    return ""


def gain_over_median(finding: Finding) -> str:
    """A sentence on the winner's gain over the median; empty: fewer than three are ranked."""
    winner, middle = finding.winner, finding.summary.median_value
    if winner is None or not middle or finding.summary.num_ranked < 3:
        return ""
    told = (
        f"That is {winner.value / middle:.2f} times what the median layout reached, of all "
        f"{finding.summary.num_ranked:,} that are ranked"
    )
    if short_ones := finding.summary.num_shortened:
        told += (
            f"; {short_ones:,} of them {'was' if short_ones == 1 else 'were'} stopped early, with "
            "a step time estimated from the steps that ran"
        )
    return f"{told}."


def short_layout(layout: Layout) -> str:
    """A layout in one line: knobs with a column in tables, then others not at their default."""
    words = [
        f"{knob.word} {zero(layout)}"
        if knob.name == "zero_stage"
        else knob.words(getattr(layout, knob.name))
        for knob in KNOBS.values()
        if knob.heading and knob.name != "precision"
    ]
    return ", ".join(filter(None, (*words, layout_extras(layout), layout.precision)))


def bounds(objective: str, ranked: RankedLayout) -> str:
    """The 95 % interval of a layout's value."""
    if ranked.low is None or ranked.high is None:
        return "no interval: one iteration was timed"
    return (
        f"{objective_figure(objective, ranked.low)} to "
        f"{objective_figure(objective, ranked.high)} (95 %)"
    )


def peak_words(ranked: RankedLayout, device_memory_bytes: int | None) -> str:
    """The largest peak memory of a device, and the free share."""
    measured = ranked.trial.measurement
    peak_bytes = None if measured is None else measured.peak_memory_bytes
    return memory_of(peak_bytes, device_memory_bytes)
