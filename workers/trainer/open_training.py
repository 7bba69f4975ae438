"""Opens the training of a rank: process groups, device and model, ready to take steps."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch
from torch import distributed as dist
from torch.distributed.distributed_c10d import Store

from layout_tuner.process_resources import usable_cores
from layout_tuner.search_spaces.clusters.cluster import detect_local_cpu
from layout_tuner.search_spaces.layouts.job_settings import JobSettings
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.legality_rules import violations
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.search_spaces.throughput import MEASURED_PEAK
from layout_tuner.workers.trainer.comm.mesh import build_mesh
from layout_tuner.workers.trainer.comm.messages import gather_documents
from layout_tuner.workers.trainer.comm.shared_memory import host_identity
from layout_tuner.workers.trainer.device_peak_flops import matmul_peak
from layout_tuner.workers.trainer.errors import (
    LayoutUnsupportedError,
    RankContextInvalidError,
    TrainerOptionInvalidError,
)
from layout_tuner.workers.trainer.model.kernels import EAGER, compiled_kernels, use_kernels
from layout_tuner.workers.trainer.model.matrix_products import use_layouts
from layout_tuner.workers.trainer.options_in_effect import (
    options_in_effect,
    refuse_without_effect,
)
from layout_tuner.workers.trainer.parallel.optimizer import OptimizerSettings
from layout_tuner.workers.trainer.product_layouts import Product, from_rows
from layout_tuner.workers.trainer.rank_memory import enforce_limit, refuse_over_limit
from layout_tuner.workers.trainer.trainer_options import DEFAULT_OPTIONS, TrainerOptions
from layout_tuner.workers.trainer.training import Training, persistent_bytes

_PRODUCT_LAYOUTS: Final = "product-layouts"
"""Key in the store of the ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankContext:
    """One rank's place in the job."""

    rank: int
    """Global rank, from 0."""
    world_size: int
    """Ranks of the job; the layout's num_devices."""
    local_rank: int
    """Position on its node; on GPUs the index of its device."""
    store: Store
    """The rendezvous store of the ranks. A store serves one job: use a new prefix for the next."""
    device: str
    """"cpu" or "cuda" (also ROCm)."""
    oversubscribed: bool
    """Whether ranks share devices. Such a measurement is never ranked."""
    peak_tflops_per_device: float | None
    """The denominator of mfu; None: rank 0 looks it up or measures it before the first step."""
    peak_source: str
    """The source of the peak; stored with the measurement."""
    product_layouts: Sequence[Sequence[Any]] = ()
    """Rows of `products.to_rows`; those of rank 0 count."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSettings:
    """The settings that a probe and a training job have in common."""

    model: ModelShape
    layout: Layout
    seed: int
    optimizer: OptimizerSettings
    memory_limit_bytes: int | None = None
    timeout_s: float = 1800.0
    """How long a collective waits for a peer."""
    balanced_routing: bool = False
    """Whether each expert gets the same number of tokens, in place of what the router chooses."""
    options: TrainerOptions = DEFAULT_OPTIONS
    """The knobs of the job."""


def open_training(settings: TrainingSettings, ctx: RankContext) -> Training:
    """Initialises the process groups, sets the memory limit, and builds this rank's model.

    Raises:
        LayoutUnsupportedError: the trainer cannot run the layout.
        RankContextInvalidError: the ranks do not fit the layout, or the machine has no such device.
        MemoryLimitExceededError: weights, gradients and optimizer states alone are over the limit.
        CompilerMissingError: compilation was requested, and torch has no compiler.
        TrainerOptionInvalidError: a knob that the job states changes nothing here, or the ranks of
            a host have more threads than cores.
    """
    options = settings.options
    refuse_unsupported(settings.layout, settings.model)
    device = _prepare_device(ctx)
    # The compiler is imported before the limit is set: it is not memory of the layout.
    kernels = compiled_kernels(device.type) if options.compile else EAGER
    timeout = timedelta(seconds=settings.timeout_s)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=ctx.store,
        rank=ctx.rank,
        world_size=ctx.world_size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    if options.threads > 1 and device.type == "cpu":
        _use_threads(options.threads)
    layouts = _agreed_layouts(ctx)
    use_layouts(layouts if options.products == "measured" else {})
    mesh = build_mesh(
        ctx.rank,
        settings.layout,
        tied_embeddings=settings.model.tied_embeddings,
        has_experts=settings.model.num_experts > 0,
        timeout=timeout,
        options=options,
    )
    if settings.memory_limit_bytes is not None:
        need_bytes = persistent_bytes(settings.model, mesh, settings.optimizer)
        refuse_over_limit(
            need_bytes,
            settings.memory_limit_bytes,
            rank=ctx.rank,
            what="weights, gradients and optimizer states",
        )
        enforce_limit(settings.memory_limit_bytes, device)
    training = Training(
        settings.model,
        mesh,
        seed=settings.seed,
        device=device,
        settings=settings.optimizer,
        balanced_routing=settings.balanced_routing,
    )
    use_kernels(training.model, kernels)
    if settings.layout.job:
        in_effect = options_in_effect(training, has_layouts=bool(layouts))
        refuse_without_effect(settings.layout.job, in_effect)
        if ctx.rank == 0:
            _log(f"trains with {JobSettings(in_effect).words}")
    return training


def _log(line: str) -> None:
    """Writes a line into the log of the rank, which the outcome keeps."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def _use_threads(threads: int) -> None:
    """Gives this rank its threads; refuses more than the cores of the ranks of its host.

    Threads that share a core wait for each other in every operator. Communicates: an all-gather of
    host and cores over all ranks.
    """
    own = sorted(os.sched_getaffinity(0))
    every = gather_documents([host_identity(), own], torch.device("cpu"))
    here = [set(cores) for host, cores in every if host == host_identity()]
    together = set[int]().union(*here)
    # A container's CPU quota may be below the number of cores that its processes see.
    cores = usable_cores() if together == set(own) else len(together)
    if len(here) * threads > cores:
        raise TrainerOptionInvalidError(
            f"threads={threads} of each of {len(here)} ranks are {len(here) * threads} threads on "
            f"a host where they have {cores} cores; use at most {max(cores // len(here), 1)}"
        )
    torch.set_num_threads(threads)


def _agreed_layouts(ctx: RankContext) -> dict[Product, str]:
    """Rank 0's layouts of matrix products, on every rank, so that all sum in the same order."""
    if ctx.rank == 0:
        ctx.store.set(_PRODUCT_LAYOUTS, json.dumps(list(ctx.product_layouts)))
        if ctx.product_layouts:
            _log(f"calibrated layouts of matrix products: {ctx.product_layouts}")
    return from_rows(json.loads(ctx.store.get(_PRODUCT_LAYOUTS)))


def unsupported(layout: Layout, model: ModelShape) -> list[str]:
    """The reasons why the trainer cannot run the layout with this model; empty if it can.

    These are the legality rules of the search space with the scopes model and trainer, which do not
    depend on the cluster.
    """
    return violations(layout, model, detect_local_cpu(), scopes={"model", "trainer"})


def refuse_unsupported(layout: Layout, model: ModelShape) -> None:
    """Raises LayoutUnsupportedError, with every reason, if the trainer cannot run the layout."""
    if reasons := unsupported(layout, model):
        raise LayoutUnsupportedError("; ".join(reasons))


def _prepare_device(ctx: RankContext) -> torch.device:
    if ctx.device == "cpu":
        torch.set_num_threads(1)  # unless the job's option says another number
        torch.set_flush_denormal(True)  # arithmetic with denormal numbers is fifty times slower
        return torch.device("cpu")
    if ctx.device != "cuda":
        raise RankContextInvalidError(f"device={ctx.device!r} is not one of cpu, cuda")
    num_devices = torch.cuda.device_count()
    if num_devices == 0:
        raise RankContextInvalidError(
            f"rank {ctx.rank} is to run on cuda and torch {torch.__version__} sees no device here; "
            "name the cluster that this machine is (local-cpu), or install a torch for its GPUs"
        )
    device = torch.device("cuda", ctx.local_rank % num_devices)
    torch.cuda.set_device(device)
    return device


def peak_of(ctx: RankContext, settings: TrainingSettings) -> tuple[float, str]:
    """The device peak and its source: the context's, or else what rank 0 looks up or measures.

    A measured peak of the context is that of one thread. Other ranks get NaN where rank 0 measures;
    they wait for it in the first step.
    """
    of_one_thread = ctx.device == "cpu" and ctx.peak_source.startswith(MEASURED_PEAK)
    is_too_low = of_one_thread and settings.options.threads > 1
    if ctx.peak_tflops_per_device is not None and not is_too_low:
        return ctx.peak_tflops_per_device, ctx.peak_source
    if ctx.rank == 0:
        return matmul_peak(ctx.device, settings.layout.precision)
    return float("nan"), ""
