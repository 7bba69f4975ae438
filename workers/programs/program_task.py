"""The job of a rank that runs a program, as it is sent to its node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from workers.ranks.rank_task import RankTask
from workers.ranks.scratch import PROGRAM


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramTask:
    """What a rank runs: templates of the trainer's entry, and the values for them."""

    command: tuple[str, ...]
    """Container, program and arguments; placeholders are not filled."""
    environment: Mapping[str, str]
    """Variables; placeholders are not filled."""
    working_directory: str
    """Empty: the rank's own directory."""
    values: Mapping[str, str]
    """Values of the placeholders that are the same for every rank."""
    configuration: Mapping[str, Any]
    """The adapter's configuration of the layout, for {values_file}."""
    step_pattern: str
    """How the program prints its steps; empty: it does not."""
    paths: Mapping[str, str]
    """The directory that each path among the values must lie in, by the value's name."""
    memory_limit_bytes: int | None
    """Memory of each rank's device; None: no limit."""

    @classmethod
    def of(cls, task: RankTask) -> Self:
        values = task.job[PROGRAM]
        return cls(**{**values, "command": tuple(values["command"])})

    def to_job(self) -> dict[str, Any]:
        return {"kind": PROGRAM, PROGRAM: asdict(self)}
