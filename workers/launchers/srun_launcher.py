"""The srun launcher of an allocation, put together from its cluster, its site and its nodes."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from search_spaces.cluster import Cluster
from workers.launchers.group_launcher import GroupLauncher
from workers.launchers.srun import SrunNodes, StepSettings
from workers.rank_task import RANK_ENTRY
from workers.slurm.allocation import SlurmAllocation
from workers.slurm.site import Site


def srun_launcher(
    cluster: Cluster,
    site: Site | None,
    allocation: SlurmAllocation,
    *,
    rank_entry: str = RANK_ENTRY,
    environment: Mapping[str, str] | None = None,
) -> GroupLauncher:
    """Starts one Slurm step a group, inside the allocation.

    Args:
        cluster: what its nodes are nodes of.
        site: what steps need here; None: nothing.
        allocation: the job that this process runs in.
        rank_entry: "module:function" that a rank runs.
        environment: of the ranks; None: this process's.

    Raises:
        NodeLostError: no node of the allocation answers.
    """
    site = site or Site()
    environment = dict(os.environ if environment is None else environment)
    names = allocation.node_names
    addresses = tuple(site.address(name, index) for index, name in enumerate(names))
    settings = StepSettings(
        job_id=allocation.job_id,
        node_names=names,
        addresses=addresses,
        listen_address=_own_address(dict(zip(names, addresses, strict=True)), environment),
        num_devices=cluster.devices_per_node,
        environment=environment,
        several_nodes_only=frozenset(site.environment_of_several_nodes),
        device_cores=site.device_cores,
        options=(*_resources(cluster, site), *site.srun),
        rank_entry=rank_entry,
    )
    return GroupLauncher(SrunNodes(settings), cluster, allow_sharing=False)


def _own_address(addresses: Mapping[str, str], environment: Mapping[str, str]) -> str:
    """Where this host's nodes call in: the batch host is the job's first node, as a rule."""
    host = socket.gethostname()
    for name in (environment.get("SLURMD_NODENAME", ""), host, host.split(".")[0]):
        if name in addresses:
            return addresses[name]
    return host


def _resources(cluster: Cluster, site: Site) -> list[str]:
    """What a step must ask for by name.

    Where a job holds whole nodes, Slurm gives a step no GPU that neither of them has asked for.
    """
    options = []
    if site.cores_per_node is not None:
        options.append(f"--cpus-per-task={site.cores_per_node}")
    return [*options, *site.devices_options(cluster)]
