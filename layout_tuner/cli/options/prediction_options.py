"""Options of the commands that predict, and the campaigns and clusters that these describe."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import click

from layout_tuner.cli.options.command_options import data_dir_option
from layout_tuner.documents.json_and_yaml import read_file
from layout_tuner.documents.reading import read_mapping
from layout_tuner.errors import CampaignInvalidError, SpaceInvalidError
from layout_tuner.protocol.connection.data_home import default_data_dir
from layout_tuner.search_spaces.clusters.site import cluster_part

FILE: Final = click.Path(path_type=Path)
"""A file that our own readers open: all commands say the same of one that they cannot read."""

campaign_cluster_option: Final = click.option(
    "--cluster", help="A preset, a cluster of the service or a file, for the campaign's."
)
calibrate_from_option: Final = click.option(
    "--calibrate-from",
    "calibrate_from",
    multiple=True,
    metavar="TABLE[:KEY=VALUE,...]",
    help="Measurements that calibrate the estimates, of some cells of a table; may be repeated.",
)
cells_option: Final = click.option(
    "--cell",
    "cells",
    multiple=True,
    metavar="KEY=VALUE[,...]",
    help="Only the cells whose key has these values (num_devices=4|8 is either); may be repeated.",
)
knob_columns_option: Final = click.option(
    "--knob",
    "knob_columns",
    multiple=True,
    metavar="COLUMN[=KNOB][,...]",
    help="Columns that are job knobs, beside those called job.KNOB; may be repeated.",
)
knobs_file_option: Final = click.option(
    "--knobs",
    "knobs_file",
    type=FILE,
    help="Declarations of job knobs by name; for others the trainer's catalogue or the values say it.",
)
constants_dir_option: Final = data_dir_option("Where `calibrate` keeps constants.")


def declared_knobs(path: Path) -> dict[str, Any]:
    """The declarations of job knobs in a file; a SearchSpaceError where it holds no mapping."""
    return read_mapping(read_file(path), SpaceInvalidError, "the declarations of job knobs")


def campaign_document(path: Path, cluster: str | None, data_dir: Path | None) -> dict[str, Any]:
    """The campaign of a file, with the chosen cluster; a cluster of the service is written out.

    So is a model whose config.json it names.

    Raises:
        SearchSpaceError: the file holds no mapping, or the cluster is unknown.
    """
    from layout_tuner.search_spaces.models.model_files import with_model

    document = read_mapping(
        with_model(read_file(path), path.parent), CampaignInvalidError, "the campaign"
    )
    if named := cluster or document.get("cluster"):
        document["cluster"] = written_out(named, data_dir)
    return document


def written_out(cluster: Any, data_dir: Path | None) -> Any:
    """The description of a cluster whose name may be a preset's, the service's or a file's."""
    from layout_tuner.cli.options.command_input import described_cluster  # it imports trainers

    if not isinstance(cluster, str):
        return cluster
    # The option's variable names no service: one that the environment names goes before it.
    service_dir = None if data_dir == default_data_dir() else data_dir
    return cluster_part(described_cluster(cluster, data_dir=service_dir))
