"""The command `layout-tuner simulate`: a simulated campaign as a measurement table."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("scenario", required=False)
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
    help="File to write the table to.  [default: standard output]",
)
def simulate(scenario: str | None, seed: int, out: Path | None) -> None:
    """Measure every layout of SCENARIO on a simulated cluster: something to try a search on.

    The table is read by `layout-tuner replay`; the source of its rows says "simulated". Without a
    SCENARIO the known ones are listed.
    """
    # Imported here, so that `layout-tuner --help` starts fast.
    from search_spaces.tables import write_table
    from workers.errors import WorkerError
    from workers.simulation.scenarios import SCENARIOS, simulated_table

    if scenario is None:
        for name, known in SCENARIOS.items():
            click.echo(f"{name:<14} {known.about}")
        return
    try:
        table = simulated_table(scenario, seed)
    except WorkerError as error:
        raise click.UsageError(str(error)) from error
    text = write_table(table)
    completed = sum(cell.num_completed for cell in table.cells)
    if out is None:
        click.echo(text, nl=False)
    else:
        try:
            out.write_text(text)
        except OSError as error:
            raise click.ClickException(f"{out} can't be written: {error.strerror}") from error
    rows = len(table.rows)
    click.echo(
        f"{scenario}, seed {seed}: {rows} simulated layouts, {completed} completed", err=True
    )
