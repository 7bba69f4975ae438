"""The worker room's subcommands. What they need is imported when they run: `--help` stays fast."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import click

from search_spaces.errors import SearchSpaceError
from search_spaces.layout import Layout
from workers.allocation_options import allocation_options
from workers.command_input import described, fail, read_token, refuse
from workers.layout_options import layout_options

if TYPE_CHECKING:
    from search_spaces.cluster import Cluster
    from search_spaces.model_shape import ModelShape
    from workers.trainer.job import TrainJob
    from workers.trainer.progress import Progress

_GIB: Final = 1 << 30
_MOST_GB: Final = 1 << 20
_LONGEST_DEADLINE_S: Final = 366 * 86400


class PositiveNumber(click.FloatRange):
    """A number over 0 and up to a limit: click's own range lets nan through."""

    def __init__(self, most: float) -> None:
        super().__init__(min=0, min_open=True, max=most)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value} is no number.", param, ctx)
        return number


@click.command()
@click.option("--url", envvar="LAYOUT_TUNER_URL", required=True, help="Address of the service.")
@click.option(
    "--token-file",
    envvar="LAYOUT_TUNER_TOKEN_FILE",
    required=True,
    type=click.Path(path_type=Path),
    help="File that holds a worker's token.",
)
@click.option(
    "--certificate",
    envvar="LAYOUT_TUNER_CERTIFICATE",
    type=click.Path(path_type=Path),
    help="Certificate of a service that no authority vouches for: it is trusted by itself.",
)
@click.option("--cluster", default="local-cpu", show_default=True, help="What this runs on.")
@click.option("--name", help="Name of this worker, one of a kind; by default the host's.")
@click.option(
    "--spool-dir",
    type=click.Path(path_type=Path),
    help="Where outcomes wait until the service has taken them.",
)
@click.option(
    "--patience",
    type=click.FloatRange(min=0),
    default=60.0,
    show_default=True,
    help="Seconds that the service may be away at the start.",
)
@allocation_options
def worker(
    url: str,
    token_file: Path,
    certificate: Path | None,
    cluster: str,
    name: str | None,
    spool_dir: Path | None,
    patience: float,
    **allocation: Any,
) -> None:
    """Run trials of the service's campaigns, on this machine or over an allocation.

    It ends when it is told to (SIGTERM), or in time before the allocation does: the probes that can't
    end are given back to the service.
    """
    from workers.errors import WorkerError
    from workers.local_worker import work

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        work(
            url=url,
            token=read_token(token_file),
            certificate=certificate,
            described_cluster=described(cluster),
            name=name,
            spool_dir=spool_dir,
            patience_s=patience,
            **allocation,
        )
    except (WorkerError, SearchSpaceError) as error:
        fail(str(error))


@click.command()
@click.option("--model", required=True, help="Name of a model preset, or a JSON or YAML file.")
@click.option("--cluster", default="local-cpu", show_default=True, help="What this runs on.")
@layout_options
@click.option(
    "--compile/--no-compile",
    "compiled",
    default=False,
    show_default=True,
    help="Fuse a Llama's norms and SwiGLU by torch.compile.",
)
@click.option("--steps", default=10, show_default=True, help="Timed iterations.")
@click.option(
    "--warmup",
    default=2,
    show_default=True,
    help="Least iterations before the timed ones: two or more; it goes on until they settle.",
)
@click.option("--seed", default=0, show_default=True, help="Weights and tokens follow from it.")
@click.option(
    "--memory-limit-gb",
    type=PositiveNumber(_MOST_GB),
    help="Memory of a device, of 2^30 bytes each.",
)
@click.option(
    "--deadline",
    type=PositiveNumber(_LONGEST_DEADLINE_S),
    default=300.0,
    show_default=True,
    help="Seconds for the ranks, from their start to their end; importing torch and measuring the "
    "peak of a matmul come before.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def probe(
    model: str,
    cluster: str,
    steps: int,
    warmup: int,
    seed: int,
    compiled: bool,
    memory_limit_gb: float | None,
    deadline: float,
    as_json: bool,
    **knobs: Any,
) -> None:
    """Measure one layout, here and now: no service, no Ray.

    More ranks than devices are allowed; the measurement is then marked as oversubscribed.
    """
    from search_spaces.outcome import ProbeRequest
    from search_spaces.presets.models import resolve_model
    from workers import probe_report
    from workers.errors import WorkerError
    from workers.launchers.local import local_launcher

    machine = described_machine(cluster)
    try:
        request = ProbeRequest(
            model=resolve_model(described(model)),
            layout=Layout(**knobs),
            seed=seed,
            warmup=warmup,
            iterations=steps,
            deadline_s=deadline,
            memory_limit_bytes=_bytes(memory_limit_gb),
            compile=compiled,
        )
    except SearchSpaceError as error:
        refuse(str(error))
    _refuse_illegal(request.layout, request.model, machine)
    try:
        with local_launcher(machine) as launcher:
            outcome = launcher.run(request, on_event=_ignore, cancelled=_never)
    except WorkerError as error:
        fail(str(error))
    if as_json:
        click.echo(json.dumps(probe_report.document(request, outcome)))
    else:
        click.echo(probe_report.text(request, outcome))
    sys.exit(0 if outcome.state == "completed" else 1)


@click.command()
@click.option(
    "--config", required=True, type=click.Path(path_type=Path), help="The exported job (job.json)."
)
@click.option("--steps", type=int, help="Steps, instead of the job's own.")
@click.option("--warmup", type=int, help="First steps that do not count, instead of the job's.")
@click.option(
    "--log", type=click.Path(path_type=Path), help="File that a JSON line a step is appended to."
)
@click.option("--cluster", default="local-cpu", show_default=True, help="What this runs on.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object; progress goes to stderr."
)
def train(
    config: Path,
    steps: int | None,
    warmup: int | None,
    log: Path | None,
    cluster: str,
    as_json: bool,
) -> None:
    """Run a training job on this machine, or as one rank under torchrun or srun.

    A job that saves checkpoints goes on from the newest one.
    """
    from workers.trainer.launched import is_rank

    if is_rank(os.environ):
        _train_as_rank(config, as_json=as_json, steps=steps, warmup=warmup, log=log)
    from workers.errors import WorkerError
    from workers.trainer.errors import TrainerError
    from workers.trainer.job import read_job
    from workers.trainer.progress import Progress

    try:
        job = read_job(config, steps=steps, warmup=warmup)
        job.refuse_unusable()
        progress = Progress(stream=sys.stderr if as_json else sys.stdout, log=log)
    except TrainerError as error:
        refuse(str(error))
    machine = described_machine(cluster)
    _refuse_illegal(job.layout, job.model, machine)
    try:
        result = _train_here(job, machine, progress)
    except WorkerError as error:
        fail(str(error))
    if as_json:
        progress.record(result)
        click.echo(json.dumps(result))
    else:
        progress(result)


def _train_as_rank(config: Path, *, as_json: bool, **given: object) -> NoReturn:
    """One rank of those that torchrun or srun has started: the trainer's own command."""
    from workers.trainer.train import main

    flags = [f"--{name}={value}" for name, value in given.items() if value is not None]
    status = main([f"--config={config}", *flags, *(["--json"] if as_json else [])])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # tearing a gloo group down can hang once the job is done


def _train_here(job: TrainJob, machine: Cluster, progress: Progress) -> Any:
    """Runs the job's ranks on this machine; ends the command where they fail."""
    from workers.launchers.local import local_launcher

    with local_launcher(machine) as launcher:
        if job.layout.num_devices > launcher.devices_per_node:
            click.echo(
                f"warning: {job.layout.num_devices} ranks share {launcher.devices_per_node} "
                "devices; expect fewer tokens/s than were measured",
                err=True,
            )
        end = launcher.train(job.to_mapping(), on_event=progress, cancelled=_never)
    if end.result is None:
        if end.log_tail:
            click.echo(end.log_tail, err=True)
        fail(end.message)
    return end.result


def described_machine(cluster: str) -> Cluster:
    """The described cluster; warns where its numbers are guesses."""
    from search_spaces.presets.clusters import resolve_cluster
    from workers.slurm.site import cluster_part

    try:
        machine, warning = resolve_cluster(cluster_part(described(cluster)))
    except SearchSpaceError as error:
        refuse(str(error))
    if warning is not None:
        click.echo(f"warning: {warning}", err=True)
    return machine


def _refuse_illegal(layout: Layout, model: ModelShape, machine: Cluster) -> None:
    from search_spaces.rules import PROBE_SCOPES, violations

    if broken := violations(layout, model, machine, scopes=PROBE_SCOPES):
        refuse(*broken)


def _bytes(gigabytes: float | None) -> int | None:
    return None if gigabytes is None else int(gigabytes * _GIB)


def _ignore(_: dict[str, Any]) -> None:
    pass


def _never() -> bool:
    return False
