"""The groups of nodes (switches, blocks, NVLink domains) at each level of a network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from layout_tuner.search_spaces.clusters.cluster import Cluster

Groups = tuple[str, ...]
"""The group of a node at each level, smallest first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """What is known of the groups of nodes before they join."""

    names: tuple[str, ...] = ()
    """The levels above the node, smallest first."""
    most_nodes: Mapping[str, int] = field(default_factory=dict)
    """Nodes of a group at most, by level, as the cluster is described; absent: not stated."""
    known: Mapping[str, Groups] = field(default_factory=dict)
    """The groups of nodes by name."""
    reads_addresses: bool = False
    """Whether the switches that a node reports count, where `known` lacks it."""

    @classmethod
    def of(cls, cluster: Cluster, names: tuple[str, ...] = ()) -> Topology:
        """A topology without known nodes; its levels are the cluster's unless they are named."""
        per_node = cluster.devices_per_node
        sizes = {level.name: (level.devices or 0) // per_node for level in cluster.levels}
        most_nodes = {name: size for name, size in sizes.items() if size > 1}
        return cls(names=names or tuple(most_nodes), most_nodes=most_nodes)

    def groups(self, node: str, labels: Mapping[str, str], switches: Sequence[str]) -> Groups:
        """The groups of a node, by its name and what it reports; none: they are not known.

        Labels with the names of the levels come first: a user has set them.
        """
        if self.names and all(name in labels for name in self.names):
            return tuple(labels[name] for name in self.names)
        reported = tuple(switches[: len(self.names)]) if self.reads_addresses else ()
        return self.known.get(node, reported if len(reported) == len(self.names) else ())

    def contradiction(self, of_nodes: Iterable[Groups]) -> str:
        """Which group has more nodes than one of the cluster may have; empty: none."""
        known = [groups for groups in of_nodes if groups]
        for level, name in enumerate(self.names):
            for group, num_nodes in Counter(groups[level:] for groups in known).items():
                if num_nodes > self.most_nodes.get(name, num_nodes):
                    return (
                        f"{name} {group[0]} has {num_nodes} nodes, and the cluster's description "
                        f"says {self.most_nodes[name]} at most: correct one of the two"
                    )
        return ""
