"""A campaign's answer in sentences: the winner, its interval, layouts as good as it, its gain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple, Self

from api.service.formatting import layout_extras, memory, objective_figure, unit, zero
from results_db.leaderboard.ranked_layout import RankedLayout
from results_db.records import CampaignRecord
from results_db.store import Store
from search_spaces.spec.layout import KNOBS, Layout


class Phrase(NamedTuple):
    """A part of a sentence; templates show it with the macro `phrases`."""

    words: str
    is_strong: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a campaign has found so far."""

    campaign: CampaignRecord
    best: Sequence[RankedLayout]
    """The first layouts of the leaderboard; ties are looked for among them."""
    num_ranked: int
    """Layouts on the leaderboard."""
    num_shortened: int
    """Ranked layouts that were stopped early; their values are estimates."""
    median_value: float | None
    """The median value of all ranked layouts, including those that were stopped early: those are
    slow, and without them the median would be that of the better layouts."""

    @classmethod
    def of(cls, store: Store, campaign: CampaignRecord, *, looked_at: int) -> Self:
        """Reads the answer; ties are looked for among the first `looked_at` layouts."""
        values = store.ranked_values(campaign.id)
        return cls(
            campaign=campaign,
            best=store.ranked_layouts(campaign.id, campaign.objective, limit=looked_at),
            num_ranked=len(values),
            num_shortened=sum(shortened for _value, shortened in values),
            median_value=median(value for value, _ in values) if values else None,
        )

    @property
    def winner(self) -> RankedLayout | None:
        """The best layout; None if it was stopped early."""
        first = self.best[0] if self.best else None
        return None if first is None or first.shortened else first

    @property
    def tied(self) -> list[RankedLayout]:
        """Layouts that are statistically tied with the winner, among the first."""
        return [ranked for ranked in self.best[1:] if ranked.is_tied]

    @property
    def device_memory_bytes(self) -> int | None:
        """Memory of a device of the cluster."""
        found: int | None = self.campaign.spec["cluster"].get("device_memory_bytes")
        return found


def lead(answer: Answer) -> Iterator[Phrase]:
    """The answer in a paragraph: the winner, its interval and ties, its gain over the median."""
    campaign, winner = answer.campaign, answer.winner
    if campaign.ended_at is None:
        yield Phrase(f"The campaign is {campaign.state}: what follows may change. ")
    if winner is None:
        yield Phrase(f"No layout has been measured to the end. {campaign.message}")
        return
    best = objective_figure(campaign.objective, winner.value)
    yield Phrase("The best of ")
    yield Phrase(f"{answer.num_ranked:,} measured layouts", is_strong=True)
    yield Phrase(" runs at ")
    yield Phrase(f"{best} {unit(campaign.objective)}", is_strong=True)
    yield Phrase(f", {interval_words(campaign.objective, winner)}: ")
    yield Phrase(layout_words(winner.trial.layout), is_strong=True)
    yield Phrase(". ")
    yield Phrase(tie_words(answer))
    yield Phrase(median_words(answer))


def tie_words(answer: Answer) -> str:
    """A sentence on the layouts that are as good as the winner; empty: too little is known."""
    tied = len(answer.tied)
    if tied:
        return (
            f"{tied} other{'s' if tied > 1 else ''} cannot be told apart from it with 95 % "
            "confidence; they are named below. "
        )
    if answer.winner is not None and answer.num_ranked > 1 and answer.winner.low is not None:
        return "All others are slower with 95 % confidence. "
    return ""


def median_words(answer: Answer) -> str:
    """A sentence on the winner's gain over the median; empty: fewer than three are ranked."""
    winner, middle = answer.winner, answer.median_value
    if winner is None or not middle or answer.num_ranked < 3:
        return ""
    told = (
        f"That is {winner.value / middle:.2f} times what the median layout reached, of all "
        f"{answer.num_ranked:,} that are ranked"
    )
    if short_ones := answer.num_shortened:
        told += (
            f"; {short_ones:,} of them {'was' if short_ones == 1 else 'were'} stopped early, with "
            "a step time estimated from the steps that ran"
        )
    return f"{told}."


def layout_words(layout: Layout) -> str:
    """A layout in one line: knobs with a column in tables, then others not at their default."""
    words = [
        f"{knob.word} {zero(layout)}"
        if knob.name == "zero_stage"
        else knob.words(getattr(layout, knob.name))
        for knob in KNOBS.values()
        if knob.heading and knob.name != "precision"
    ]
    return ", ".join(filter(None, (*words, layout_extras(layout), layout.precision)))


def interval_words(objective: str, ranked: RankedLayout) -> str:
    """The 95 % interval of a layout's value."""
    if ranked.low is None or ranked.high is None:
        return "no interval: one iteration was timed"
    return (
        f"{objective_figure(objective, ranked.low)} to "
        f"{objective_figure(objective, ranked.high)} (95 %)"
    )


def peak_words(peak_bytes: int | None, device_memory_bytes: int | None) -> str:
    """The largest peak memory of a device, and the free share."""
    if peak_bytes is None or not device_memory_bytes:
        return memory(peak_bytes)
    free = 1 - peak_bytes / device_memory_bytes
    return f"{memory(peak_bytes)} of {memory(device_memory_bytes)}, {free:.0%} free"
