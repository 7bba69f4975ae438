"""Reads the environment variables that torchrun and srun set. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from layout_tuner.workers.trainer.errors import RankContextInvalidError

_FIRST_PORT: Final = 20000
_NUM_PORTS: Final = 10000
"""Ports below those that the kernel gives to outgoing connections."""


def is_rank(environment: Mapping[str, str]) -> bool:
    """Whether torchrun or srun started this process as a rank.

    A batch script also has Slurm's variables. A task of srun in addition has a step id, or
    MASTER_ADDR, and is one of several tasks.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return True
    is_task = "SLURM_PROCID" in environment and slurm_tasks(environment) > 1
    return is_task and bool({"SLURM_STEP_ID", "SLURM_STEPID", "MASTER_ADDR"} & set(environment))


def slurm_meeting_point(environment: Mapping[str, str]) -> tuple[str, int]:
    """Host and port of the rendezvous: MASTER_ADDR and MASTER_PORT, or else the step's first host.

    The default port is computed from job and step, so that two jobs on a node use different ports.

    Raises:
        RankContextInvalidError: the environment names no host, or does not say on which one rank 0
            runs.
    """
    hosts = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    host = environment.get("MASTER_ADDR") or _host_of_rank_0(environment, hosts)
    if not host:
        raise RankContextInvalidError(
            "SLURM_PROCID is set, and neither MASTER_ADDR nor SLURM_STEP_NODELIST says where the "
            "ranks meet; start them with srun, or set MASTER_ADDR"
        )
    if port := environment.get("MASTER_PORT"):
        return host, int(port)
    job, step = (_number(environment.get(name)) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return host, _FIRST_PORT + (job * 7 + step) % _NUM_PORTS


def _host_of_rank_0(environment: Mapping[str, str], hosts: str) -> str:
    """The first host of the sorted list, or with the arbitrary distribution of the file of hosts.

    In that file (`man srun`, SLURM_HOSTFILE) each task has an entry, in the order of the tasks.
    """
    first = first_host(hosts)
    if not environment.get("SLURM_DISTRIBUTION", "").startswith("arbitrary") or hosts == first:
        return first
    try:
        text = Path(environment.get("SLURM_HOSTFILE") or "-").read_text(encoding="utf-8")
    except (OSError, ValueError):
        text = ""
    entries = re.split(r"[\s,]+", re.sub(r"#.*", "", text).strip())
    first = first_host(entries[0].partition("*")[0])
    here = environment.get("SLURMD_NODENAME", first)
    if not first or (environment.get("SLURM_PROCID") == "0" and here != first):
        raise RankContextInvalidError(
            "srun --distribution=arbitrary does not say on which host rank 0 runs: set MASTER_ADDR to it"
        )
    return first


def first_host(hosts: str) -> str:
    """The first host of Slurm's compact list: `node[003-007,9],login1` begins with node003."""
    found = re.match(r"([^,\[]*)(?:\[(\d+)[^\]]*\]([^,]*))?", hosts)
    return "".join(part for part in found.groups() if part) if found else ""


def slurm_tasks(environment: Mapping[str, str]) -> int:
    """Number of tasks of the step, which may be fewer than those of the job."""
    return _number(environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS"))


def _number(text: str | None) -> int:
    return int(text) if text and text.isdecimal() else 0
