"""Training on whichever device a test is given: the same bodies run on CPU ranks and on GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from search_spaces.spec.layout import Layout
from search_spaces.spec.model_shape import ModelShape
from tests.workers.trainer.cases import ADAMW
from tests.workers.trainer.ranks import make_context, run_ranks
from workers.trainer.open_training import TrainingSettings, open_training
from workers.trainer.parallel.optimizer import OptimizerSettings
from workers.trainer.training import Training


def on_gpus(num_devices: int, *values: object) -> Any:
    """A parameter of a test for a machine that has so many GPUs, marked and skipped elsewhere."""
    found = torch.cuda.device_count()
    missing = pytest.mark.skipif(
        found < num_devices,
        reason=f"needs a GPU for each of {num_devices} ranks; torch {torch.__version__} sees {found}",
    )
    return pytest.param(*values, marks=[pytest.mark.gpu, missing])


DEVICES = pytest.mark.parametrize("device", ["cpu", on_gpus(1, "cuda")])
"""Runs a test on the CPU, and on a GPU where there is one."""


def on_ranks(
    shape: ModelShape,
    layout: Layout,
    device: str,
    work: Callable[[Training], Any],
    *,
    settings: OptimizerSettings = ADAMW,
    memory_limit_bytes: int | None = None,
) -> list[Any]:
    """What `work` returns on each rank, whose training is opened as a probe opens it."""

    def run(rank: int, store: Any) -> Any:
        opened = TrainingSettings(
            model=shape,
            layout=layout,
            seed=0,
            optimizer=settings,
            memory_limit_bytes=memory_limit_bytes,
        )
        # More than any device has.
        peak = {"device": device, "peak_tflops_per_device": 1e4}
        context = make_context(rank, layout.num_devices, store, **peak)
        return work(open_training(opened, context))

    return run_ranks(layout.num_devices, run, own_group=True)


def train_on(
    device: str, shape: ModelShape, layout: Layout, *, steps: int
) -> tuple[list[float], list[float]]:
    """Losses and gradient norms, which every rank must agree on."""

    def work(training: Training) -> list[tuple[float, float]]:
        stats = [training.step(training.batch(index)) for index in range(steps)]
        return [(step.loss, step.grad_norm) for step in stats]

    results = on_ranks(shape, layout, device, work)
    assert all(result == results[0] for result in results), "ranks disagree on the global batch"
    losses, grad_norms = zip(*results[0], strict=True)
    return list(losses), list(grad_norms)
