"""The options that make a worker simulate its nodes, for the commands `worker` and `up` alike."""

from __future__ import annotations

from typing import Any, Final

import click

from layout_tuner.cli.options.command_options import passed_as, valued_options
from layout_tuner.cli.options.refusals import refuse
from layout_tuner.workers.simulation.simulation_settings import SimulationOptions

MOST_WORKERS: Final = 1000

_OPTIONS: Final[dict[str, tuple[type[int | float], float, str]]] = {
    "workers": (
        int,
        1,
        "With --simulate: workers of this process, each with --nodes nodes, on one simulated clock.",
    ),
    "time_scale": (
        float,
        0.0,
        "With --simulate: real seconds that a simulated second takes; 0 is as fast as possible.",
    ),
    "seed": (int, 0, "With --simulate: decides which nodes are slow, and which fail when."),
}
"""By option its kind, its default and its help."""


def _simulation(*, simulate: str | None, **given: Any) -> SimulationOptions | None:
    if simulate is None:
        for name, (_, default, _) in _OPTIONS.items():
            if given[name] != default:
                refuse(f"--{name.replace('_', '-')} is for simulated workers; add --simulate")
        return None
    if not 1 <= given["workers"] <= MOST_WORKERS:
        refuse(f"--workers={given['workers']} is not a number of workers from 1 to {MOST_WORKERS}")
    if not 0 <= given["time_scale"] <= 1e6:
        refuse(
            f"--time-scale={given['time_scale']:g} is not a number of real seconds from 0, for a "
            "simulated one"
        )
    if given["seed"] < 0:
        refuse(f"--seed={given['seed']} is under 0")
    return SimulationOptions(cluster=simulate, **given)


simulation_options: Final = passed_as(
    "simulation",
    _simulation,
    ("simulate", *_OPTIONS),
    click.option(
        "--simulate",
        metavar="CLUSTER",
        help="Simulate nodes of a cluster, such as frontier, in place of measuring: for trials of "
        "simulated campaigns, and of no others.",
    ),
    *valued_options(_OPTIONS),
)
"""Adds the options; passes on `simulation`, or None where nothing is to be simulated."""
