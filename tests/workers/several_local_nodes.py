"""This machine as several nodes, each with a zygote of its own that knows nothing of the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from workers.launchers.base import Node, NodeEvent
from workers.launchers.local import LocalNodes
from workers.ranks.json_lines import Document
from workers.ranks.rank_task import RankTask


class SeveralLocalNodes:
    """Nodes at addresses of their own.

    Args:
        rank_entries: "module:function" that the ranks of each node run.
        num_devices: of each node.
    """

    def __init__(self, rank_entries: Sequence[str], *, num_devices: int) -> None:
        self.parts = [LocalNodes(num_devices=num_devices, rank_entry=one) for one in rank_entries]

    @property
    def nodes(self) -> Sequence[Node]:
        return [
            replace(part.nodes[0], name=f"node{index}", address=f"127.0.2.{index + 1}")
            for index, part in enumerate(self.parts)
        ]

    def wait_until_ready(self) -> None:
        for part in self.parts:
            part.wait_until_ready()

    def start(self, tasks: Mapping[int, Sequence[RankTask]]) -> None:
        for node, on_node in tasks.items():
            self.parts[node].start({0: on_node})

    def tell(self, nodes: Sequence[int], group: str, document: Document) -> None:
        for node in nodes:
            self.parts[node].tell([0], group, document)

    def poll(self, nodes: Sequence[int], group: str, timeout_s: float) -> list[NodeEvent]:
        return [
            NodeEvent(node=node, document=event.document)
            for node in nodes
            for event in self.parts[node].poll([0], group, min(timeout_s, 0.01))
        ]

    def end(self, nodes: Sequence[int], group: str) -> dict[int, str]:
        tails: dict[int, str] = {}
        for node in nodes:
            tails.update(self.parts[node].end([0], group))
        return tails

    def lost(self) -> Mapping[int, str]:
        return {node: why for node, part in enumerate(self.parts) for why in part.lost().values()}

    def recover(self, node: int) -> None:
        self.parts[node].recover(0)

    def close(self) -> None:
        for part in self.parts:
            part.close()
