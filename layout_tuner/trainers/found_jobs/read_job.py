"""Reads the jobs of a file, whatever its format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from layout_tuner.terminal.plurals import listed
from layout_tuner.trainers.found_jobs import nanotron, script_jobs, torchtitan
from layout_tuner.trainers.found_jobs.found_job import FoundJob, JobFileInvalidError
from layout_tuner.trainers.found_jobs.job_file import JobFile
from layout_tuner.trainers.found_jobs.megatron import megatron_jobs
from layout_tuner.trainers.found_jobs.own_scripts import accelerate, deepspeed, our_exports
from layout_tuner.trainers.found_jobs.recipes import bridge, primus

Reader = Callable[[JobFile], Sequence[FoundJob] | None]
"""Reads the jobs of a file of one format; None: the file has another format."""

READERS: Final[Sequence[Reader]] = (
    primus.read_config,
    our_exports.read_config,
    deepspeed.read_config,
    accelerate.read_config,
    bridge.read_config,
    megatron_jobs.read_config,
    torchtitan.read_config,
    nanotron.read_config,
    script_jobs.read_script,
)
"""In the order in which they are tried."""


def read_jobs(file: JobFile) -> Sequence[FoundJob]:
    """The jobs of a file.

    Raises:
        JobFileInvalidError: no format fits, or the file contradicts its format.
    """
    for reader in READERS:
        if (found := reader(file)) is not None:
            return found
    if all(f'"{key}"' in file.text for key in ("model_type", "architectures")):
        raise JobFileInvalidError(
            f"{file.name}: it is a model: give it with --model beside the job's file"
        )
    raise JobFileInvalidError(
        f"{file.name}: no job was found in it; known are launch scripts of Megatron-LM, "
        "Megatron-DeepSpeed, DeepSpeed and Accelerate, and the configurations of Megatron-Bridge, "
        "Primus, torchtitan (TOML), nanotron, DeepSpeed, Accelerate and layout-tuner train"
    )


def read_job(file: JobFile, name: str = "") -> FoundJob:
    """The one job of a file, or the one of this name; JobFileInvalidError names the others."""
    found = read_jobs(file)
    chosen = [each for each in found if not name or each.name == name]
    if len(chosen) == 1:
        return chosen[0]
    names = listed([each.name for each in found], 10)
    if name:
        raise JobFileInvalidError(f"{file.name} has no job {name}; its jobs are {names}")
    raise JobFileInvalidError(
        f"{file.name} starts {len(found)} jobs: choose one with --job, of {names}"
    )
