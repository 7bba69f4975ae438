"""SIGKILL of each process of a worker's own Ray node, and how long the node is away."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import psutil

from benchmarks.service.live_service import WaitedInVainError, wait_until
from layout_tuner.workers.launchers.launcher_nodes import LaunchedNodes

RAYS: Final = {
    "gcs_server": "ray/gcs/gcs_server",
    "raylet": "ray/raylet/raylet",
    "dashboard agent": "ray::DashboardAgent",
    "runtime-env agent": "ray::RuntimeEnvAgent",
    "ray start": "ray.scripts.scripts",
    "node agent": "ray::RayAgent",
}
"""By kind, a text in the command line of its process. Our Ray has no monitor, no log monitor
and no API server."""
OURS: Final = {
    "bridge": "layout_tuner.workers.launchers.ray.bridge",
    "zygote": "layout_tuner.workers.ranks.zygote",
}
_WARDEN: Final = "layout_tuner.workers.ranks.warden"
WARDENS: Final = tuple(f"warden of {kind}" for kind in ("bridge", "ray start", "zygote"))


def pids_by_kind() -> dict[str, int]:
    """Pids of all processes below this one; those of no known kind by their command lines."""
    found: dict[str, int] = {}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            words = " ".join(process.cmdline())
            if "ray/dashboard/dashboard.py" in words:
                continue  # the launcher ends it after the start
            kinds = [kind for kind, text in (RAYS | OURS).items() if text in words]
            name = ("warden of " if _WARDEN in words else "") + kinds[0] if kinds else words
            found[name] = process.pid
    return found


def away_after_kill_s(nodes: LaunchedNodes, kind: str, run: Callable[[], bool]) -> float:
    """Kills a process of the node and waits; seconds until ranks have run there again.

    Raises:
        NodeLostError: the node does not come back in the time that a worker waits for it.
        WaitedInVainError: its loss is not noticed, or `run` was false once it was back.
    """
    started = time.monotonic()
    os.kill(pids_by_kind()[kind], signal.SIGKILL)
    wait_until("the loss is noticed", nodes.lost, pause_s=0.01)
    nodes.recover(0)
    if not run():
        raise WaitedInVainError(f"ranks fail on the node after the end of its {kind}")
    return time.monotonic() - started
