"""`layout-tuner model` and `layout-tuner cluster`: list, show, put, delete."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from layout_tuner.api.formatting import memory
from layout_tuner.api.schemas.model_and_cluster_documents import (
    CatalogueEntry,
    ClusterPage,
    ClusterRead,
    ModelPage,
    ModelRead,
)
from layout_tuner.cli.options.command_options import json_option
from layout_tuner.cli.options.prediction_options import FILE
from layout_tuner.cli.options.shared_options import seq_length_option
from layout_tuner.cli.service.service_connection import (
    answers,
    print_json,
    service_options,
    service_when_called,
    without_service,
)
from layout_tuner.documents.json_and_yaml import read_file, write_yaml
from layout_tuner.documents.reading import read_mapping
from layout_tuner.errors import ClusterInvalidError, ModelShapeInvalidError
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.clusters.cluster_presets import is_cluster_preset
from layout_tuner.search_spaces.clusters.site import cluster_part
from layout_tuner.search_spaces.models.model_files import model_of_file
from layout_tuner.search_spaces.models.model_presets import MODEL_PRESETS
from layout_tuner.terminal.text_table import print_table

if TYPE_CHECKING:
    from layout_tuner.client.clients import Client


_MODEL_COLUMNS: Final = {
    "family": "family",
    ">layers": "num_layers",
    ">hidden": "hidden_size",
    ">heads": "num_heads",
    ">sequence": "seq_length",
}
_CLUSTER_COLUMNS: Final = {
    "device": "device",
    ">nodes": "num_nodes",
    ">devices a node": "devices_per_node",
}
"""Columns of lists, each with its field of the description."""


@click.command("list")
@answers(
    lambda page: _print_list(
        page.models, _MODEL_COLUMNS, ">parameters with MTP", lambda each: f"{each.num_parameters:,}"
    )
)
@service_when_called
def list_models(service: Callable[[], Client]) -> ModelPage:
    """List presets, then the models of users; without a service the presets alone.

    Parameters count multi-token prediction (MTP), which published totals leave out.
    """
    return without_service(lambda: service().models(), ModelPage.of_presets)


@click.command("list")
@answers(
    lambda page: _print_list(
        page.clusters,
        _CLUSTER_COLUMNS,
        ">memory a device",
        lambda each: memory(each.description["device_memory_bytes"]),
        levels=lambda each: Cluster.from_mapping(each.description).levels_in_words or "-",
    )
)
@service_when_called
def list_clusters(service: Callable[[], Client]) -> ClusterPage:
    """List presets, then the clusters of users; without a service the presets alone."""
    return without_service(lambda: service().clusters(), ClusterPage.of_presets)


def _print_list(
    entries: Iterable[Any],
    columns: dict[str, str],
    last: str,
    last_of: Callable[[Any], str],
    **more: Callable[[Any], str],
) -> None:
    rows = [
        (
            each.name,
            "preset" if each.preset else str(each.created_by),
            *(str(each.description[field]) for field in columns.values()),
            last_of(each),
            *(text_of(each) for text_of in more.values()),
        )
        for each in entries
    ]
    print_table(("name", "by", *columns, last, *more), rows)


def _print_yaml(entry: CatalogueEntry) -> None:
    # A list of kinds of layers, of which there may be many, stands in few lines.
    flow = {"default_flow_style": None} if "layer_kinds" in entry.description else {}
    click.echo(write_yaml(entry.description, **flow), nl=False)


@click.command("show")
@click.argument("name")
@answers(_print_yaml)
@service_when_called
def show_model(name: str, service: Callable[[], Client]) -> ModelRead:
    """Print a model's shape as YAML, as campaign files write it."""
    if name not in MODEL_PRESETS:
        return service().model(name)
    return without_service(lambda: service().model(name), lambda: ModelRead.of_preset(name))


@click.command("show")
@click.argument("name")
@answers(_print_yaml)
@service_when_called
def show_cluster(name: str, service: Callable[[], Client]) -> ClusterRead:
    """Print a cluster as YAML, as campaign files write it and `worker --cluster FILE` reads it."""
    if not is_cluster_preset(name):
        return service().cluster(name)
    return without_service(lambda: service().cluster(name), lambda: ClusterRead.of_preset(name))


def _print_stored(made: ModelRead) -> None:
    click.echo(f"model {made.name} is stored; campaign files can name it")
    if lacks := made.description.get("lacks"):
        click.echo(f"note: its shape lacks {lacks}", err=True)


@click.command("put")
@click.argument("words", nargs=-1, required=True, metavar="[NAME] FILE")
@seq_length_option
@answers(_print_stored)
@service_when_called
def put_model(
    words: tuple[str, ...],
    seq_length: int | None,
    service: Callable[[], Client],
) -> ModelRead:
    """Store the model in FILE (YAML or JSON) under NAME: a shape, or {preset: ..., field: ...}.

    FILE may be the config.json of Hugging Face, with --seq-length. Without NAME it is that in the
    file, else of its folder.
    """
    *names, file = words
    if len(names) > 1:
        raise click.UsageError(f"two names, {names[0]!r} and {names[1]!r}: give [NAME] FILE")
    name = names[0] if names else None
    described = model_of_file(Path(file), seq_length=seq_length, name=name)
    document = read_mapping(described, ModelShapeInvalidError, "the model")
    name = name or str(document.get("name") or "")
    if not name:
        raise click.UsageError(f"{file} states no name: give [NAME] FILE")
    return service().put_model(name, document)


@click.command("put")
@click.argument("name")
@click.argument("file", type=FILE)
@json_option
@service_when_called
def put_cluster(name: str, file: Path, as_json: bool, service: Callable[[], Client]) -> None:
    """Store the cluster in FILE (YAML or JSON) under NAME: fields, or {preset: ..., field: ...}.

    A section `site` is checked and stays on this machine: it is for `allocation submit`.
    """
    document = read_mapping(read_file(file), ClusterInvalidError, "the cluster")
    described = cluster_part(document)
    made = service().put_cluster(name, described)
    if as_json:
        print_json(made)
    else:
        click.echo(f"cluster {name} is stored; campaign files can name it")
    if "site" in document:
        click.echo(
            f"note: the section site of {file} is not sent to the service; `layout-tuner allocation "
            f"submit --cluster {file}` uses it",
            err=True,
        )
    if made.warning and not as_json:
        click.echo(f"warning: {made.warning}", err=True)


@click.command("delete")
@click.argument("name")
@service_options
def delete_model(name: str, client: Client) -> None:
    """Delete a model that is not a preset; campaigns stay as they are."""
    client.delete_model(name)
    click.echo(f"model {name} deleted")


@click.command("delete")
@click.argument("name")
@service_options
def delete_cluster(name: str, client: Client) -> None:
    """Delete a cluster that is not a preset; campaigns stay as they are."""
    client.delete_cluster(name)
    click.echo(f"cluster {name} deleted")
