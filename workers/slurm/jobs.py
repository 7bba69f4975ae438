"""This user's allocations in Slurm's queue: found by their comment, and ended in order."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

from workers.slurm.errors import JobNotOursError, SlurmRefusedError
from workers.slurm.programs import call
from workers.slurm.request import MARK

_SQUEUE: Final = ("squeue", "-h", "--noconvert")  # 1024 nodes are "1K" otherwise
_FORMAT: Final = "%i|%U|%T|%M|%L|%l|%D|%k|%j|%R"
_ENDED: Final = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
        "TIMEOUT",
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """An allocation, as Slurm's queue shows it."""

    job_id: str
    name: str
    cluster: str
    """The cluster that its worker registers as."""
    state: str
    """In Slurm's words: PENDING, RUNNING, ..."""
    num_nodes: int
    used: str
    """Time that it has run, as Slurm writes times."""
    left: str
    """Time until its limit."""
    limit: str
    """Its limit."""
    nodes_or_reason: str
    """Its nodes; why it waits, where it does."""

    @property
    def has_ended(self) -> bool:
        """Whether nothing of it runs or will."""
        return self.state in _ENDED


def list_jobs() -> list[Job]:
    """The allocations of this user that wait or run.

    Raises:
        SlurmUnavailableError: there is no Slurm here, or it does not answer.
    """
    lines = call(*_SQUEUE, "-u", str(os.getuid()), "-o", _FORMAT).splitlines()
    return [job for line in lines if (job := _read(line)) is not None]


def cancel(job_id: str, *, now: bool = False) -> Job:
    """Ends an allocation: one that waits at once, one that runs by telling its worker.

    The worker ends its probes, posts what it has and gives its trials back; then the job ends by itself,
    within a minute.

    Args:
        job_id: as Slurm counts them.
        now: kill it, and let the service find out.

    Raises:
        JobNotOursError: it is not an allocation of this user's, or has ended.
        SlurmUnavailableError: there is no Slurm here, or it does not answer.
    """
    job = _find(job_id)
    if now or job.state != "RUNNING":
        call("scancel", job_id)
    else:
        call("scancel", "--batch", "--signal=TERM", job_id)
    return job


def _find(job_id: str) -> Job:
    if not job_id.isdecimal():
        raise JobNotOursError(
            f"{job_id!r} is not the number of a job; `allocation list` shows them"
        )
    unknown = (
        f"there is no job {job_id} in the queue; `allocation list` shows those that wait or run"
    )
    try:
        lines = call(*_SQUEUE, "-t", "all", "-j", job_id, "-o", _FORMAT).splitlines()
    except SlurmRefusedError as error:
        raise JobNotOursError(unknown) from error
    if not lines:
        raise JobNotOursError(unknown)
    job = _read(lines[0])
    if job is None or lines[0].split("|")[1] != str(os.getuid()):
        raise JobNotOursError(
            f"job {job_id} is not an allocation that you submitted with layout-tuner: end it with scancel, "
            "if it is yours"
        )
    if job.has_ended:
        raise JobNotOursError(f"job {job_id} has ended already ({job.state})")
    return job


def _read(line: str) -> Job | None:
    """A line of squeue's; None: the job is none of ours."""
    fields = line.split("|", 9)
    if len(fields) != 10:  # another user's comment or name has a bar in it
        return None
    job_id, _, state, used, left, limit, nodes, comment, name, place = fields
    mark, _, cluster = comment.partition(":")
    if mark != MARK:
        return None
    return Job(
        job_id=job_id,
        name=name,
        cluster=cluster,
        state=state,
        num_nodes=int(nodes),
        used=used,
        left=left,
        limit=limit,
        nodes_or_reason=place,
    )
