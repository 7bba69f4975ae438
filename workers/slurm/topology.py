"""The topology of a Slurm site: its switches or blocks by level, and the nodes below each."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from layout_tuner.documents.json_and_yaml import read_yaml
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.clusters.site import Site, node_list
from layout_tuner.workers.errors import (
    SlurmRefusedError,
    SlurmUnavailableError,
    TopologyUnusableError,
)
from layout_tuner.workers.packing.topology import Groups, Topology
from layout_tuner.workers.slurm.jobs import call, inside_job

_LOG = logging.getLogger(__name__)

_CUT: Final = "SLURM_TOPO_LEN"
"""A variable of users that cuts the lines of `scontrol show topology`."""

_UNREADABLE: Final = (
    *(ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError),
)
Level = Mapping[str, tuple[str, ...]]
"""The nodes of each switch or block of one level, by its name."""


def topology_of(site: Site, cluster: Cluster, environ: Mapping[str, str]) -> Topology:
    """The topology of the Slurm job of this environment; outside of a job, what the site lists.

    Where it can't be read or contradicts the nodes, the log says so, and probes run as without.
    """
    names = site.levels or (("switch",) if site.switches else ())
    topology, environment = Topology.of(cluster, names), inside_job(environ)
    environment.pop(_CUT, None)
    is_job = "SLURM_JOB_ID" in environ
    known: Mapping[str, Groups] = {}
    if not names or not (is_job or site.switches):
        return topology
    try:
        levels = [site.switches] if site.switches else read_topology(*_shown(site, environment))
        known = _by_node(levels, names)
        shown = call("scontrol", "-o", "show", "node", environ=environment) if is_job else ""
        there = set(re.findall(r"^NodeName=(\S+)", shown, re.MULTILINE)) or set(known)
        if absent := next((node for node in known if node not in there), None):
            raise TopologyUnusableError(f"{known[absent][0]} names {absent}, not a node of Slurm's")
        if why := topology.contradiction(known.values()):
            raise TopologyUnusableError(why)
    except (SlurmUnavailableError, SlurmRefusedError) as error:
        _LOG.warning(
            "what the site lists and SLURM_TOPOLOGY_ADDR of the nodes say is the topology: %s",
            error,
        )
        return replace(topology, known=known, reads_addresses=bool(site.levels))
    except TopologyUnusableError as error:
        _LOG.warning("probes are placed as without a topology: %s", error)
        return topology
    return replace(topology, known=known)


def _shown(site: Site, environ: Mapping[str, str]) -> tuple[str, str]:
    """The text of the job's topology, and its name where Slurm has several (from 25.05 on)."""
    named: list[str] = []
    if partition := environ.get("SLURM_JOB_PARTITION"):
        shown = call("scontrol", "show", "partition", partition, environ=environ)
        named = re.findall(r"\bTopology=(\S+)", shown)
    if not site.topology:
        return call("scontrol", "show", "topology", *named, environ=environ), ""
    try:
        return Path(site.topology).read_text(), "".join(named)
    except (OSError, ValueError) as error:
        raise TopologyUnusableError(f"the site's topology can't be read ({error})") from error


def read_topology(text: str, name: str = "") -> list[Level]:
    """The levels of a topology, smallest first.

    Args:
        text: what `scontrol show topology` prints of a tree (SwitchName=) or of blocks (BlockName=,
            and AggregatedBlock= from Slurm 25.05 on); or a topology.yaml (topology.yaml(5)).
        name: the topology among those of a topology.yaml; empty: the cluster's default.

    Raises:
        TopologyUnusableError: it has no switches or blocks, or can't be read.
    """
    units = _of_yaml(text, name) if text.lstrip().startswith(("-", "#")) else _of_lines(text)
    levels: dict[int, dict[str, tuple[str, ...]]] = {}
    try:
        for height, unit, listed in units:
            level, nodes = levels.setdefault(height, {}), tuple(node_list(listed, "Nodes"))
            if nodes not in level.values():  # parallel switches above the same nodes are one group
                level[unit] = nodes
    except _UNREADABLE as error:
        raise TopologyUnusableError(
            f"Slurm's topology is not as scontrol or topology.yaml(5) has it ({error!r}); correct it"
        ) from error
    if not levels:
        raise TopologyUnusableError("Slurm's topology has no switches or blocks")
    return [levels[height] for height in sorted(levels)]


def _of_lines(text: str) -> Iterator[tuple[int, str, str]]:
    """The height, the name and the nodes of each switch or block."""
    kinds = (("SwitchName", "Level"), ("BlockName", ""), ("AggregatedBlock", "BlockSize"))
    for line in text.splitlines():
        words = dict(word.partition("=")[::2] for word in line.split())
        for kind, height in kinds:
            if kind in words and "Nodes" in words:
                yield int(words.get(height, 0)), words[kind], words["Nodes"]


def _of_yaml(text: str, name: str) -> Iterator[tuple[int, str, str]]:
    """The same; aggregated blocks are made of blocks in a row, as Slurm makes them."""
    listed: list[Any] = read_yaml(text.encode())
    default = next((each for each in listed if each.get("cluster_default")), listed[0])
    chosen = {each["topology"]: each for each in listed}[name] if name else default
    switches = {each["switch"]: each for each in chosen.get("tree", {}).get("switches", ())}

    def under(switch: str) -> tuple[int, str]:
        if "children" not in switches[switch]:
            return 0, switches[switch]["nodes"]
        below = [under(child) for child in node_list(switches[switch]["children"], "children")]
        return 1 + max(height for height, _ in below), ",".join(nodes for _, nodes in below)

    for switch in switches:
        height, nodes = under(switch)
        yield height, switch, nodes
    blocks, sizes = (chosen.get("block", {}).get(key, ()) for key in ("blocks", "block_sizes"))
    for size in sizes:
        for first in range(0, len(blocks), size // sizes[0]):
            within = blocks[first : first + size // sizes[0]]
            ends = dict.fromkeys((within[0]["block"], within[-1]["block"]))
            yield size, "-".join(ends), ",".join(each["nodes"] for each in within)


def _by_node(levels: list[Level], names: tuple[str, ...]) -> dict[str, Groups]:
    """The groups of each node at the named levels; TopologyUnusableError where it has two."""
    if len(levels) < len(names):
        raise TopologyUnusableError(
            f"the site names {len(names)} levels ({', '.join(names)}), and Slurm's topology has "
            f"{len(levels)}: name as many"
        )
    found: dict[str, Groups] = {}
    for name, level in zip(names, levels, strict=False):
        at: dict[str, str] = {}
        for group, nodes in level.items():
            for node in nodes:
                if at.setdefault(node, group) != group:
                    raise TopologyUnusableError(
                        f"{node} is in two groups of level {name}, {at[node]} and {group}: list it "
                        "in one"
                    )
        # In an uneven tree, the switch below stands for one that is missing.
        found = {n: (*groups, at.get(n, groups[-1])) for n, groups in found.items()} or {
            n: (group,) for n, group in at.items()
        }
    return found
