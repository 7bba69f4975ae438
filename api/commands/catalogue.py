"""`layout-tuner model` and `layout-tuner cluster`: list, show, put, delete."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import click
import yaml

from api.campaign_schemas import CatalogueEntry
from api.client import Client
from api.commands.campaign import read_document_file
from api.commands.connection import json_option, print_json, service_options
from api.commands.display import print_table
from api.figures import memory

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
    """List presets, then one's own."""
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
    """Keep the model in FILE (YAML or JSON) under NAME: a shape, or {preset: ..., field: ...}."""
    _told(client.put_model(name, read_document_file(file, "the model")), "model", as_json)


@model.command("delete")
@click.argument("name")
@service_options
def delete_model(name: str, client: Client) -> None:
    """Delete a model of one's own; campaigns stay as they are."""
    client.delete_model(name)
    click.echo(f"model {name} deleted")


@cluster.command("list")
@json_option
@service_options
def list_clusters(as_json: bool, client: Client) -> None:
    """List presets, then one's own."""
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
    """Keep the cluster in FILE (YAML or JSON) under NAME: fields, or {preset: ..., field: ...}."""
    made = client.put_cluster(name, read_document_file(file, "the cluster"))
    _told(made, "cluster", as_json)
    if made.warning and not as_json:
        click.echo(f"warning: {made.warning}", err=True)


@cluster.command("delete")
@click.argument("name")
@service_options
def delete_cluster(name: str, client: Client) -> None:
    """Delete a cluster of one's own; campaigns stay as they are."""
    client.delete_cluster(name)
    click.echo(f"cluster {name} deleted")


def _by(entry: CatalogueEntry) -> str:
    return "preset" if entry.preset else str(entry.created_by)


def _show(entry: CatalogueEntry, as_json: bool) -> None:
    if as_json:
        print_json(entry)
        return
    text: Any = yaml.safe_dump(entry.description, sort_keys=False, allow_unicode=True)
    click.echo(text, nl=False)


def _told(entry: CatalogueEntry, kind: str, as_json: bool) -> None:
    if as_json:
        print_json(entry)
    else:
        click.echo(f"{kind} {entry.name} is kept; campaign files can name it")
