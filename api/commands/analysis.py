"""How an analysis looks in a terminal."""

from __future__ import annotations

import click

from api.commands.display import print_table
from api.schemas import AnalysisRead, KnobStepRead
from search_spaces.counting import counted

_STATES = {"out_of_memory": "out of memory", "failed": "fails"}


def print_analysis(analysis: AnalysisRead) -> None:
    """Prints the importances, then the steps around the winner."""
    if analysis.importances:
        rows = [(each.knob, f"{each.importance:.1%}") for each in analysis.importances]
        # A title would be cut to the width of a narrow table.
        click.echo(
            f"{analysis.campaign}: share of the variation of {analysis.objective} over "
            f"{counted(analysis.num_layouts, 'layout')}"
        )
        print_table(("knob", ">importance"), rows)
    else:
        click.echo(
            f"measured: {counted(analysis.num_layouts, 'layout')}, too few to tell which knob matters"
        )
    click.echo(f"one step from the winner, trial {analysis.winner} ({analysis.winner_layout})")
    columns = ("knob", ">from", ">to", ">effect", "source", "also changed")
    print_table(columns, [_row(step) for step in analysis.steps])


def _row(step: KnobStepRead) -> tuple[str, ...]:
    effect = _STATES.get(step.state, "") if step.effect is None else f"{step.effect:+.1%}"
    if step.is_apart is False:
        effect += " (tied)"
    also = ", ".join(step.also)
    return (step.knob, step.value, step.stepped_value, effect, step.source, also)
