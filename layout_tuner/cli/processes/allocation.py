"""`layout-tuner allocation`: jobs of a Slurm site with a worker in each."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import click

from layout_tuner.api.security.local_tokens import read_token
from layout_tuner.cli.options.command_options import json_option, place_options
from layout_tuner.cli.options.refusals import refusals, refuse
from layout_tuner.cli.options.shared_options import trainers_option
from layout_tuner.protocol.connection.service_address import (
    WORKER_TOKEN_FILE_VARIABLE,
    ServicePlace,
)
from layout_tuner.terminal.plurals import counted
from layout_tuner.terminal.text_table import print_table
from layout_tuner.workers.errors import RequestRefusedError

if TYPE_CHECKING:
    from layout_tuner.workers.slurm.request import AllocationRequest

_ANSWER_WITHIN_S: Final = 30.0
_MOST_WAITING: Final = 10
"""Waiting trials that are printed; a campaign may have hundreds."""

_CLUSTER: Final = click.option(
    "--cluster", help="Cluster of the node, where two clusters have a node of this name."
)


@click.group()
def allocation() -> None:
    """Hold nodes of a Slurm cluster, and run trials of the service's campaigns on them."""


@allocation.command()
@click.option(
    "--cluster", required=True, help="A cluster preset, or a JSON or YAML file with a site."
)
@click.option(
    "--nodes", "num_nodes", type=click.IntRange(min=1), required=True, help="Nodes to hold."
)
@click.option("--time", required=True, help="Wall time: 2:00:00, 1-12:00:00, 2h, 90m.")
@place_options(is_worker=True)
@click.option(
    "--worker-token-file",
    envvar=WORKER_TOKEN_FILE_VARIABLE,
    show_envvar=True,
    type=click.Path(path_type=Path),
    help="File that holds a worker's token, on a disk that the nodes see; by default --token-file, which "
    "then must be a worker's.",
)
@click.option("--account", help="Account to charge the time to.")
@click.option("--partition", help="Slurm's partition.")
@click.option("--qos", help="Slurm's quality of service.")
@click.option("--constraint", help="Features that the nodes must have.")
@click.option(
    "--switches", help="Most leaf switches of Slurm's tree topology, as 2; or 2@60: for 60 minutes."
)
@click.option("--segment", help="Nodes of each part of the job within a block of Slurm's topology.")
@click.option("--job-name", default="layout-tuner", show_default=True, help="Name of the job.")
@click.option(
    "--sbatch-option",
    "sbatch_options",
    multiple=True,
    help="Another option of sbatch, such as --mem=0.",
)
@click.option("--launcher", help="How probes are started: ray or srun; by default the site's.")
@click.option("--share-nodes/--no-share-nodes", default=None, help="Run small probes side by side.")
@trainers_option
@click.option(
    "--end-when-idle",
    help="End the job after this time without a trial, such as 5m: idle nodes are charged too.",
)
@click.option(
    "--environment",
    type=click.Path(path_type=Path),
    help="Environment that has layout-tuner: its directory on a shared disk, or a packed one (tar) that "
    "every node unpacks on its own disk. By default the one that runs this command.",
)
@click.option("--setup", multiple=True, help="A line of shell that runs first.")
@click.option(
    "--log", default="%x-%j.log", show_default=True, help="File for the output of the job."
)
@click.option("--dry-run", is_flag=True, help="Print the batch script, and submit nothing.")
@json_option
def submit(
    *,
    worker_token_file: Path | None,
    place: ServicePlace,
    dry_run: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Render the batch script of an allocation, and hand it to sbatch.

    --url is the service's address as the nodes reach it. The role of the token is checked: an
    admin's token is refused.
    """
    from layout_tuner.workers.slurm import submission
    from layout_tuner.workers.slurm.batch_script import render

    with refusals():
        request = _request(place=place, **options)
        script = render(request)
        submission.refuse_unusable(request, script)
        unchecked = submission.refuse_other_role(
            request, is_stated=worker_token_file is not None or place.is_own_token
        )
    for warning in submission.warnings(request, unchecked):
        click.echo(f"warning: {warning}", err=True)
    if dry_run:
        click.echo(script, nl=False)
        return
    with refusals():
        job_id = submission.submit(script)
    if as_json:
        click.echo(json.dumps({"job_id": job_id, "cluster": request.cluster.name}))
    else:
        click.echo(
            f"job {job_id} submitted: {counted(request.num_nodes, 'node')} of {request.cluster.name}"
        )


@allocation.command("list")
@place_options(is_worker=False, is_optional=True)
@json_option
def list_allocations(place: ServicePlace | None, as_json: bool) -> None:
    """List your allocations that wait or run, from Slurm's queue.

    Where Slurm is not installed, list the allocations of all users that the service knows.
    """
    from layout_tuner.workers.errors import SlurmUnavailableError
    from layout_tuner.workers.slurm.jobs import job_of_allocation, list_jobs

    with refusals():
        try:
            jobs = list_jobs()
        except SlurmUnavailableError as error:
            if place is None:
                raise
            click.echo(f"{error}; the service at {place.url} knows these allocations:", err=True)
            with _asking(place) as ask:
                known = ask("GET", "/allocations")["allocations"]
                jobs = [job_of_allocation(found) for found in known]
    if as_json:
        click.echo(json.dumps([asdict(job) for job in jobs]))
        return
    columns = {
        "job": "job_id",
        "name": "name",
        "cluster": "cluster",
        "state": "state",
        ">nodes": "num_nodes",
        ">used": "used",
        ">left": "left",
        "where, or why not yet": "nodes_or_reason",
    }
    rows = [replace(job, state=job.state.lower()) for job in jobs]
    print_table(
        tuple(columns), [[str(getattr(job, name)) for name in columns.values()] for job in rows]
    )


@allocation.command()
@click.argument("job_id", metavar="JOB")
@click.option(
    "--now", is_flag=True, help="Kill the job; its trials are run again when their leases expire."
)
@json_option
def cancel(job_id: str, now: bool, as_json: bool) -> None:
    """End an allocation: its worker stops, gives its trials back, and the job ends."""
    from layout_tuner.workers.slurm import jobs

    with refusals():
        job = jobs.cancel(job_id, now=now)
    if as_json:
        click.echo(json.dumps(asdict(job)))
    elif now or job.state != "RUNNING":
        click.echo(f"job {job_id} is cancelled")
    else:
        click.echo(f"job {job_id} is being ended; it returns its trials first")


@allocation.command()
@click.argument("name", required=False)
@place_options(is_worker=False)
@json_option
def show(name: str | None, place: ServicePlace, as_json: bool) -> None:
    """Show what each node of the allocations does, and why trials wait.

    NAME is a job's number, a worker's name or its session; without one, all running allocations are
    shown.
    """
    with refusals(), _asking(place) as ask:
        if name is None:
            found = ask("GET", "/allocations")["allocations"]  # of those that have not ended
        else:
            found = [_allocation(ask, name)]
        nodes = {(each["allocation"], each["name"]): each for each in ask("GET", "/nodes")["nodes"]}
    if as_json:
        click.echo(json.dumps(found if name is None else found[0]))
        return
    if not found:
        click.echo(
            "no allocation is there; `allocation list` shows whether a job waits in the queue"
        )
    for position, allocation in enumerate(found):
        if position:
            click.echo()
        _print_allocation(allocation, nodes)


@allocation.command()
@click.argument("name")
@place_options(is_worker=False)
@json_option
def remove(name: str, place: ServicePlace, as_json: bool) -> None:
    """Remove an allocation with all data of its worker, for example where they cannot be read.

    NAME is a job's number, a worker's name or its session. A worker that is still there gives its
    trials back and registers again. It takes an admin's token.
    """
    with refusals(), _asking(place) as ask:
        found = _allocation(ask, name)
        ask("DELETE", f"/allocations/{quote(found['id'], safe='')}")
    _say(found, as_json, f"{found['name']} ({found['id']}) is removed, with its nodes")


@allocation.command()
@click.argument("node")
@_CLUSTER
@place_options(is_worker=False)
@json_option
def release(node: str, cluster: str | None, place: ServicePlace, as_json: bool) -> None:
    """Take a node out of quarantine; it is checked before its next probe."""
    with refusals():
        found = _change_node(place, node, cluster, "release", None)
    _say(found, as_json, f"{node} is released; its worker checks it before a probe runs there")


@allocation.command()
@click.argument("node")
@click.option("--reason", default="asked for by a user", help="The reason, shown to other users.")
@_CLUSTER
@place_options(is_worker=False)
@json_option
def quarantine(
    node: str, reason: str, cluster: str | None, place: ServicePlace, as_json: bool
) -> None:
    """Quarantine a node: no probe starts there until it is released."""
    with refusals():
        found = _change_node(place, node, cluster, "quarantine", {"reason": reason})
    _say(found, as_json, f"{node} is in quarantine; `allocation release {node}` ends that")


def _request(
    *,
    cluster: str,
    time: str,
    launcher: str | None,
    environment: Path | None,
    end_when_idle: str | None,
    trainers_file: Path | None,
    place: ServicePlace,
    **options: Any,
) -> AllocationRequest:
    from layout_tuner.cli.options.command_input import described_cluster, trainers_of
    from layout_tuner.documents.duration import read_duration_s, read_walltime_s
    from layout_tuner.search_spaces.clusters.cluster_presets import resolve_cluster
    from layout_tuner.search_spaces.clusters.site import Site, cluster_part
    from layout_tuner.workers.slurm.request import AllocationRequest
    from layout_tuner.workers.slurm.site_lookup import site_of

    document = described_cluster(cluster, place=place)
    machine, warning = resolve_cluster(cluster_part(document))
    if warning is not None:
        click.echo(f"warning: {warning}", err=True)
    site = site_of(document)
    if site is None:
        site = Site()
        click.echo(
            f"warning: nothing is known of {machine.name}'s site: no modules, no limits; a cluster file "
            "may have a section `site`",
            err=True,
        )
    trainers_of(trainers_file)  # the job would find a malformed file only when it has started
    python, archive = _environment(environment)
    idle_s = (
        None if end_when_idle is None else read_duration_s(end_when_idle, field="--end-when-idle")
    )
    return AllocationRequest(
        cluster=machine,
        described=document,
        site=site,
        time_s=read_walltime_s(time, field="--time"),
        url=place.url,
        token_file=place.token_file.absolute(),
        certificate=None if place.certificate is None else place.certificate.absolute(),
        python=python,
        archive=archive,
        launcher=launcher or site.launcher,
        end_when_idle_s=idle_s,
        trainers_file=None if trainers_file is None else trainers_file.absolute(),
        **options,
    )


def _environment(path: Path | None) -> tuple[Path, Path | None]:
    """The interpreter of an environment, and its archive where it is packed."""
    if path is None:
        return Path(sys.executable), None
    if path.is_dir():
        return path.absolute() / "bin" / "python", None
    if not path.is_file():
        refuse(f"--environment: {path} is neither a directory nor a file")
    return Path(sys.executable), path.absolute()


@contextmanager
def _asking(place: ServicePlace) -> Iterator[Callable[..., Any]]:
    """Opens a connection to a service; yields a function that sends a request of the API.

    The function takes method, path and body, returns the document of the answer, and raises the
    errors of `ServiceHttp.request`.
    """
    from layout_tuner.workers.service.lease_client import ServiceHttp

    token = place.kept or read_token(place.token_file)
    with ServiceHttp(place.url, token, certificate=place.certificate) as http:
        yield lambda method, path, body=None: http.request(
            method, f"/v1{path}", body, within_s=_ANSWER_WITHIN_S
        )


def _allocation(ask: Callable[..., Any], name: str) -> dict[str, Any]:
    """The youngest allocation of a job, worker or session; RequestRefusedError if there is none."""
    path = f"/allocations?all=true&limit=1&name={quote(name, safe='')}"
    found: list[dict[str, Any]] = ask("GET", path)["allocations"]
    if found:
        return found[0]
    raise RequestRefusedError(
        f"the service knows no allocation {name!r}; `allocation show` without a name lists those that run"
    )


def _change_node(place: ServicePlace, node: str, cluster: str | None, what: str, body: Any) -> Any:
    """Releases or quarantines a node; looks its cluster up where none is given."""
    with _asking(place) as ask:
        cluster = cluster or _cluster_of(ask, node)
        path = f"/nodes/{quote(cluster, safe='')}/{quote(node, safe='')}/{what}"
        return ask("POST", path, body)


def _cluster_of(ask: Callable[..., Any], node: str) -> str:
    nodes = ask("GET", "/nodes")["nodes"]
    clusters = sorted({found["cluster"] for found in nodes if found["name"] == node})
    if len(clusters) == 1:
        return str(clusters[0])
    if clusters:
        raise RequestRefusedError(
            f"{' and '.join(clusters)} each have a node {node!r}: say which with --cluster"
        )
    raise RequestRefusedError(
        f"the service knows no node {node!r}: `allocation show` lists the nodes of running allocations"
    )


def _say(found: Mapping[str, Any], as_json: bool, sentence: str) -> None:
    click.echo(json.dumps(found) if as_json else sentence)


def _print_allocation(allocation: Mapping[str, Any], nodes: Mapping[Any, Any]) -> None:
    """Prints an allocation; `nodes` are those of the service by allocation and name."""
    job = f"job {allocation['job_id']}, " if allocation["job_id"] else ""
    left = allocation["seconds_left"]
    ends = "" if left is None else f", {_span(left)} left"
    launcher = f", launcher {allocation['launcher']}" if allocation["launcher"] else ""
    click.echo(
        f"{allocation['name']} ({job}{counted(allocation['num_nodes'], 'node')} of "
        f"{counted(allocation['devices_per_node'], 'device')} of {allocation['cluster']}{launcher}): {allocation['state']}{ends}"
    )
    if allocation["nodes"]:
        print_table(
            ("node", "state", ">free", "doing, or why not"),
            [
                _node(each, nodes.get((allocation["id"], each["name"])))
                for each in allocation["nodes"]
            ],
            indent="  ",
        )
    _print_trials("runs", allocation["running"], _progress)
    _print_trials("waits here", allocation["waiting"], lambda trial: trial["waiting_because"])
    _print_trials("not leased", allocation["not_leased"], lambda trial: trial["reason"])
    cost = allocation["cost"]
    parts = ", ".join(
        f"{cost[part] / 3600:.3g} {part}" for part in ("iterations", "start", "idle", "lost")
    )
    click.echo(f"  node-hours: {cost['total'] / 3600:.3g} ({parts})")


def _node(node: Mapping[str, Any], known: Mapping[str, Any] | None) -> tuple[str, str, str, str]:
    free = "-" if node["free_devices"] is None else f"{node['free_devices']}/{node['num_devices']}"
    words, aside = node["reason"] or node["doing"], known and known["quarantine"]
    if node["state"] == "quarantined" and aside and aside["reported_by"]:
        words += f" (set aside by {aside['reported_by']})"
    return _line(node["name"]), node["state"], free, _line(words)


def _progress(trial: Mapping[str, Any]) -> str:
    held = "" if trial["held_s"] is None else f" for {_span(trial['held_s'])}"
    return f"{trial['phase'] or 'leased'}{held}, {counted(trial['iterations_done'], 'iteration')}"


def _print_trials(
    heading: str, trials: Sequence[Mapping[str, Any]], words: Callable[[Mapping[str, Any]], str]
) -> None:
    for trial in trials[:_MOST_WAITING]:
        size = f"{counted(trial['num_devices'], 'device')} on {counted(trial['num_nodes'], 'node')}"
        click.echo(
            f"  {heading}: trial {trial['number']} of {trial['campaign']} ({size}): {_line(words(trial))}"
        )
    if len(trials) > _MOST_WAITING:
        click.echo(f"  {heading}: {len(trials) - _MOST_WAITING} more")


def _line(text: str) -> str:
    """A text of a worker on one line; messages of failures may have several."""
    return " ".join(text.split())


def _span(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
