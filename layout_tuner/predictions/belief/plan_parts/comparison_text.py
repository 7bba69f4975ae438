"""Two layouts compared, as sentences and tables for the terminal and for pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from layout_tuner.predictions.belief.plan_parts.layout_comparison import (
    KnobChange,
    LayoutComparison,
    PartDifference,
)
from layout_tuner.search_spaces.layouts.layout import KNOBS
from layout_tuner.terminal.plurals import figure
from layout_tuner.units import GIB

_MOST_SOURCES: Final = 4
"""Sources of uncertainty that are named; the others are smaller."""

_PEAKS: Final = {
    "predicted peak": "peak_memory_median_bytes",
    "its 80 % interval from": "peak_memory_low_bytes",
    "to": "peak_memory_high_bytes",
}


class ComparisonTable(NamedTuple):
    """A table of a comparison, with headings as `table_lines` takes them."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def comparison_words(found: LayoutComparison) -> Iterator[str]:
    """The comparison in sentences without full stops; A is the first layout and B the second."""
    one, two = found.first, found.second
    yield f"A is {one.layout_key}, B is {two.layout_key}; all figures are predicted"
    yield f"from A to B: {change_words(found.changes)}"
    yield (
        f"B gives {ratio_words(found)} of A, if both fit. P(fits) is {one.fits:.2f} for A and "
        f"{two.fits:.2f} for B"
    )
    shares = (f"{each.part} {each.share:.0%}" for each in found.uncertain[:_MOST_SOURCES])
    yield f"the ratio is uncertain because of, by share of its variance: {', '.join(shares)}"
    if one.stall_risk or two.stall_risk:
        yield (
            "a pipeline across nodes may stall, which the ratio does not include: with probability "
            f"{one.stall_risk:.2f} for A and {two.stall_risk:.2f} for B"
        )


def comparison_tables(found: LayoutComparison) -> Iterator[ComparisonTable]:
    """The parts of the step in seconds, and of the fullest device's memory in GiB."""
    one, two = found.first, found.second
    total = PartDifference(part="step", first=one.step_time_s, second=two.step_time_s)
    yield _table("seconds of a step", (*found.step, total))
    peaks = (
        PartDifference(part=words, first=getattr(one, name), second=getattr(two, name))
        for words, name in _PEAKS.items()
    )
    memory = (*found.memory, *peaks)
    yield _table("GiB of the fullest device", memory, GIB)


def _table(title: str, parts: Sequence[PartDifference], unit: float = 1.0) -> ComparisonTable:
    rows = [
        (
            each.part,
            *(figure(value / unit) for value in (each.first, each.second)),
            _signed(each, unit),
        )
        for each in parts
    ]
    return ComparisonTable(title, ("part", ">A", ">B", ">B - A"), rows)


def _signed(each: PartDifference, unit: float) -> str:
    difference = (each.second - each.first) / unit
    return f"{'+' if difference > 0 else ''}{figure(difference, 3)}"


def change_words(changes: Sequence[KnobChange]) -> str:
    """What to change in a layout: `tp 8 -> 4, sp off -> on`."""
    return ", ".join(
        f"{KNOBS[each.knob].word if each.knob in KNOBS else each.knob} {_value(each.first)} -> {_value(each.second)}"
        for each in changes
    )


def ratio_words(found: LayoutComparison) -> str:
    """The ratio of the objective with its interval, for a sentence that goes on with "of"."""
    return (
        f"{found.ratio:.3g} times (95 %: {found.ratio_low:.3g} to {found.ratio_high:.3g}; better "
        f"with a chance of {chance_words(found.second_is_better)}) the {found.objective}"
    )


def chance_words(chance: float) -> str:
    """A probability in percent; none is said to be certain."""
    return (
        "over 99 %" if chance > 0.99 else "under 1 %" if chance < 0.01 else f"{chance * 100:.0f} %"
    )


def _value(value: Any) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
