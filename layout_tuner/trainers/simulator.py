"""The simulator in the place of a trainer: the mark of everything that was simulated.

Simulated workers (`layout-tuner worker --simulate`) measure nothing. Their campaigns, measurements
and tables name the simulator as their trainer, with its version. The simulator counts as a trainer
of its own, so simulated and measured results are never mixed, nor those of two versions of the
simulator.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from layout_tuner.trainers.embedded import EMBEDDED_TRAINER

SIMULATOR_VERSION: Final = 2
"""Version of the simulator: it changes where the same cluster, layout and seed give other
figures."""

SIMULATOR_PREFIX: Final = "simulator-"
"""The beginning of the simulator's name as a trainer; its version follows."""

SIMULATED_LAUNCHER: Final = "simulated"
"""Launcher of workers that simulate their nodes."""

SIMULATED: Final = "simulated"
"""The beginning of the source of a simulated table."""


def simulator_trainer(version: int = SIMULATOR_VERSION) -> str:
    """The simulator's name as a trainer."""
    return f"{SIMULATOR_PREFIX}{version}"


def is_simulator(trainer: str) -> bool:
    return trainer.startswith(SIMULATOR_PREFIX)


def says_simulated(source: str) -> bool:
    """Whether the source of a table says that it is simulated, in capitals or not."""
    return source.casefold().startswith(SIMULATED)


def trainers_run(launcher: str, listed: Collection[str]) -> frozenset[str]:
    """The trainers that a worker runs, by its launcher and the trainers that it lists."""
    if launcher == SIMULATED_LAUNCHER:
        return frozenset(filter(is_simulator, listed))
    return frozenset((EMBEDDED_TRAINER, *(name for name in listed if not is_simulator(name))))
