"""The worker room's subcommands. What they need is imported when they run: `--help` stays fast."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import click

from search_spaces.errors import SearchSpaceError
from search_spaces.layout import PRECISIONS, RECOMPUTE_MODES, Layout

if TYPE_CHECKING:
    from workers.trainer.job import TrainJob

_GIB: Final = 1 << 30
_REFUSED: Final = 2


@click.command()
@click.option("--url", envvar="LAYOUT_TUNER_URL", required=True, help="Address of the service.")
@click.option(
    "--token-file",
    envvar="LAYOUT_TUNER_TOKEN_FILE",
    required=True,
    type=click.Path(path_type=Path),
    help="File that holds the service's token.",
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
def worker(
    url: str,
    token_file: Path,
    cluster: str,
    name: str | None,
    spool_dir: Path | None,
    patience: float,
) -> None:
    """Run trials of the service's campaigns on this machine until told to end."""
    from workers.errors import WorkerError
    from workers.local_worker import work

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        work(
            url=url,
            token=_read_token(token_file),
            described_cluster=_described(cluster),
            name=name,
            spool_dir=spool_dir,
            patience_s=patience,
        )
    except (WorkerError, SearchSpaceError) as error:
        _fail(str(error))


@click.command()
@click.option("--model", required=True, help="Name of a model preset, or a JSON or YAML file.")
@click.option("--cluster", default="local-cpu", show_default=True, help="What this runs on.")
@click.option("--tp", default=1, show_default=True, help="Tensor-parallel ranks.")
@click.option("--pp", default=1, show_default=True, help="Pipeline stages.")
@click.option("--dp", default=1, show_default=True, help="Data-parallel replicas.")
@click.option("--vpp", default=1, show_default=True, help="Virtual stages a pipeline rank.")
@click.option("--micro-batch-size", default=1, show_default=True, help="Sequences at once.")
@click.option("--num-microbatches", default=1, show_default=True, help="Micro-batches a step.")
@click.option("--zero-stage", default=0, show_default=True, help="1: shard the optimizer's states.")
@click.option("--recompute", type=click.Choice(RECOMPUTE_MODES), default="none", show_default=True)
@click.option("--sequence-parallel/--no-sequence-parallel", default=False, show_default=True)
@click.option("--precision", type=click.Choice(PRECISIONS), default="fp32", show_default=True)
@click.option("--steps", default=10, show_default=True, help="Timed iterations.")
@click.option("--warmup", default=2, show_default=True, help="Iterations before the timed ones.")
@click.option("--seed", default=0, show_default=True, help="Weights and tokens follow from it.")
@click.option("--memory-limit-gb", type=float, help="Memory of a device, of 2^30 bytes each.")
@click.option("--deadline", default=300.0, show_default=True, help="Seconds for all of it.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def probe(
    model: str,
    cluster: str,
    steps: int,
    warmup: int,
    seed: int,
    memory_limit_gb: float | None,
    deadline: float,
    as_json: bool,
    **knobs: Any,
) -> None:
    """Measure one layout, here and now: no service, no Ray.

    More ranks than devices are allowed; the measurement is then marked as oversubscribed.
    """
    from search_spaces.outcome import ProbeRequest
    from search_spaces.presets.clusters import resolve_cluster
    from search_spaces.presets.models import resolve_model
    from search_spaces.rules import PROBE_SCOPES, violations
    from workers import probe_report
    from workers.errors import WorkerError
    from workers.launchers.local import local_launcher

    try:
        machine, warning = resolve_cluster(_described(cluster))
        request = ProbeRequest(
            model=resolve_model(_described(model)),
            layout=Layout(**knobs),
            seed=seed,
            warmup=warmup,
            iterations=steps,
            deadline_s=deadline,
            memory_limit_bytes=_bytes(memory_limit_gb),
        )
    except SearchSpaceError as error:
        _refuse(str(error))
    if warning is not None:
        click.echo(f"warning: {warning}", err=True)
    if broken := violations(request.layout, request.model, machine, scopes=PROBE_SCOPES):
        _refuse(*broken)
    try:
        with local_launcher(machine) as launcher:
            outcome = launcher.run(request, on_event=_ignore, cancelled=_never)
    except WorkerError as error:
        _fail(str(error))
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
@click.option("--cluster", default="local-cpu", show_default=True, help="What this runs on.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object; progress goes to stderr."
)
def train(config: Path, steps: int | None, cluster: str, as_json: bool) -> None:
    """Run an exported training job on this machine, or as one rank under torchrun."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        from workers.trainer.train import main

        changed = [] if steps is None else ["--steps", str(steps)]
        status = main(["--config", str(config), *changed])
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # tearing a gloo group down can hang once the job is done
    from workers.errors import WorkerError

    job = _read_job(config, steps)
    try:
        result = _train_here(job, cluster, lambda event: _print_step(event, aside=as_json))
    except (WorkerError, SearchSpaceError) as error:
        _fail(str(error))
    if as_json:
        click.echo(json.dumps(result))
    else:
        timed = result["steps"] - job.warmup
        click.echo(f"tokens/s: {result['tokens_per_s']:,.0f} (median of {timed} steps)")


def _train_here(job: TrainJob, cluster: str, on_event: Callable[[dict[str, Any]], None]) -> Any:
    """Runs the job's ranks on this machine; ends the command where they fail."""
    from search_spaces.presets.clusters import resolve_cluster
    from workers.launchers.local import local_launcher

    machine, warning = resolve_cluster(_described(cluster))
    if warning is not None:
        click.echo(f"warning: {warning}", err=True)
    if job.layout.num_devices > machine.devices_per_node:
        click.echo(
            f"warning: {job.layout.num_devices} ranks share {machine.devices_per_node} devices; "
            "expect fewer tokens/s than were measured",
            err=True,
        )
    with local_launcher(machine) as launcher:
        end = launcher.train(job.to_mapping(), on_event=on_event, cancelled=_never)
    if end.result is None:
        if end.log_tail:
            click.echo(end.log_tail, err=True)
        _fail(end.message)
    return end.result


def _read_job(config: Path, steps: int | None) -> TrainJob:
    from workers.trainer.errors import TrainerError
    from workers.trainer.job import TrainJob

    try:
        mapping = json.loads(config.read_text())
    except (OSError, ValueError) as error:
        _refuse(f"{config} is not a readable JSON file: {error}")
    if not isinstance(mapping, dict):
        _refuse(f"{config} holds {type(mapping).__name__} where the job's fields should be")
    try:
        job = TrainJob.from_mapping(mapping)
        return job if steps is None else replace(job, steps=steps)
    except (TrainerError, SearchSpaceError) as error:
        _refuse(f"{config}: {error}")


def _read_token(path: Path) -> str:
    try:
        token = path.read_text().strip()
    except OSError as error:
        _fail(f"the token file can't be read: {error}")
    if not token:
        _fail(f"the token file {path} is empty")
    return token


def _described(name: str) -> Any:
    """A preset's name, or what the JSON or YAML file of that name holds."""
    path = Path(name)
    if path.suffix not in (".json", ".yaml", ".yml"):
        return name
    import yaml

    try:
        return yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        _refuse(f"{path} is not a readable JSON or YAML file: {error}")


def _bytes(gigabytes: float | None) -> int | None:
    return None if gigabytes is None else int(gigabytes * _GIB)


def _print_step(event: dict[str, Any], *, aside: bool) -> None:
    """One line a step; aside: to stderr, since something else is to be read from stdout."""
    click.echo(
        f"step {event['index']:>4}  loss {event['loss']:.4f}  "
        f"{event['tokens_per_s']:>10,.0f} tokens/s  mfu {event['mfu']:.1%}",
        err=aside,
    )


def _ignore(_: dict[str, Any]) -> None:
    pass


def _never() -> bool:
    return False


def _refuse(*sentences: str) -> NoReturn:
    for sentence in sentences:
        click.echo(f"error: {sentence}", err=True)
    sys.exit(_REFUSED)


def _fail(sentence: str) -> NoReturn:
    click.echo(f"error: {sentence}", err=True)
    sys.exit(1)
