"""Slurm: calls of its programs, the job of this process, and the allocations in the queue."""

from __future__ import annotations

import logging
import os
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from layout_tuner.documents.duration import read_walltime_s, slurm_time
from layout_tuner.errors import SiteInvalidError
from layout_tuner.workers.errors import JobNotOursError, SlurmRefusedError, SlurmUnavailableError
from layout_tuner.workers.slurm.request import MARK

_LOG = logging.getLogger(__name__)

_ANSWER_WITHIN_S: Final = 60.0
_ELSEWHERE: Final[Mapping[str, str]] = {
    "sbatch": ", or use --dry-run and hand the script to sbatch there"
}
"""Alternatives where a program is not installed."""
_AWAY: Final = (
    "Unable to contact slurm controller",
    "Could not establish a configuration source",
    "Communication connection failure",
    "Connection refused",
    "Socket timed out",
    "Zero Bytes were transmitted",
)

_UNBOUNDED: Final = ("UNLIMITED", "NOT_SET", "INVALID", "")
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


def call(*command: str, environ: Mapping[str, str] | None = None, given: str | None = None) -> str:
    """Runs a program of Slurm with a text as its input; returns what it prints.

    Raises:
        SlurmUnavailableError: it is not installed here, or Slurm's controller does not answer.
        SlurmRefusedError: the program fails; the message is its own.
    """
    environment = dict(os.environ if environ is None else environ)
    try:
        done = subprocess.run(
            command,
            env={**environment, "SLURM_TIME_FORMAT": "standard", "LC_ALL": "C"},
            input=given or "",
            capture_output=True,
            text=True,
            timeout=_ANSWER_WITHIN_S,
            check=False,
        )
    except FileNotFoundError as error:
        raise SlurmUnavailableError(
            f"there is no Slurm here ({command[0]} is not installed): run this on a login node of the "
            f"cluster{_ELSEWHERE.get(command[0], '')}"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise SlurmUnavailableError(
            f"Slurm does not answer: {command[0]} took more than {_ANSWER_WITHIN_S:g} s; try again later"
        ) from error
    if done.returncode == 0:
        return done.stdout
    printed = " / ".join(line for line in done.stderr.splitlines() if line.strip())[:1000]
    if any(words in done.stderr for words in _AWAY):
        raise SlurmUnavailableError(f"Slurm does not answer: {printed}; try again later")
    raise SlurmRefusedError(
        f"{command[0]} refuses ({done.returncode}): {printed or 'without a message'}"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmAllocation:
    """A running job and its nodes."""

    job_id: str
    """Slurm's number of the job."""
    node_names: tuple[str, ...]
    """Its nodes, in Slurm's order; the batch script runs on the first."""


def current_allocation(environ: Mapping[str, str]) -> SlurmAllocation | None:
    """The job whose environment this is; None outside of a job.

    Raises:
        SlurmUnavailableError: this is a job's environment, but Slurm's programs are not installed.
        SlurmRefusedError: Slurm does not know the nodes that the environment names.
    """
    job_id = environ.get("SLURM_JOB_ID")
    if not job_id:
        return None
    nodes = call(
        "scontrol", "show", "hostnames", environ.get("SLURM_JOB_NODELIST", ""), environ=environ
    )
    return SlurmAllocation(job_id=job_id, node_names=tuple(nodes.split()))


def ends_in_s(job_id: str, environ: Mapping[str, str]) -> float | None:
    """Seconds until the job's wall time is over, by Slurm's clock; None: unknown, or no end.

    The limit of a running job may be changed, so callers ask again. Where Slurm's controller does
    not answer, newer versions of Slurm have the end in the environment.
    """
    try:
        left = call("squeue", "-h", "-j", job_id, "-o", "%L", environ=environ).strip()
    except (SlurmUnavailableError, SlurmRefusedError) as error:
        _LOG.warning("the end of job %s is not known: %s", job_id, error)
        ends_at = environ.get("SLURM_JOB_END_TIME", "")
        return max(0.0, int(ends_at) - time.time()) if ends_at.isdecimal() else None
    if left in _UNBOUNDED:
        return None
    try:
        return read_walltime_s(left, field="squeue %L")
    except SiteInvalidError as error:
        _LOG.warning("the end of job %s is not known: %s", job_id, error)
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """An allocation, as Slurm's queue shows it."""

    job_id: str
    name: str
    cluster: str
    state: str
    """Slurm's name of the state: PENDING, RUNNING, ..."""
    num_nodes: int
    used: str
    """Run time, as Slurm writes times."""
    left: str
    """Time until its limit."""
    limit: str
    nodes_or_reason: str
    """Its nodes; or why it waits."""


def list_jobs() -> list[Job]:
    """This user's waiting and running allocations; SlurmUnavailableError without Slurm."""
    lines = call(*_SQUEUE, "-u", str(os.getuid()), "-o", _FORMAT).splitlines()
    return [job for line in lines if (job := _read(line)) is not None]


def job_of_allocation(allocation: Mapping[str, Any]) -> Job:
    """The row of an allocation that the service describes."""
    used_s = (
        datetime.now(UTC) - datetime.fromisoformat(allocation["registered_at"])
    ).total_seconds()
    left_s = allocation["seconds_left"]
    return Job(
        job_id=allocation["job_id"] or "-",
        name=allocation["name"],
        cluster=allocation["cluster"],
        state=allocation["state"],
        num_nodes=allocation["num_nodes"],
        used=slurm_time(max(used_s, 0.0)),
        left="-" if left_s is None else slurm_time(left_s),
        limit="-" if left_s is None else slurm_time(max(used_s, 0.0) + left_s),
        nodes_or_reason=",".join(node["name"] for node in allocation["nodes"])
        or allocation["host"],
    )


def cancel(job_id: str, *, now: bool = False) -> Job:
    """Ends an allocation: at once where it waits, by a signal to its worker where it runs.

    The worker then ends its probes, posts its outcomes and gives its trials back; the job ends
    within a minute.

    With `now` the job is killed; its leases expire later.

    Raises:
        JobNotOursError: it is not an allocation of this user, or has ended.
        SlurmUnavailableError: Slurm is not installed here, or does not answer.
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
            f"job {job_id} is not an allocation that you submitted with layout-tuner: if it is yours, end "
            "it with scancel"
        )
    if job.state in _ENDED:
        raise JobNotOursError(f"job {job_id} has ended already ({job.state})")
    return job


def _read(line: str) -> Job | None:
    """Reads a line of squeue; None: the job was not submitted with layout-tuner."""
    fields = line.split("|", 9)
    if len(fields) != 10:  # the comment or name of another user's job has a bar
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
