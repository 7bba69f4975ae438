"""Input of commands: clusters by name, files of trainers.

The reader of documents imports YAML, so it is imported when a document is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import click

from layout_tuner.cli.options.refusals import refusals, refuse
from layout_tuner.documents.limits import text_problem
from layout_tuner.errors import SearchSpaceError
from layout_tuner.protocol.connection.bearer_token import token_in
from layout_tuner.protocol.connection.service_address import ServicePlace, locate_service
from layout_tuner.search_spaces.clusters.cluster_presets import is_cluster_preset, unknown_cluster
from layout_tuner.trainers.program import ProgramTrainer, read_trainers
from layout_tuner.workers.errors import WorkerError

if TYPE_CHECKING:
    from layout_tuner.search_spaces.clusters.cluster import Cluster
    from layout_tuner.workers.service.lease_client import ServiceHttp


def trainers_of(path: Path | None) -> dict[str, ProgramTrainer]:
    """The trainers of the file that --trainers names, by name; None: there are none.

    Ends the command with exit code 2 where the file is malformed.
    """
    if path is None:
        return {}
    from layout_tuner.documents.json_and_yaml import read_file

    with refusals():
        # The owner of a worker may write programs of several lines.
        document = read_file(path, text_rule=text_problem)
    try:
        return read_trainers(document, str(path.absolute().parent))
    except SearchSpaceError as error:
        refuse(f"{path}: {error}")


def described_cluster(
    name: str, *, place: ServicePlace | None = None, data_dir: Path | None = None
) -> Any:
    """The description of the cluster that `--cluster` names.

    A name, or a file's `preset`, that is no preset is looked up at the service and replaced by its
    description.

    Args:
        name: a preset's name, the name of a cluster of the service, or a JSON or YAML file.
        place: the service, where the command has one; None: that of the environment or of the data
            directory.
        data_dir: the data directory of that service; None: the environment's.

    Raises:
        ClusterInvalidError: the name is unknown; the message names the places that were searched.
    """
    from layout_tuner.documents.json_and_yaml import described

    document = described(name)
    is_mapping = isinstance(document, Mapping)
    named = document.get("preset") if is_mapping else document
    if not isinstance(named, str) or is_cluster_preset(named):
        return document
    own = _of_service(named, place, data_dir)
    if not is_mapping:
        return own
    changes = {field: value for field, value in document.items() if field != "preset"}
    if "device_memory_gb" in changes:
        own.pop("device_memory_bytes", None)
    return {**own, **changes}


def _of_service(name: str, place: ServicePlace | None, data_dir: Path | None) -> dict[str, Any]:
    from layout_tuner.workers.service.lease_client import NotFoundError, ServiceHttp

    try:
        place = place or locate_service(data_dir=data_dir)
        token = place.kept or token_in(place.token_file)
        http = ServiceHttp(place.url, token, certificate=place.certificate)
    except (SearchSpaceError, WorkerError, OSError) as error:
        raise unknown_cluster(name, searched=f"; no service was asked ({error})") from error
    with http:
        try:
            found = http.request("GET", f"/v1/clusters/{quote(name, safe='')}", None)
            own = http.read(found, lambda: dict(found["description"]))
        except NotFoundError as error:
            searched = f"; the service at {place.url} has no cluster of that name either"
            raise unknown_cluster(name, own=_names_of(http), searched=searched) from error
        except WorkerError as error:
            searched = f"; the service could not be asked ({error})"
            raise unknown_cluster(name, searched=searched) from error
    # A site has lines of shell that run on nodes: they come only from the user's own file.
    own.pop("site", None)
    return own


def _names_of(http: ServiceHttp) -> list[str]:
    """The names of the service's own clusters, as a hint; none where it does not list them."""
    try:
        listed = http.request("GET", "/v1/clusters", None)
        return http.read(
            listed, lambda: [str(each["name"]) for each in listed["clusters"] if not each["preset"]]
        )
    except WorkerError:
        return []


def described_machine(cluster: str) -> Cluster:
    """The cluster of a description; prints a warning where its numbers are guesses."""
    from layout_tuner.search_spaces.clusters.cluster_presets import resolve_cluster
    from layout_tuner.search_spaces.clusters.site import cluster_part

    with refusals():
        machine, warning = resolve_cluster(cluster_part(described_cluster(cluster)))
    if warning is not None:
        click.echo(f"warning: {warning}", err=True)
    return machine
