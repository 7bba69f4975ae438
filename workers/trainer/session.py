"""A rank's session: from a bare process to a model that can take steps."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import distributed as dist

from search_spaces.layout import Layout
from search_spaces.model_shape import ModelShape
from workers.trainer.capabilities import refuse_unsupported
from workers.trainer.compiled import compiled_kernels, use_kernels
from workers.trainer.context import RankContext
from workers.trainer.errors import RankContextInvalidError
from workers.trainer.kernels import EAGER
from workers.trainer.memory import enforce_limit, refuse_over_limit
from workers.trainer.mesh import build_mesh
from workers.trainer.optimizer import OptimizerSettings
from workers.trainer.peak import matmul_peak
from workers.trainer.training import Training, persistent_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionSettings:
    """What a probe and a training job have in common."""

    model: ModelShape
    layout: Layout
    seed: int
    optimizer: OptimizerSettings
    memory_limit_bytes: int | None = None
    timeout_s: float = 1800.0
    """How long a collective waits for a peer."""
    compile: bool = False
    """Whether what lies between the products goes through torch.compile; a GPT has nothing there
    that is not one kernel already."""


def open_training(settings: SessionSettings, ctx: RankContext) -> Training:
    """Brings the process group up, sets the memory limit, and builds this rank's model.

    Raises:
        LayoutUnsupportedError: the trainer cannot run the layout.
        RankContextInvalidError: the ranks do not fit the layout, or the machine has no such device.
        MemoryLimitExceededError: weights, gradients and optimizer states alone are over the limit.
        CompilerMissingError: compilation was asked for, and torch has nothing to compile with.
    """
    refuse_unsupported(settings.layout, settings.model)
    device = _prepare_device(ctx)
    # Before the limit is set: the compiler's modules are none of the layout's memory.
    kernels = compiled_kernels(device.type) if settings.compile else EAGER
    timeout = timedelta(seconds=settings.timeout_s)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=ctx.store,
        rank=ctx.rank,
        world_size=ctx.world_size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    mesh = build_mesh(
        ctx.rank,
        settings.layout,
        tied_embeddings=settings.model.tied_embeddings,
        timeout=timeout,
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
        settings.model, mesh, seed=settings.seed, device=device, settings=settings.optimizer
    )
    use_kernels(training.model, kernels)
    return training


def _prepare_device(ctx: RankContext) -> torch.device:
    if ctx.device == "cpu":
        torch.set_num_threads(1)  # one rank a core: more threads fight over it
        torch.set_flush_denormal(True)  # else small exponentials and moments cost fifty times more
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


def peak_of(ctx: RankContext, layout: Layout) -> tuple[float, str]:
    """The peak that the context states; else rank 0 finds it, before its peers are let on."""
    if ctx.peak_tflops_per_device is not None:
        return ctx.peak_tflops_per_device, ctx.peak_source
    if ctx.rank == 0:
        return matmul_peak(ctx.device, layout.precision)
    return float("nan"), ""
