"""`layout-tuner calibrate`: measures this machine's constants and saves them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from layout_tuner.cli.live_output import WorkLine, work_line
from layout_tuner.cli.options.command_input import described_machine
from layout_tuner.cli.options.command_options import data_dir_option
from layout_tuner.cli.options.refusals import fail, refusals
from layout_tuner.cli.options.shared_options import (
    PositiveNumber,
    cluster_option,
    seq_length_option,
)
from layout_tuner.protocol.connection.data_home import default_data_dir

if TYPE_CHECKING:
    from layout_tuner.search_spaces.clusters.calibration_file import MeasuredConstants

_LONGEST_S: Final = 3600.0
_UNITS: Final = {
    "peak_flops_per_s": (1e9, "GFLOP/s"),
    "memory_bandwidth_bytes_per_s": (1e9, "GB/s"),
    "intra_node_bandwidth_bytes_per_s": (1e9, "GB/s"),
    "intra_node_latency_s": (1e-6, "us"),
    "host_operation_s": (1e-6, "us"),
}


@click.command()
@cluster_option
@data_dir_option("Where to save the constants.")
@click.option(
    "--seconds",
    type=PositiveNumber(_LONGEST_S),
    default=40.0,
    show_default=True,
    help="How long to measure, about, without the start.",
)
@click.option(
    "--model",
    "models",
    multiple=True,
    metavar="NAME_OR_FILE",
    help="Also time the matrix products of this model in each layout of memory, for probes and "
    "training jobs on this machine; may be repeated.",
)
@seq_length_option
@click.option("--show", is_flag=True, help="Measure nothing; print the saved constants.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, timings included.")
def calibrate(
    cluster: str,
    data_dir: Path | None,
    seconds: float,
    models: tuple[str, ...],
    seq_length: int | None,
    show: bool,
    as_json: bool,
) -> None:
    """Measure this machine's constants for the estimates, and save them in the data directory.

    Matrix products, memory, collectives and transfers, on all devices of this node at once. From
    then on campaigns and estimates on a cluster of this name start from them instead of a preset's
    guesses; what a campaign's own file states about its cluster still counts.
    """
    from layout_tuner.errors import MeasuredConstantsInvalidError
    from layout_tuner.search_spaces.clusters.calibration_file import (
        read_constants,
        refuse_unwritable,
        write_constants,
    )
    from layout_tuner.search_spaces.models.model_files import described_model
    from layout_tuner.search_spaces.models.model_presets import resolve_model
    from layout_tuner.workers.calibrate.calibration import calibrate as measure
    from layout_tuner.workers.calibrate.calibration import with_products_of
    from layout_tuner.workers.errors import WorkerError

    directory = data_dir or default_data_dir()
    described = described_machine(cluster)
    with refusals():
        described_models = [described_model(each, seq_length=seq_length) for each in models]
        shapes = [resolve_model(each) for each in described_models]
    try:
        if show:
            measured = read_constants(directory, described.name)
            if measured is None:
                fail(
                    f"no calibration of {described.name} is saved in {directory}; run without --show"
                )
        else:
            refuse_unwritable(directory)
            with work_line(sys.stderr) as live:
                measured = measure(
                    described, seconds=seconds, models=shapes, on_event=partial(_progress, live)
                )
            if not shapes:
                with suppress(MeasuredConstantsInvalidError):  # it is about to be replaced
                    measured = with_products_of(read_constants(directory, described.name), measured)
            click.echo(f"saved in {write_constants(directory, measured)}", err=True)
    except (MeasuredConstantsInvalidError, WorkerError) as error:
        fail(str(error))
    if as_json:
        click.echo(json.dumps(measured.to_mapping()))
        return
    for line in _lines(measured):
        click.echo(line)
    for warning in measured.warnings:
        click.echo(f"warning: {warning}", err=True)


def _progress(line: WorkLine, event: dict[str, Any]) -> None:
    if event.get("event") == "timed":
        line.say(f"{event['done']} of {event['of']} timings")


def _lines(measured: MeasuredConstants) -> Iterator[str]:
    """The constants and the fits, as text."""
    from layout_tuner.workers.trainer.product_layouts import LAYOUTS, fastest_layouts, products_in

    yield f"{measured.cluster}: {measured.source} ({measured.num_devices} devices at once)"
    for name, value in measured.constants.items():
        scale, unit = _UNITS[name]
        table = value if isinstance(value, dict) else {"": value}
        figures = ", ".join(
            f"{key}{': ' if key else ''}{v / scale:.4g}" for key, v in table.items()
        )
        yield f"  {name.rsplit('_bytes_per_s', 1)[0]:<28} {figures} {unit}"
    for fit in measured.fits:
        yield (
            f"  {fit['operation']:<15} over {fit['ranks']} ranks  {fit['latency_s'] * 1e6:9.1f} us a "
            f"step, {fit['bytes_per_s'] / 1e9:.4g} GB/s, fitted within {fit['error']:.0%}"
        )
    if timed := products_in(measured.timings):
        faster = fastest_layouts(timed)
        yield f"  {len(timed) // len(LAYOUTS)} matrix products; {len(faster)} in another layout:"
        for (kind, precision, *shape), layout in faster.items():
            yield f"    {kind} {'x'.join(map(str, shape))} {precision}: {layout}"
    yield f"  repeats differ by {measured.noise:.0%} (quartile to quartile)"
