"""Builds and runs the worker of this machine or allocation: service, spool, launcher."""

from __future__ import annotations

import hashlib
import logging
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal

from layout_tuner.protocol.worker_messages import AllocationBody, NodeBody, WorkerCreate
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.clusters.cluster_presets import resolve_cluster
from layout_tuner.search_spaces.clusters.site import Site, cluster_part
from layout_tuner.trainers.program import ProgramTrainer
from layout_tuner.trainers.simulator import SIMULATED_LAUNCHER, simulator_trainer
from layout_tuner.version import missing_packages
from layout_tuner.workers.calibrate.calibration import calibrated_layouts
from layout_tuner.workers.errors import AllocationMissingError, LauncherUnavailableError
from layout_tuner.workers.launchers.group_launcher import GroupLauncher
from layout_tuner.workers.ranks.rank_task import RANK_ENTRY
from layout_tuner.workers.service.lease_client import LeaseClient
from layout_tuner.workers.simulation.simulation_settings import SimulationOptions
from layout_tuner.workers.slurm.jobs import SlurmAllocation, current_allocation, ends_in_s
from layout_tuner.workers.slurm.site_lookup import site_of
from layout_tuner.workers.slurm.topology import topology_of
from layout_tuner.workers.trainer.revision import GIT_REVISION, software_versions
from layout_tuner.workers.worker.node_health import check_nodes
from layout_tuner.workers.worker.outcome_posting import Outbox
from layout_tuner.workers.worker.outcome_spool import Spool, adopt_abandoned
from layout_tuner.workers.worker.scheduler import SchedulerOptions
from layout_tuner.workers.worker.worker import Drain, EndsIn, Worker, ends_after

if TYPE_CHECKING:
    from layout_tuner.workers.simulation.simulated_cluster import SimulatedCluster

_LOG = logging.getLogger(__name__)

_DRAIN_S: Final = 30.0

LauncherName = Literal["local", "ray", "srun"]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Machine:
    """The machine or allocation that the worker runs on."""

    cluster: Cluster
    site: Site | None
    allocation: SlurmAllocation | None
    """The Slurm job whose nodes it uses; None: it uses this node only."""
    num_nodes: int
    launcher: LauncherName
    ray_address: str | None
    """Address of the Ray cluster to join; None: one is started."""
    rank_entry: str
    trainers: Mapping[str, ProgramTrainer]
    """Programs that probes may run, by name."""

    @property
    def drain_s(self) -> float:
        """Seconds before the end of the allocation by which all probes must have ended."""
        if self.site is None or self.allocation is None:
            return _DRAIN_S
        return self.site.drain_s

    def shares_nodes(self, wish: bool | None) -> bool:
        """Whether small probes run side by side on a node: the user's choice, else the site's."""
        if wish is not None:
            return wish
        if self.site is not None and self.site.share_nodes is not None:
            return self.site.share_nodes
        return not self.cluster.has_cpu_devices  # probes on the same cores disturb each other

    def start_launcher(self) -> GroupLauncher:
        """Starts the launcher of the probes."""
        layouts = calibrated_layouts(self.cluster)
        launcher = self._start_launcher()
        launcher.use_product_layouts(layouts)
        return launcher

    def _start_launcher(self) -> GroupLauncher:
        if self.launcher == "local":
            from layout_tuner.workers.launchers.local import local_launcher

            return local_launcher(self.cluster, self.trainers)
        if self.launcher == "srun":
            from layout_tuner.workers.launchers.slurm_step.srun import srun_launcher

            assert self.allocation is not None, "it was refused at the start"
            return srun_launcher(
                self.cluster,
                self.site,
                self.allocation,
                rank_entry=self.rank_entry,
                trainers=self.trainers,
            )
        from layout_tuner.workers.launchers.ray.launcher import ray_launcher

        joins = self.ray_address is not None
        return ray_launcher(
            self.cluster,
            address=self.ray_address,
            num_nodes=self.num_nodes if joins else 1,
            device_cores=self.site.device_cores if joins and self.site is not None else (),
            rank_entry=self.rank_entry,
            trainers=self.trainers,
        )


def run_simulated_workers(
    *,
    url: str,
    token: str,
    certificate: Path | None = None,
    described_cluster: str | Mapping[str, Any],
    name: str | None,
    spool_dir: Path | None,
    patience_s: float,
    simulation: SimulationOptions,
    num_nodes: int | None = None,
    time_left_s: float | None = None,
    end_when_idle_s: float | None = None,
    share_nodes: bool | None = None,
) -> None:
    """Works until SIGTERM or SIGINT, or until the simulated allocations end.

    The arguments are the options of the command `worker --simulate`, which its help explains.

    Raises:
        WorkerError: the workers can't start, or can't go on.
        SearchSpaceError: the cluster is unknown.
    """
    from layout_tuner.workers.launchers.simulated import SimulatedLauncher
    from layout_tuner.workers.simulation.simulated_cluster import SimulatedCluster
    from layout_tuner.workers.worker.simulated_workers import SimulatedClock, SimulatedWorkers

    cluster, warning = resolve_cluster(cluster_part(described_cluster))
    if warning is not None:
        _LOG.warning(warning)
    nodes, clock = num_nodes or 1, SimulatedClock()
    machine = SimulatedCluster.of(
        cluster, num_nodes=nodes * simulation.workers, seed=simulation.seed
    )
    launchers = [
        SimulatedLauncher(machine, first_node=first, num_nodes=nodes, clock=clock)
        for first in range(0, machine.cluster.num_nodes, nodes)
    ]
    shares = not cluster.has_cpu_devices if share_nodes is None else share_nodes
    identity = _simulated_identity(machine, nodes, name, shares, time_left_s)
    listed = [
        replace(
            identity,
            name=f"{identity.name}-{position:02d}" if len(launchers) > 1 else identity.name,
            nodes=[
                NodeBody(name=node.name, num_devices=node.num_devices) for node in launcher.nodes
            ],
        )
        for position, launcher in enumerate(launchers, 1)
    ]
    drain = Drain()
    drain.listen()
    directory = spool_dir or _default_spool(url, identity.name)
    with LeaseClient(url, token, certificate=certificate) as client, Spool(directory) as spool:
        SimulatedWorkers(
            client=client,
            workers=list(zip(listed, launchers, strict=True)),
            clock=clock,
            outbox=Outbox(client, spool),
            drain=drain,
            options=SchedulerOptions(share_nodes=shares, drain_s=0.0, asks=False),
            end_when_idle_s=end_when_idle_s,
            time_scale=simulation.time_scale,
            time_left_s=time_left_s,
        ).run(patience_s=patience_s)


def _simulated_identity(
    machine: SimulatedCluster,
    num_nodes: int,
    name: str | None,
    shares_nodes: bool,
    time_left_s: float | None,
) -> WorkerCreate:
    """How each of the simulated workers registers, but for its name and its nodes."""
    host, version = socket.gethostname(), str(machine.version)
    return WorkerCreate(
        name=name or f"{host}-{SIMULATED_LAUNCHER}",
        host=host,
        cluster=machine.cluster.name,
        num_nodes=num_nodes,
        devices_per_node=machine.cluster.devices_per_node,
        device=f"simulated {machine.cluster.device}",
        versions={
            "simulator": version,
            "seed of the nodes": str(machine.seed),
            "git_revision": GIT_REVISION,
        },
        trainers={simulator_trainer(machine.version): version},
        allocation=AllocationBody(
            launcher=SIMULATED_LAUNCHER, ends_in_s=time_left_s, shares_nodes=shares_nodes
        ),
    )


def run_worker(
    *,
    url: str,
    token: str,
    certificate: Path | None = None,
    described_cluster: str | Mapping[str, Any],
    name: str | None,
    spool_dir: Path | None,
    patience_s: float,
    launcher: LauncherName = "ray",
    ray_address: str | None = None,
    num_nodes: int | None = None,
    time_left_s: float | None = None,
    end_when_idle_s: float | None = None,
    share_nodes: bool | None = None,
    rank_entry: str = RANK_ENTRY,
    trainers: Mapping[str, ProgramTrainer] = MappingProxyType({}),
) -> None:
    """Works until SIGTERM or SIGINT, or until the allocation's time is over.

    The arguments are the options of the command `worker`, which its help explains; and
    "module:function" that a rank runs.

    Raises:
        WorkerError: the worker can't start, or can't go on.
        SearchSpaceError: the cluster is unknown or impossible here.
    """
    machine = _machine(described_cluster, launcher, ray_address, num_nodes, rank_entry, trainers)
    options = SchedulerOptions(
        share_nodes=machine.shares_nodes(share_nodes),
        drain_s=machine.drain_s,
        devices_are_cores=machine.cluster.has_cpu_devices,
        topology=topology_of(
            machine.site or Site(), machine.cluster, os.environ if machine.allocation else {}
        ),
        end_when_idle_s=end_when_idle_s,
    )
    look_up_end = _end_of(machine.allocation, time_left_s)
    identity = _identity(machine, name, options, None if look_up_end is None else look_up_end())
    drain = Drain()
    drain.listen()
    directory = spool_dir or _default_spool(url, identity.name)
    with LeaseClient(url, token, certificate=certificate) as client, Spool(directory) as spool:
        if spool_dir is None:
            adopt_abandoned(spool, f"*-{_name_of_service(url)}")
        worker = Worker(
            client=client,
            identity=identity,
            start_launcher=machine.start_launcher,
            outbox=Outbox(client, spool),
            drain=drain,
            options=options,
            ends_in_s=look_up_end,
            # Other rank programs have no health check.
            check=check_nodes if rank_entry == RANK_ENTRY else None,
        )
        worker.run(patience_s=patience_s)


def _machine(
    described: str | Mapping[str, Any],
    launcher: LauncherName,
    ray_address: str | None,
    num_nodes: int | None,
    rank_entry: str,
    trainers: Mapping[str, ProgramTrainer],
) -> _Machine:
    """The machine, from the user's options and the environment."""
    if launcher == "ray" and (lacks := missing_packages("launcher=ray", ["ray"], extra="worker")):
        raise LauncherUnavailableError(f"{lacks}; or start with --launcher local, on one machine")
    cluster, warning = resolve_cluster(cluster_part(described))
    if warning is not None:
        _LOG.warning(warning)
    spans_nodes = launcher == "srun" or ray_address is not None
    allocation = current_allocation(os.environ) if spans_nodes else None
    if launcher == "srun" and allocation is None:
        raise AllocationMissingError(
            "launcher=srun works inside a Slurm job, and SLURM_JOB_ID is not set here; use another "
            "launcher: local, ray"
        )
    if num_nodes is None:
        num_nodes = 1 if allocation is None else len(allocation.node_names)
    return _Machine(
        cluster=cluster,
        site=site_of(described),
        allocation=allocation,
        num_nodes=num_nodes,
        launcher=launcher,
        ray_address=ray_address,
        rank_entry=rank_entry,
        trainers=trainers,
    )


def _identity(
    machine: _Machine, name: str | None, options: SchedulerOptions, left_s: float | None
) -> WorkerCreate:
    host, allocation = socket.gethostname(), machine.allocation
    devices_per_node = machine.cluster.devices_per_node
    return WorkerCreate(
        name=name or host,
        host=host,
        cluster=machine.cluster.name,
        num_nodes=machine.num_nodes,
        devices_per_node=devices_per_node,
        device=machine.cluster.device,
        versions=software_versions(),
        trainers={trainer.name: trainer.version for trainer in machine.trainers.values()},
        trainer_parameters={
            trainer.name: {name: each.for_service() for name, each in trainer.parameters.items()}
            for trainer in machine.trainers.values()
        },
        trainer_knobs={
            trainer.name: {name: knob.to_mapping() for name, knob in trainer.of.job_knobs.items()}
            for trainer in machine.trainers.values()
        },
        allocation=AllocationBody(
            scheduler="none" if allocation is None else "slurm",
            job_id=None if allocation is None else allocation.job_id,
            launcher=machine.launcher,
            ends_in_s=left_s,
            shares_nodes=options.share_nodes,
        ),
        nodes=[
            NodeBody(name=node, num_devices=devices_per_node)
            for node in (() if allocation is None else allocation.node_names)
        ],
    )


def _end_of(allocation: SlurmAllocation | None, time_left_s: float | None) -> EndsIn | None:
    """Looks up the end of the allocation; the user's option takes precedence over Slurm."""
    if time_left_s is not None:
        return ends_after(time_left_s)
    if allocation is None:
        return None
    job_id = allocation.job_id
    return lambda: ends_in_s(job_id, os.environ)


def _default_spool(url: str, name: str) -> Path:
    """A directory by service and worker: trial ids are those of one service."""
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return state / "layout-tuner" / "spool" / f"{name}-{_name_of_service(url)}"


def _name_of_service(url: str) -> str:
    return hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:12]
