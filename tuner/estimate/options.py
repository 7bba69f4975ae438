"""Options that the commands `estimate` and `plan` share."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click

from search_spaces.connection.data_home import DATA_DIR_VARIABLE

software_option: Final = click.option(
    "--software",
    default="",
    help="What would run it, as a table's source says it; by default this project's trainer.",
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
