"""The section on which knobs matter, and what one step in each does to the winner."""

from __future__ import annotations

from api.dashboard.drawings.bars import bar, swing
from api.report.facts import ReportFacts
from api.report.markup import Content, Markup, note, section, table, tag
from api.service.formatting import effect_words
from results_db.records import Analysis, KnobStepRead


def sensitivity(facts: ReportFacts) -> Markup:
    """The analysis that the driver made."""
    found = facts.analysis
    if found is None:
        return section(
            "Sensitivity",
            tag(
                "p",
                "There is no analysis: it is made while trials complete, and when a campaign ends.",
            ),
        )
    return section("Sensitivity", _importances(found), _steps(found))


def _importances(found: Analysis) -> Markup:
    if not found.importances:
        return note(
            f"{found.num_trials} layouts were measured: too few to tell which knob matters."
        )
    largest = max(found.importances.values()) or 1.0
    rows = [
        (knob, f"{share:.1%}", bar(share / largest)) for knob, share in found.importances.items()
    ]
    return tag(
        "div",
        tag("h3", "Which knobs matter"),
        note(
            f"Share of the variation of {found.objective} over {found.num_trials} layouts that each knob "
            f"accounts for by itself ({found.method})."
        ),
        table(("knob", ">share", ""), rows),
    )


def _steps(found: Analysis) -> Markup | None:
    if not found.steps:
        return None
    largest = max((abs(step.effect) for step in found.steps if step.effect is not None), default=0)
    columns = ("knob", ">from", ">to", ">effect", "", "source", "also changed", "layout")
    return tag(
        "div",
        tag("h3", "One step away from the winner"),
        note(
            "What happens to the objective when one knob takes the next value that legal layouts have, "
            "measured by the campaign, or predicted by the calibrated estimate."
        ),
        table(columns, [_row(step, largest) for step in found.steps]),
    )


def _row(step: KnobStepRead, largest: float) -> tuple[Content, ...]:
    return (
        step.knob,
        step.value,
        step.stepped_value,
        effect_words(step.effect, step.state, step.is_apart),
        None if step.effect is None else swing(step.effect, largest),
        step.source,
        ", ".join(step.also),
        tag("code", step.layout_key),
    )
