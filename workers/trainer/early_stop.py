"""Whether a probe ends here: rank 0 looks between two timed iterations, every rank hears the same."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import distributed as dist

from search_spaces.early_stop import LEAST_TIMED, shows_enough
from workers.trainer.timing import TimedStep
from workers.trainer.training import Training


def stops_here(steps: Sequence[TimedStep], than_s: float, training: Training) -> bool:
    """Whether these timed iterations show that the layout is slower than `than_s`.

    Communicates one number from rank 0 to all, after the clock of one iteration has stopped and before
    the next one's starts; nothing before the first look. Ranks could decide alone, since a step time is
    that of the slowest one on every rank, but the last bit of a logarithm depends on the machine.
    """
    if len(steps) < LEAST_TIMED:
        return False
    verdict = torch.zeros(1, dtype=torch.int64, device=training.device)
    if training.mesh.rank == 0:
        # Skipped steps are no training; were all of them skipped, the probe would not even count.
        was_trained = any(not step.stats.is_skipped for step in steps)
        verdict += was_trained and shows_enough([step.step_time_s for step in steps], than_s)
    dist.broadcast(verdict, src=0)
    return bool(verdict.item())
