"""The job of a rank that runs a program, as it is sent to its node."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Self

from workers.ranks.rank_task import RankTask

PROGRAM: Final = "program"
"""Kind of the job."""

SCRATCH_VARIABLE: Final = "LAYOUT_TUNER_SCRATCH"
"""Directory of a node's ranks, which its warden removes at the end."""


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
        """What a rank runs."""
        values = task.job[PROGRAM]
        return cls(**{**values, "command": tuple(values["command"])})

    def to_job(self) -> dict[str, Any]:
        """The job of a rank."""
        return {"kind": PROGRAM, PROGRAM: asdict(self)}


def directory_of(task: RankTask) -> Path:
    """The directory of a rank's program on its node; it is removed when its group has ended."""
    scratch = os.environ.get(SCRATCH_VARIABLE) or tempfile.gettempdir()
    return Path(scratch) / f"probe-{task.group}" / str(task.rank)


def make_directory(task: RankTask) -> Path:
    """Makes the directory of a rank's program, which only this user can read."""
    directory = directory_of(task)
    for each in (directory.parents[1], directory.parent, directory):
        each.mkdir(mode=0o700, exist_ok=each != directory)
    return directory


def remove_directories(task: RankTask) -> None:
    """Removes the directories of a group's programs on this node, where it ran any."""
    if task.job["kind"] != PROGRAM:
        return
    ours = directory_of(task).parent
    for folder, inner, _ in os.walk(ours):  # a program may have locked some
        for path in (Path(folder, name) for name in inner):
            with suppress(OSError):
                if not path.is_symlink():
                    path.chmod(0o700)
    shutil.rmtree(ours, ignore_errors=True)
