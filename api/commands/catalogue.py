"""`layout-tuner model` and `layout-tuner cluster`: list, show, put, delete."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click

from api.client import Client
from api.commands.campaign import read_document_file
from api.commands.connection import service_options
from api.commands.display import json_option, print_json
from api.formatting import memory
from api.http.documents import write_yaml
from api.schemas.catalogue import CatalogueEntry
from search_spaces.errors import SiteInvalidError
from search_spaces.spec.site import cluster_part
from search_spaces.terminal.text_table import print_table

_FILE: Final = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.group()
def model() -> None:
    """List, show, put and delete models that campaign files name."""


@click.group()
def cluster() -> None:
    """List, show, put and delete clusters that campaign files name."""


@model.command("list")
@json_option
@service_options
def list_models(as_json: bool, client: Client) -> None:
    """List presets, then the models of users."""
    page = client.models()
    if as_json:
        print_json(page)
        return
    columns = ("name", "by", "family", ">layers", ">hidden", ">heads", ">sequence", ">parameters")
    rows = [
        (
            each.name,
            _by(each),
            str(each.description["family"]),
            str(each.description["num_layers"]),
            str(each.description["hidden_size"]),
            str(each.description["num_heads"]),
            str(each.description["seq_length"]),
            f"{each.num_parameters:,}",
        )
        for each in page.models
    ]
    print_table(columns, rows)


@model.command("show")
@click.argument("name")
@json_option
@service_options
def show_model(name: str, as_json: bool, client: Client) -> None:
    """Print a model's shape as YAML, as campaign files write it."""
    _show(client.model(name), as_json)


@model.command("put")
@click.argument("name")
@click.argument("file", type=_FILE)
@json_option
@service_options
def put_model(name: str, file: Path, as_json: bool, client: Client) -> None:
    """Store the model in FILE (YAML or JSON) under NAME: a shape, or {preset: ..., field: ...}."""
    _print_stored(client.put_model(name, read_document_file(file, "the model")), "model", as_json)


@model.command("delete")
@click.argument("name")
@service_options
def delete_model(name: str, client: Client) -> None:
    """Delete a model that is not a preset; campaigns stay as they are."""
    client.delete_model(name)
    click.echo(f"model {name} deleted")


@cluster.command("list")
@json_option
@service_options
def list_clusters(as_json: bool, client: Client) -> None:
    """List presets, then the clusters of users."""
    page = client.clusters()
    if as_json:
        print_json(page)
        return
    rows = [
        (
            each.name,
            _by(each),
            str(each.description["device"]),
            str(each.description["num_nodes"]),
            str(each.description["devices_per_node"]),
            memory(each.description["device_memory_bytes"]),
        )
        for each in page.clusters
    ]
    print_table(("name", "by", "device", ">nodes", ">devices a node", ">memory a device"), rows)


@cluster.command("show")
@click.argument("name")
@json_option
@service_options
def show_cluster(name: str, as_json: bool, client: Client) -> None:
    """Print a cluster as YAML, as campaign files write it and `worker --cluster FILE` reads it."""
    _show(client.cluster(name), as_json)


@cluster.command("put")
@click.argument("name")
@click.argument("file", type=_FILE)
@json_option
@service_options
def put_cluster(name: str, file: Path, as_json: bool, client: Client) -> None:
    """Store the cluster in FILE (YAML or JSON) under NAME: fields, or {preset: ..., field: ...}.

    A section `site` is checked and stays on this machine: it is for `allocation submit`.
    """
    document = read_document_file(file, "the cluster")
    try:
        described = cluster_part(document)
    except SiteInvalidError as error:
        raise click.UsageError(f"{file}: {error}") from error
    made = client.put_cluster(name, described)
    _print_stored(made, "cluster", as_json)
    if "site" in document:
        click.echo(
            f"note: the section site of {file} is not sent to the service; `layout-tuner allocation "
            f"submit --cluster {file}` uses it",
            err=True,
        )
    if made.warning and not as_json:
        click.echo(f"warning: {made.warning}", err=True)


@cluster.command("delete")
@click.argument("name")
@service_options
def delete_cluster(name: str, client: Client) -> None:
    """Delete a cluster that is not a preset; campaigns stay as they are."""
    client.delete_cluster(name)
    click.echo(f"cluster {name} deleted")


def _by(entry: CatalogueEntry) -> str:
    return "preset" if entry.preset else str(entry.created_by)


def _show(entry: CatalogueEntry, as_json: bool) -> None:
    if as_json:
        print_json(entry)
        return
    click.echo(write_yaml(entry.description), nl=False)


def _print_stored(entry: CatalogueEntry, kind: str, as_json: bool) -> None:
    if as_json:
        print_json(entry)
    else:
        click.echo(f"{kind} {entry.name} is stored; campaign files can name it")
