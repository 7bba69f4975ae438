"""A worker of this machine, put together: the service, the spool, Ray, and the loop over them."""

from __future__ import annotations

import hashlib
import logging
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from search_spaces.presets.clusters import resolve_cluster
from workers.drain import Drain
from workers.launchers.base import Launcher
from workers.lease_client import LeaseClient
from workers.outbox import Outbox
from workers.protocol import WorkerIdentity
from workers.rank_task import RANK_ENTRY
from workers.revision import software_versions
from workers.scheduler import SchedulerOptions
from workers.spool import Spool
from workers.worker import Worker

_LOG = logging.getLogger(__name__)

_DRAIN_S: Final = 30.0


def work(
    *,
    url: str,
    token: str,
    described_cluster: str | Mapping[str, Any],
    name: str | None,
    spool_dir: Path | None,
    patience_s: float,
    rank_entry: str = RANK_ENTRY,
) -> None:
    """Works until SIGTERM or SIGINT.

    Args:
        url: of the service.
        token: that the service accepts.
        described_cluster: preset that this machine is, or a description of it.
        name: of the worker; None: the host's.
        spool_dir: where outcomes wait; None: a place that follows from the service and the name.
        patience_s: how long the service may be away at the start.
        rank_entry: "module:function" that a rank runs.

    Raises:
        WorkerError: the worker can't start, or can't go on.
        SearchSpaceError: the cluster is unknown or impossible here.
    """
    cluster, warning = resolve_cluster(described_cluster)
    if warning is not None:
        _LOG.warning(warning)
    host = socket.gethostname()
    identity = WorkerIdentity(
        name=name or host,
        host=host,
        cluster=cluster.name,
        num_nodes=1,
        devices_per_node=cluster.devices_per_node,
        device=cluster.device,
        versions=software_versions(),
    )

    def start_launcher() -> Launcher:
        from workers.launchers.ray import ray_launcher

        return ray_launcher(cluster, rank_entry=rank_entry)

    devices_are_cores = "cpu" in cluster.device.lower()
    drain = Drain()
    drain.listen()
    directory = spool_dir or _default_spool(url, identity.name)
    with LeaseClient(url, token) as client, Spool(directory) as spool:
        worker = Worker(
            client=client,
            identity=identity,
            start_launcher=start_launcher,
            outbox=Outbox(client, spool),
            drain=drain,
            options=SchedulerOptions(
                share_nodes=not devices_are_cores,
                drain_s=_DRAIN_S,
                devices_are_cores=devices_are_cores,
            ),
        )
        worker.run(patience_s=patience_s)


def _default_spool(url: str, name: str) -> Path:
    """A directory of this service and worker: trial ids mean nothing to another service."""
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    service = hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:12]
    return state / "layout-tuner" / "spool" / f"{name}-{service}"
