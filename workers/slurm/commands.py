"""`layout-tuner allocation`: jobs of a Slurm site with a worker in each."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from search_spaces.counting import counted
from workers.command_input import described, refuse
from workers.slurm.command_options import (
    certificate_option,
    json_option,
    print_table,
    refusals,
    token_file_option,
    url_option,
)
from workers.slurm.service_commands import quarantine, release, show

if TYPE_CHECKING:
    from workers.slurm.request import AllocationRequest


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
@url_option
@token_file_option
@click.option(
    "--worker-token-file",
    envvar="LAYOUT_TUNER_WORKER_TOKEN_FILE",
    show_envvar=True,
    type=click.Path(path_type=Path),
    help="File that holds the worker's token, where --token-file is not one's; on a disk that the nodes see.",
)
@certificate_option
@click.option("--account", help="What the time is charged to.")
@click.option("--partition", help="Slurm's partition.")
@click.option("--qos", help="Slurm's quality of service.")
@click.option("--constraint", help="Features that the nodes must have.")
@click.option("--job-name", default="layout-tuner", show_default=True, help="Name of the job.")
@click.option(
    "--sbatch-option", "sbatch_options", multiple=True, help="Another option of sbatch, as --mem=0."
)
@click.option("--launcher", help="How probes are started: ray or srun; by default the site's.")
@click.option("--share-nodes/--no-share-nodes", default=None, help="Run small probes side by side.")
@click.option(
    "--end-when-idle", help="End the job after so long without work, as 5m: nodes cost even then."
)
@click.option(
    "--environment",
    type=click.Path(path_type=Path),
    help="Environment that has layout-tuner: its directory on a shared disk, or a packed one (tar) that "
    "every node unpacks on its own disk. By default the one that runs this command.",
)
@click.option("--setup", multiple=True, help="A line of shell that runs before anything else.")
@click.option("--log", default="%x-%j.log", show_default=True, help="File that the job prints to.")
@click.option("--dry-run", is_flag=True, help="Print the batch script, and submit nothing.")
@json_option
def submit(*, dry_run: bool, as_json: bool, **options: Any) -> None:
    """Render the batch script of an allocation, and hand it to sbatch."""
    from workers.slurm import submission
    from workers.slurm.script import render

    with refusals():
        request = _request(**options)
        script = render(request)
        submission.refuse_unusable(request, script)
    for warning in submission.warnings(request):
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
@json_option
def list_allocations(as_json: bool) -> None:
    """List your allocations that wait or run."""
    from workers.slurm.jobs import list_jobs

    with refusals():
        jobs = list_jobs()
    if as_json:
        click.echo(json.dumps([asdict(job) for job in jobs]))
        return
    columns = (
        "job",
        "name",
        "cluster",
        "state",
        ">nodes",
        ">used",
        ">left",
        "where, or why not yet",
    )
    rows = [
        (
            job.job_id,
            job.name,
            job.cluster,
            job.state.lower(),
            str(job.num_nodes),
            job.used,
            job.left,
            job.nodes_or_reason,
        )
        for job in jobs
    ]
    print_table(columns, rows)


@allocation.command()
@click.argument("job_id", metavar="JOB")
@click.option("--now", is_flag=True, help="Kill it; its trials return when their leases run out.")
@json_option
def cancel(job_id: str, now: bool, as_json: bool) -> None:
    """End an allocation: its worker stops, gives its trials back, and the job ends."""
    from workers.slurm import jobs

    with refusals():
        job = jobs.cancel(job_id, now=now)
    if as_json:
        click.echo(json.dumps(asdict(job)))
    elif now or job.state != "RUNNING":
        click.echo(f"job {job_id} is cancelled")
    else:
        click.echo(f"job {job_id} was told to end; it gives its trials back first")


def _request(
    *,
    cluster: str,
    time: str,
    launcher: str | None,
    environment: Path | None,
    end_when_idle: str | None,
    token_file: Path,
    worker_token_file: Path | None,
    certificate: Path | None,
    **options: Any,
) -> AllocationRequest:
    from search_spaces.duration import read_duration_s
    from search_spaces.presets.clusters import resolve_cluster
    from workers.slurm.request import AllocationRequest
    from workers.slurm.site import Site, cluster_part, site_of
    from workers.slurm.walltime import read_walltime_s

    document = described(cluster)
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
    python, archive = _environment(environment)
    idle_s = (
        None if end_when_idle is None else read_duration_s(end_when_idle, field="--end-when-idle")
    )
    return AllocationRequest(
        cluster=machine,
        described=document,
        site=site,
        time_s=read_walltime_s(time, field="--time"),
        token_file=(worker_token_file or token_file).absolute(),
        certificate=None if certificate is None else certificate.absolute(),
        python=python,
        archive=archive,
        launcher=launcher or site.launcher,
        end_when_idle_s=idle_s,
        **options,
    )


def _environment(path: Path | None) -> tuple[Path, Path | None]:
    """The interpreter of an environment, and the archive that it comes in, if it does."""
    if path is None:
        return Path(sys.executable), None
    if path.is_dir():
        return path.absolute() / "bin" / "python", None
    if not path.is_file():
        refuse(f"--environment: {path} is neither a directory nor a file")
    return Path(sys.executable), path.absolute()


for _command in (show, release, quarantine):
    allocation.add_command(_command)
