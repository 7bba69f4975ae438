"""A training job, under any launcher that sets the usual variables (torchrun, srun)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from workers.trainer.context import RankContext
from workers.trainer.job import TrainJob

__all__ = ["RankContext", "TrainJob", "main", "run_train"]


def run_train(
    job: TrainJob, ctx: RankContext, report: Callable[[dict[str, Any]], None]
) -> dict[str, Any] | None:
    """Runs one rank of a training job; rank 0 returns its result."""
    raise NotImplementedError


def main(arguments: list[str] | None = None) -> int:
    """`python -m workers.trainer.train --config job.json [--steps N]`."""
    raise NotImplementedError
