"""The command `layout-tuner driver`."""

from __future__ import annotations

import os
from pathlib import Path

import click

from layout_tuner.cli.options.database_options import database_place_options
from layout_tuner.cli.options.open_limits_options import open_limits_options
from layout_tuner.cli.options.refusals import refusals
from layout_tuner.process_resources import use_one_blas_thread
from layout_tuner.protocol.connection.data_home import PRIVATE_UMASK
from layout_tuner.tuner.driver.open_limits import OpenLimits


@click.command()
@database_place_options
@open_limits_options
def driver(data_dir: Path | None, database: str | None, limits: OpenLimits) -> None:
    """Drive the campaigns: propose layouts, learn from outcomes.

    Runs until it is stopped (SIGTERM, SIGINT). It may be killed and started at any moment. Of
    several on one database one is active; the others stand by and take over within seconds.
    """
    use_one_blas_thread()
    # Imported here, so that `layout-tuner --help` starts fast.
    from layout_tuner.tuner.driver.process import drive

    os.umask(PRIVATE_UMASK)
    with refusals():
        drive(data_dir, database, limits)
