"""The commands `worker`, `probe` and `train`. They import late, so that `--help` is fast."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import click

from layout_tuner.api.security.local_tokens import read_token
from layout_tuner.cli.live_output import WorkLine, work_line
from layout_tuner.cli.options.command_input import described_cluster, described_machine, trainers_of
from layout_tuner.cli.options.command_options import place_options, stated
from layout_tuner.cli.options.refusals import fail, refusals, refuse
from layout_tuner.cli.options.shared_options import (
    MODEL_HELP,
    PositiveNumber,
    allocation_options,
    cluster_option,
    layout_options,
    seq_length_option,
    trainers_option,
)
from layout_tuner.cli.options.simulation_options import simulation_options
from layout_tuner.protocol.connection.data_home import PRIVATE_UMASK
from layout_tuner.protocol.connection.service_address import ServicePlace
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.layouts.stated_layout import stated_layout
from layout_tuner.terminal.console import on_interrupt
from layout_tuner.terminal.plurals import counted
from layout_tuner.units import GIB

if TYPE_CHECKING:
    from layout_tuner.protocol.measurement import Measurement
    from layout_tuner.protocol.outcome import Outcome, ProbeRequest
    from layout_tuner.search_spaces.clusters.cluster import Cluster
    from layout_tuner.search_spaces.models.model_shape import ModelShape
    from layout_tuner.workers.simulation.simulation_settings import SimulationOptions
    from layout_tuner.workers.trainer.job.job import TrainJob
    from layout_tuner.workers.trainer.job.progress import ProgressLog

_MOST_GB: Final = 1 << 20
_LONGEST_DEADLINE_S: Final = 366 * 86400


@click.command()
@place_options(is_worker=True)
@cluster_option
@click.option("--name", help="Unique name of this worker; by default the host's name.")
@click.option(
    "--spool-dir",
    type=click.Path(path_type=Path),
    help="Directory where outcomes wait until they are posted.",
)
@click.option(
    "--patience",
    type=click.FloatRange(min=0),
    default=60.0,
    show_default=True,
    help="Seconds to wait for a service that does not answer at the start.",
)
@trainers_option
@allocation_options
@simulation_options
def worker(
    place: ServicePlace,
    cluster: str,
    trainers_file: Path | None,
    name: str | None,
    spool_dir: Path | None,
    patience: float,
    simulation: SimulationOptions | None,
    **allocation: Any,
) -> None:
    """Run trials of the service's campaigns, on this machine or over an allocation.

    By default the service is that of this machine's data directory.

    The worker ends after SIGTERM, and in time before its allocation ends. It gives trials whose
    probes have not ended back to the service.

    With --simulate it measures nothing: a simulator answers the probes, in simulated time.
    """
    from layout_tuner.workers.worker.run_worker import run_simulated_workers, run_worker

    if simulation is not None:
        for option in stated("cluster", "launcher", "ray_address", "trainers_file"):
            refuse(f"{option} and --simulate exclude each other: simulated nodes run no program")
    os.umask(PRIVATE_UMASK)  # a directory that --spool-dir names may be open to others
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    with refusals():
        named = cluster if simulation is None else simulation.cluster
        shared: dict[str, Any] = {
            "url": place.url,
            "token": read_token(place.token_file),
            "certificate": place.certificate,
            "described_cluster": described_cluster(named, place=place),
            "name": name,
            "spool_dir": spool_dir,
            "patience_s": patience,
            **allocation,
        }
        if simulation is None:
            run_worker(trainers=trainers_of(trainers_file), **shared)
        else:
            del shared["launcher"], shared["ray_address"]
            run_simulated_workers(simulation=simulation, **shared)


@click.command()
@click.option("--model", required=True, help=MODEL_HELP)
@seq_length_option
@cluster_option
@layout_options
@click.option(
    "--compile/--no-compile",
    "compiled",
    default=False,
    show_default=True,
    help="Fuse a Llama's norms and SwiGLU by torch.compile.",
)
@click.option(
    "--balanced-routing/--no-balanced-routing",
    default=True,
    show_default=True,
    help="Give each expert of a mixture the same number of tokens, or measure what its router does.",
)
@click.option("--steps", default=10, show_default=True, help="Timed iterations.")
@click.option(
    "--warmup",
    default=2,
    show_default=True,
    help="Fewest iterations before the timed ones, two or more; warm-up ends when times settle.",
)
@click.option("--seed", default=0, show_default=True, help="Seed of the weights and tokens.")
@click.option(
    "--memory-limit-gb",
    type=PositiveNumber(_MOST_GB),
    help="Memory limit of a device, in units of 2^30 bytes.",
)
@click.option(
    "--deadline",
    type=PositiveNumber(_LONGEST_DEADLINE_S),
    default=300.0,
    show_default=True,
    help="Seconds for the ranks, from their start to their end; importing torch and measuring the "
    "peak of a matmul come before.",
)
@trainers_option
@click.option("--trainer", help="A trainer of the file; by default the only one there.")
@click.option(
    "--parameter",
    "parameters",
    multiple=True,
    metavar="NAME=VALUE",
    help="Value of a parameter that the trainer's entry declares; may be repeated.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def probe(
    model: str,
    seq_length: int | None,
    cluster: str,
    trainers_file: Path | None,
    trainer: str | None,
    parameters: tuple[str, ...],
    steps: int,
    warmup: int,
    seed: int,
    compiled: bool,
    balanced_routing: bool,
    memory_limit_gb: float | None,
    deadline: float,
    as_json: bool,
    **knobs: Any,
) -> None:
    """Measure one layout, here and now: no service, no Ray.

    More ranks than devices are allowed; the measurement is then marked as oversubscribed. With
    --trainers another trainer runs the layout, as a worker would let it.
    """
    from layout_tuner.protocol.outcome import ProbeRequest
    from layout_tuner.search_spaces.models.model_files import described_model
    from layout_tuner.search_spaces.models.model_presets import resolve_model
    from layout_tuner.trainers.parameters import parameters_of
    from layout_tuner.workers.calibrate.calibration import calibrated_layouts
    from layout_tuner.workers.launchers.local import local_launcher

    machine = described_machine(cluster)
    trainers = trainers_of(trainers_file)
    with refusals():
        request = ProbeRequest(
            model=resolve_model(described_model(model, seq_length=seq_length)),
            layout=stated_layout(knobs, precision=machine.default_precision),
            seed=seed,
            warmup=warmup,
            iterations=steps,
            deadline_s=deadline,
            memory_limit_bytes=None if memory_limit_gb is None else int(memory_limit_gb * GIB),
            compile=compiled,
            trainer=chosen_trainer(trainers, trainer),
            parameters=parameters_of(parameters),
            balanced_routing=balanced_routing,
        )
    _refuse_illegal(request.layout, request.model, machine)
    with (
        refusals(),
        on_interrupt("the probe was interrupted: its ranks have ended, nothing was measured"),
        work_line(sys.stderr, ticks=True) as line,
    ):
        line.say("importing torch, and measuring the peak of a matmul")
        with local_launcher(machine, trainers) as launcher:
            launcher.use_product_layouts(calibrated_layouts(machine))
            outcome = launcher.run(
                request, on_event=partial(_say_progress, line, request), cancelled=lambda: False
            )
    if as_json:
        click.echo(json.dumps(probe_document(request, outcome)))
    else:
        click.echo(probe_text(request, outcome))
    sys.exit(0 if outcome.state == "completed" else 1)


@click.command()
@click.option(
    "--config", required=True, type=click.Path(path_type=Path), help="The exported job (job.json)."
)
@click.option("--steps", type=int, help="Steps, instead of the job's own.")
@click.option("--warmup", type=int, help="First steps that are not timed, instead of the job's.")
@click.option(
    "--log", type=click.Path(path_type=Path), help="File to which each step appends a JSON line."
)
@cluster_option
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
    from layout_tuner.workers.trainer.job.launcher_environment import is_rank

    if is_rank(os.environ):
        _train_as_rank(config, as_json=as_json, steps=steps, warmup=warmup, log=log)
    from layout_tuner.workers.trainer.errors import TrainerError
    from layout_tuner.workers.trainer.job.job import read_job
    from layout_tuner.workers.trainer.job.progress import ProgressLog

    try:
        job = read_job(config, steps=steps, warmup=warmup)
        job.refuse_unusable()
        progress = ProgressLog(stream=sys.stderr if as_json else sys.stdout, log=log)
    except TrainerError as error:
        refuse(str(error))
    machine = described_machine(cluster)
    _refuse_illegal(job.layout, job.model, machine)
    with refusals():
        result = _train_here(job, machine, progress)
    if as_json:
        progress.record(result)
        click.echo(json.dumps(result))
    else:
        progress(result)


def _train_as_rank(config: Path, *, as_json: bool, **given: object) -> NoReturn:
    """One rank of those that torchrun or srun has started: the trainer's own command."""
    from layout_tuner.workers.trainer.train import main

    flags = [f"--{name}={value}" for name, value in given.items() if value is not None]
    status = main([f"--config={config}", *flags, *(["--json"] if as_json else [])])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # destroying a gloo group can hang once the job is done


def _train_here(job: TrainJob, machine: Cluster, progress: ProgressLog) -> Any:
    """Runs the job's ranks on this machine; ends the command where they fail."""
    from layout_tuner.workers.calibrate.calibration import calibrated_layouts
    from layout_tuner.workers.launchers.local import local_launcher

    with (
        on_interrupt(
            "the training job was interrupted: its ranks have ended; one that saves checkpoints goes on "
            "from the newest when it is started again"
        ),
        local_launcher(machine) as launcher,
    ):
        launcher.use_product_layouts(calibrated_layouts(machine))
        if job.layout.num_devices > launcher.devices_per_node:
            click.echo(
                f"warning: {job.layout.num_devices} ranks share {launcher.devices_per_node} "
                "devices; expect fewer tokens/s than were measured",
                err=True,
            )
        end = launcher.train(job.to_mapping(), on_event=progress, cancelled=lambda: False)
    if end.failure is not None:
        if end.log_tail:
            click.echo(end.log_tail, err=True)
        fail(end.failure.message)
    return end.results[0]["training"]


def _say_progress(line: WorkLine, request: ProbeRequest, event: Mapping[str, Any]) -> None:
    if event["event"] == "listening":
        line.say(f"building the model on {counted(request.layout.num_devices, 'rank')}")
    elif event["event"] == "iteration":
        done = event["index"] + 1
        # Warm-up may take more iterations than were asked for.
        planned = max(request.warmup + request.iterations, done)
        line.say(
            f"iteration {done} of {planned} ({event['kind']}): "
            f"{1e3 * event['step_time_s']:.4g} ms a step"
        )


def chosen_trainer(trainers: Mapping[str, Any], name: str | None) -> str:
    """The trainer of a probe: the named one, or the only one of a file; without a file ours."""
    from layout_tuner.trainers.embedded import EMBEDDED_TRAINER

    if name is None and len(trainers) <= 1:
        return next(iter(trainers), EMBEDDED_TRAINER)
    known = ", ".join((EMBEDDED_TRAINER, *trainers))
    if name is None:
        refuse(f"--trainers has {len(trainers)} trainers; name one with --trainer: {known}")
    if name != EMBEDDED_TRAINER and name not in trainers:
        refuse(f"--trainer={name} is not one of {known}; --trainers FILE describes others")
    return name


def _refuse_illegal(layout: Layout, model: ModelShape, machine: Cluster) -> None:
    from layout_tuner.search_spaces.legality_rules import PROBE_SCOPES, violations

    if broken := violations(layout, model, machine, scopes=PROBE_SCOPES):
        refuse(*broken)


def status_of(outcome: Outcome) -> str:
    """The outcome in a word; an infeasible layout as the reason, `out_of_memory`."""
    return "out_of_memory" if outcome.state == "infeasible" else outcome.state


def probe_document(request: ProbeRequest, outcome: Outcome) -> dict[str, Any]:
    """The outcome as plain JSON values, with losses and step times as lists."""
    shared = {
        "status": status_of(outcome),
        "model": request.model.to_mapping(),
        "layout": request.layout.to_mapping(),
        "seed": request.seed,
        "compile": request.compile,
        "duration_s": outcome.duration_s,
        "log_tail": outcome.log_tail,
        "environment": None if outcome.environment is None else asdict(outcome.environment),
    }
    measurement = outcome.measurement
    if measurement is None:
        return {
            **shared,
            "reason": outcome.reason,
            "message": outcome.message,
            "node": outcome.node,
        }
    iterations = measurement.iterations
    return {
        **shared,
        "losses": [iteration.loss for iteration in iterations],
        "grad_norms": [iteration.grad_norm for iteration in iterations],
        "step_times_s": [i.step_time_s for i in iterations if i.kind == "timed"],
        **{name: value for name, value in measurement.to_mapping().items() if name != "iterations"},
    }


def probe_text(request: ProbeRequest, outcome: Outcome) -> str:
    layout = request.layout
    compiled = ", compiled," if request.compile else ""
    head = f"{request.model.title} as {layout.key}{compiled} on {layout.num_devices} devices"
    measurement = outcome.measurement
    if measurement is None:
        log = f"\n{outcome.log_tail}" if outcome.log_tail else ""
        return f"{head}: {status_of(outcome)} ({outcome.reason})\n{outcome.message}{log}"
    lacks = [f"  the model lacks {request.model.lacks}"] if request.model.lacks else []
    return "\n".join([head, *_lines(measurement), *lacks])


def _lines(measured: Measurement) -> list[str]:
    from layout_tuner.predictions.statistics.disturbance import MEANING, disturbance_words
    from layout_tuner.protocol.measurement import routing_words, skipped_words
    from layout_tuner.trainers.embedded import EMBEDDED_TRAINER

    quartiles = f"{1e3 * measured.step_time_q25_s:.2f} to {1e3 * measured.step_time_q75_s:.2f}"
    timed = sum(iteration.kind == "timed" for iteration in measured.iterations)
    rows = {
        "step time": f"{1e3 * measured.step_time_s:.2f} ms "
        f"(quartiles {quartiles}, {timed} iterations)",
        "tokens/s": f"{measured.tokens_per_s:,.0f} "
        f"({measured.tokens_per_s_per_device:,.0f} a device)",
        "model FLOPs": f"{measured.model_tflops_per_device:.4g} TFLOP/s a device, "
        f"MFU {measured.mfu:.1%} of {measured.peak_tflops_per_device:.4g} ({measured.peak_source})",
        "peak memory": f"{measured.peak_memory_bytes / 2**20:,.1f} MiB a device "
        f"({measured.memory_kind})",
    }
    losses = [each.loss for each in measured.iterations if each.loss is not None]
    if losses:
        rows["loss"] = f"{losses[0]:.4f} to {losses[-1]:.4f}"
    if measured.trainer != EMBEDDED_TRAINER:
        rows["trainer"] = f"{measured.trainer} {measured.trainer_version}, tokens {measured.tokens}"
    if words := routing_words(measured.balanced_routing, measured.expert_load):
        rows["routing"] = words
    if taken := disturbance_words(measured.others_share, measured.throttled, measured.own_share):
        rows["others took"] = taken
    if measured.breakdown is not None:
        shares = measured.breakdown.shares.items()
        rows["of a step"] = ", ".join(f"{name} {share:.1%}" for name, share in shares if share)
    lines = [f"  {name:<12} {value}" for name, value in rows.items()]
    if not measured.warmup_settled:
        lines.append("  unsettled: step times still changed when timing began")
    if words := skipped_words(measured.skipped_steps):
        lines.append(f"  {words}")
    if measured.is_disturbed:
        lines.append(f"  {MEANING}")
    if measured.oversubscribed:
        lines.append("  oversubscribed: ranks shared devices, so the times say nothing")
    return lines
