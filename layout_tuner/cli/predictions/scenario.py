"""`layout-tuner scenario`: a fixed simulation as a measurement table, or one step as a trace."""

from __future__ import annotations

import json
from pathlib import Path

import click

from layout_tuner.cli.options.refusals import refuse, writing


@click.command()
@click.argument("name", metavar="SCENARIO", required=False)
@click.option(
    "--seed",
    default=0,
    show_default=True,
    type=click.IntRange(min=0, max=(1 << 31) - 1),
    help="Of the machine and its noise: another seed is another machine.",
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write the table to, or the trace.  [default: standard output]",
)
@click.option(
    "--trace",
    metavar="KEY",
    help="In place of the table, a step of the layout of this key as a trace for Perfetto "
    "(https://ui.perfetto.dev): the passes of each pipeline stage and the transfers to it.",
)
def scenario(name: str | None, seed: int, out: Path | None, trace: str | None) -> None:
    """Measure every layout of SCENARIO on a simulated cluster: something to try a search on.

    The table is read by `layout-tuner replay`; the source of its rows says "simulated". Without a
    SCENARIO the known ones are listed.
    """
    # Imported here, so that `layout-tuner --help` starts fast.
    from layout_tuner.errors import LayoutInvalidError
    from layout_tuner.search_spaces.tables import write_table
    from layout_tuner.workers.errors import WorkerError
    from layout_tuner.workers.simulation.scenarios import (
        SCENARIOS,
        simulated_table,
        simulated_trace,
    )

    if name is None:
        for known, scene in SCENARIOS.items():
            click.echo(f"{known:<14} {scene.about}")
        return
    try:
        if trace is not None:
            _write(json.dumps(simulated_trace(name, seed, trace)), out)
            return
        table = simulated_table(name, seed)
    except (WorkerError, LayoutInvalidError) as error:
        refuse(str(error))
    _write(write_table(table), out)
    completed = sum(cell.num_completed for cell in table.cells)
    rows = len(table.rows)
    click.echo(f"{name}, seed {seed}: {rows} simulated layouts, {completed} completed", err=True)


def _write(text: str, out: Path | None) -> None:
    if out is None:
        click.echo(text, nl=False)
        return
    with writing(out):
        out.write_text(text)
