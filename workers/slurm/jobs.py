"""Slurm: calls of its programs, the job of this process, and the allocations in the queue."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import time
from collections.abc import Iterator, Mapping
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
    "temporarily unable to accept job",
    "Resource temporarily unavailable",
)

_NO_DATABASE: Final = ("There is a problem talking to the database", "Could not get cluster info")
"""Printed where SLURM_CLUSTERS names a cluster, and slurmdbd does not know it or is away."""

_FILTERS: Final = ("SQUEUE_", "SCANCEL_")
"""Variables by which users filter, sort and format what these programs do; some hide a job."""
_CLUSTERS: Final = "SLURM_CLUSTERS"
_CLUSTER_LINE: Final = "CLUSTER: "
"""Begins the line before a cluster's jobs, where SLURM_CLUSTERS is set; up to Slurm 19.05 -h does
not suppress it (src/squeue/squeue.c)."""

_UNBOUNDED: Final = ("UNLIMITED", "NOT_SET", "INVALID", "")
_SQUEUE: Final = ("squeue", "--noconvert")  # 1024 nodes are "1K" otherwise
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

    The user's filters of squeue and scancel have no effect on it.

    Raises:
        SlurmUnavailableError: it is not installed here, or Slurm's controller does not answer.
        SlurmRefusedError: the program fails; the message is its own.
    """
    given_environ = os.environ if environ is None else environ
    environment = {k: v for k, v in given_environ.items() if not k.startswith(_FILTERS)}
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
    if any(words in done.stderr for words in _NO_DATABASE) and environment.get(_CLUSTERS):
        raise SlurmUnavailableError(
            f"Slurm does not find {_CLUSTERS}={environment[_CLUSTERS]}: {printed}; unset it, or name "
            "clusters that `sacctmgr show clusters` lists"
        )
    if any(words in done.stderr for words in _AWAY):
        raise SlurmUnavailableError(f"Slurm does not answer: {printed}; try again later")
    raise SlurmRefusedError(
        f"{command[0]} refuses ({done.returncode}): {printed or 'without a message'}"
    )


def inside_job(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment for Slurm's programs inside a job, whose cluster is the local one.

    SLURM_CLUSTERS is that of the shell from which the job was submitted; scontrol refuses several,
    and a node often does not reach slurmdbd.
    """
    return {name: value for name, value in environ.items() if name != _CLUSTERS}


def squeue_lines(*options: str, environ: Mapping[str, str] | None = None) -> list[str]:
    """What squeue prints of one cluster, without lines that are no jobs or steps; see `call`."""
    lines = call("squeue", "-h", *options, environ=environ).splitlines()
    return [line for line in lines if line.strip() and not line.startswith(_CLUSTER_LINE)]


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
    words = ("scontrol", "show", "hostnames", environ.get("SLURM_JOB_NODELIST", ""))
    nodes = call(*words, environ=inside_job(environ))
    return SlurmAllocation(job_id=job_id, node_names=tuple(nodes.split()))


def ends_in_s(job_id: str, environ: Mapping[str, str]) -> float | None:
    """Seconds until the job's wall time is over, by Slurm's clock; None: unknown, or no end.

    The limit of a running job may be changed, so callers ask again. Where Slurm's controller does
    not answer, newer versions of Slurm have the end in the environment.
    """
    try:
        lines = squeue_lines("-j", job_id, "-o", "%L", environ=inside_job(environ))
    except (SlurmUnavailableError, SlurmRefusedError) as error:
        _LOG.warning("the end of job %s is not known: %s", job_id, error)
        ends_at = environ.get("SLURM_JOB_END_TIME", "")
        return max(0.0, int(ends_at) - time.time()) if ends_at.isdecimal() else None
    left = lines[0].strip() if lines else ""
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
    slurm_cluster: str = ""
    """The cluster of Slurm that it is on, where SLURM_CLUSTERS names some."""


def list_jobs() -> list[Job]:
    """This user's waiting and running allocations; SlurmUnavailableError without Slurm."""
    return [job for *_, job in _jobs("-u", str(os.getuid())) if job is not None]


def _jobs(*options: str) -> Iterator[tuple[str, list[str], Job | None]]:
    """The cluster and fields of each job that squeue lists, and the allocation if it is one.

    With the header: from Slurm 20.02 on, -h suppresses the lines that say which cluster follows.
    """
    cluster = ""
    for line in call(*_SQUEUE, *options, "-o", _FORMAT).splitlines():
        if line.startswith(_CLUSTER_LINE):
            cluster = line.removeprefix(_CLUSTER_LINE).strip()
        elif line[:1].isdecimal():
            yield cluster, line.split("|"), _read(line, cluster)


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
    there = ("-M", job.slurm_cluster) if _are_several_clusters() else ()
    if now or job.state != "RUNNING":
        call("scancel", *there, job_id)
    else:
        call("scancel", *there, "--batch", "--signal=TERM", job_id)
    return job


def _are_several_clusters() -> bool:
    clusters = os.environ.get(_CLUSTERS, "")
    return "," in clusters or clusters == "all"


def _find(job_id: str) -> Job:
    if not job_id.isdecimal():
        raise JobNotOursError(
            f"{job_id!r} is not the number of a job; `allocation list` shows them"
        )
    unknown = (
        f"there is no job {job_id} in the queue; `allocation list` shows those that wait or run"
    )
    # Of several clusters all but one refuse the number.
    which = ("-u", str(os.getuid())) if _are_several_clusters() else ("-j", job_id)
    try:
        jobs = _jobs("-t", "all", *which)
        found = [each for each in jobs if re.split("[_+]", each[1][0])[0] == job_id]
    except SlurmRefusedError as error:
        raise JobNotOursError(unknown) from error
    if not found:
        raise JobNotOursError(unknown)
    if len({cluster for cluster, *_ in found}) > 1:
        raise JobNotOursError(
            f"several clusters of {_CLUSTERS} have a job {job_id}: set it to one of them"
        )
    _, fields, job = found[0]
    if job is None or fields[1] != str(os.getuid()):
        raise JobNotOursError(
            f"job {job_id} is not an allocation that you submitted with layout-tuner: if it is yours, end "
            "it with scancel"
        )
    if job.state in _ENDED:
        raise JobNotOursError(f"job {job_id} has ended already ({job.state})")
    return job


def _read(line: str, slurm_cluster: str) -> Job | None:
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
        slurm_cluster=slurm_cluster,
    )
