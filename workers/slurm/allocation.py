"""The Slurm job that this process runs in."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from workers.slurm.errors import SiteInvalidError, SlurmRefusedError, SlurmUnavailableError
from workers.slurm.programs import call
from workers.slurm.walltime import read_walltime_s

_LOG = logging.getLogger(__name__)
_UNBOUNDED: Final = ("UNLIMITED", "NOT_SET", "INVALID", "")


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmAllocation:
    """A running job, as it is when somebody looks."""

    job_id: str
    """As Slurm counts them."""
    node_names: tuple[str, ...]
    """Its nodes, in Slurm's order; the batch script runs on the first."""
    ends_in_s: float | None
    """Seconds until its wall time is over; None: it has no end, or nobody knows it."""


def current_allocation(environ: Mapping[str, str]) -> SlurmAllocation | None:
    """The job whose environment this is; None outside of one.

    Raises:
        SlurmUnavailableError: the environment says so, and Slurm's programs are not here.
        SlurmRefusedError: Slurm does not know what the environment names.
    """
    job_id = environ.get("SLURM_JOB_ID")
    if not job_id:
        return None
    nodes = call(
        "scontrol", "show", "hostnames", environ.get("SLURM_JOB_NODELIST", ""), environ=environ
    )
    return SlurmAllocation(
        job_id=job_id,
        node_names=tuple(nodes.split()),
        ends_in_s=ends_in_s(job_id, environ),
    )


def ends_in_s(job_id: str, environ: Mapping[str, str]) -> float | None:
    """Seconds until the job's wall time is over, by Slurm's own clock; None: nobody knows.

    The limit of a running job may be changed, so this is worth asking again. Where Slurm's controller
    is away, the environment may tell (in newer versions of Slurm).
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
