"""What a campaign has found, in sentences: for its page, its report, and comparisons.

A sentence is a sequence of phrases. A phrase that carries the result is strong.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from layout_tuner.api.formatting import (
    made_by,
    memory_of,
    objective_figure,
    other_knobs,
    unit,
    zero,
)
from layout_tuner.api.ranked_columns import COLUMNS
from layout_tuner.results_db.leaderboard.leaderboard_records import RankedLayout, RankedSummary
from layout_tuner.results_db.records import CampaignRecord
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.layouts.layout import KNOBS, Layout
from layout_tuner.terminal.plurals import capitalised, counted

TIES_LOOKED_AT: Final = 60
"""Layouts of the leaderboard that are checked for ties."""

REASONS: Final[Mapping[str, str]] = {
    "out_of_memory": "a device's memory was not enough; the layout cannot run there",
    "host_resource": "a host lacked something else than a device's memory; the message has the setting",
    "crashed": "a rank ended with an error",
    "timeout": "the probe did not end by its deadline",
    "diverged": "its losses were not finite, or are off those of the other layouts",
    "implausible": "its figures contradict each other, the layout or the device",
    "unsupported": "the trainer does not run such a layout",
    "node_lost": "its attempts were lost with their nodes or workers",
}
"""Why trials have no result, with the meaning of each reason."""

LOG_LINES: Final = 14
"""Last lines of a failed trial's log that are shown."""

Phrase = tuple[str, bool]
"""A part of a sentence, and whether it is strong."""


def end_of_log(text: str) -> str:
    """The lines of a failed trial's log that are shown."""
    return "\n".join(text.splitlines()[-LOG_LINES:])


@dataclass(frozen=True, kw_only=True, slots=True)
class CampaignFinding:
    """The result of a campaign."""

    campaign: CampaignRecord
    best: Sequence[RankedLayout]
    """The first layout of the leaderboard, and those that are statistically tied with it."""
    summary: RankedSummary

    @property
    def winner(self) -> RankedLayout | None:
        """The best layout; None if it was stopped early."""
        first = self.best[0] if self.best else None
        return None if first is None or first.shortened else first

    @property
    def tied(self) -> Sequence[RankedLayout]:
        """Layouts that are statistically tied with the winner, among the first."""
        return self.best[1:]


def finding_of(store: Store, campaign: CampaignRecord) -> CampaignFinding:
    return CampaignFinding(
        campaign=campaign,
        best=store.leaderboard.tied_layouts(campaign.id, campaign.objective, among=TIES_LOOKED_AT),
        summary=store.leaderboard.ranked_summary(campaign.id),
    )


def lead(finding: CampaignFinding) -> Iterator[Phrase]:
    """The winner with its interval, the layouts tied with it, and the gain over the median."""
    campaign, winner = finding.campaign, finding.winner
    if campaign.ended_at is None:
        yield f"The campaign is {campaign.state}: what follows may change. ", False
    if winner is None:
        yield f"No layout has been measured to the end. {campaign.message}", False
        return
    best = objective_figure(campaign.objective, winner.value)
    how = "simulated" if campaign.is_simulated else "measured"
    if finding.summary.num_ranked == 1:
        yield f"The only {how} layout", True
    else:
        yield "The best of ", False
        yield f"{finding.summary.num_ranked:,} {how} layouts", True
    yield " runs at ", False
    yield f"{best} {unit(campaign.objective)}", True
    yield f", {bounds(winner)}: ", False
    yield short_layout(winner.trial.layout), True
    yield ". ", False
    if tied := len(finding.tied):
        yield (
            (
                f"{tied} other{'s' if tied > 1 else ''} cannot be told apart from it with 95 % "
                "confidence; they are listed below. "
            ),
            False,
        )
    elif finding.summary.num_ranked > 1:
        yield "All others are slower with 95 % confidence. ", False
    if winner.disturbed:
        yield "Others took its devices while it was measured: it is disturbed. ", False
    yield gain_over_median(finding), False
    measured = winner.trial.measurement
    if measured is not None and (words := made_by(measured)):
        yield f" {capitalised(words)}.", False


def gain_over_median(finding: CampaignFinding) -> str:
    """The winner over the median of the layouts that were measured to the end.

    Layouts that were stopped early are slow, and their values are estimates. The median leaves them
    out, so the gain is rather too small than too large.
    """
    winner, summary = finding.winner, finding.summary
    middle = summary.median_complete
    num_complete = summary.num_ranked - summary.num_shortened
    if winner is None or not middle or num_complete < 3:
        return _stopped_early(summary)
    gain = (
        f"That is {winner.value / middle:.2f} times the median of the {num_complete:,} layouts that "
        "were measured to the end. "
    )
    return gain + _stopped_early(summary)


def _stopped_early(summary: RankedSummary) -> str:
    number = summary.num_shortened
    if not number:
        return ""
    were, they = ("was", "it was") if number == 1 else ("were", "they were")
    return (
        f"{counted(number, 'more layout')} {were} stopped early, since {they} slower than the best "
        "of the time."
    )


def short_layout(layout: Layout) -> str:
    """A layout in one line: knobs with a column in tables, then others not at their default."""
    words = [
        f"{knob.word} {zero(layout)}"
        if knob.name == "zero_stage"
        else knob.words(getattr(layout, knob.name))
        for knob in KNOBS.values()
        if knob.heading and knob.name != "precision"
    ]
    return ", ".join(filter(None, (*words, other_knobs(layout), layout.precision)))


def bounds(ranked: RankedLayout) -> str:
    """The 95 % interval of a layout's value."""
    return f"{COLUMNS['interval'].cell(ranked)} (95 %)"


def peak_words(ranked: RankedLayout, device_memory_bytes: int | None) -> str:
    measured = ranked.trial.measurement
    found = None if measured is None else measured.peak_memory_bytes
    return memory_of(found, device_memory_bytes)


def ratio_interval(one: RankedLayout, other: RankedLayout) -> tuple[float, float]:
    """Both ends of the 95 % interval of the ratio of two values of different campaigns.

    From the intervals of the logarithms, by the square root of the sum of their squared parts below
    and above (MOVER: Zou and Donner, Statistics in Medicine 27, 2008, equation 8). Differences
    between days and machines are not in it.
    """
    below, above = (
        math.hypot(math.log(a.value / a.value_low), math.log(b.value_high / b.value))
        for a, b in ((one, other), (other, one))
    )
    ratio = one.value / other.value
    return ratio * math.exp(-below), ratio * math.exp(above)
