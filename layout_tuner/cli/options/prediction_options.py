"""Options that the commands `estimate` and `plan` share, and the cluster that these describe."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import click

from layout_tuner.cli.options.command_input import described_cluster
from layout_tuner.protocol.connection.data_home import DATA_DIR_VARIABLE, default_data_dir

software_option: Final = click.option(
    "--software",
    default="",
    help="What would run it: layout-tuner (this project's trainer, the default), nanotron or "
    "megatron-lm, or what a table's source says; any other software is taken to store what "
    "Megatron-LM does.",
)
calibrate_from_option: Final = click.option(
    "--calibrate-from",
    "calibrate_from",
    multiple=True,
    metavar="TABLE[:KEY=VALUE,...]",
    help="Measurements that calibrate the estimates, of some cells of a table; may be repeated.",
)
data_dir_option: Final = click.option(
    "--data-dir",
    type=click.Path(file_okay=False, path_type=Path),
    envvar=DATA_DIR_VARIABLE,
    help="Where `calibrate` keeps constants.  [default: ~/.local/share/layout-tuner]",
)


def measured_cluster(cluster: Any, data_dir: Path | None) -> Any:
    """The description of a cluster, with the constants that were measured on it, where any were.

    A text names a preset, a cluster of the service or a file.
    """
    from layout_tuner.search_spaces.clusters.calibration_file import with_measured_constants
    from layout_tuner.search_spaces.clusters.site import cluster_part

    directory = data_dir or default_data_dir()
    if isinstance(cluster, str):
        # The option's variable names no service: one that the environment names goes before it.
        service_dir = None if data_dir == default_data_dir() else data_dir
        cluster = cluster_part(described_cluster(cluster, data_dir=service_dir))
    return with_measured_constants(cluster, directory)
