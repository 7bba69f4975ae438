"""This machine as one node or several with real ranks, and probes and groups on them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import psutil

from layout_tuner.protocol.outcome import Outcome, ProbeRequest
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_presets import model_preset
from layout_tuner.workers.launchers.group import GroupFailure
from layout_tuner.workers.launchers.group_launcher import GroupLauncher
from layout_tuner.workers.launchers.launcher_nodes import Node, NodeEvent, NodeSet
from layout_tuner.workers.launchers.local import LocalNodes
from layout_tuner.workers.ranks.json_lines import Document
from layout_tuner.workers.ranks.rank_task import RankTask
from tests.kit.waiting import wait_until
from tests.workers.process_checks import MARK, RANK_PROGRAMS, marked, run_group

NEVER_S = 3600.0
"""A deadline long after that of the test: if ranks that hang end, something else has ended them."""


def make_cluster(devices_per_node: int = 2, num_nodes: int = 1, **changes: Any) -> Cluster:
    fields: dict[str, Any] = {"device": "CPU core", "device_memory_bytes": 1 << 30, **changes}
    return Cluster(
        name="test-cores", num_nodes=num_nodes, devices_per_node=devices_per_node, **fields
    )


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

    def agent_ends(self, _node: int) -> int:
        return 0

    def recover(self, node: int) -> None:
        self.parts[node].recover(0)

    def close(self) -> None:
        for part in self.parts:
            part.close()


@contextmanager
def local_nodes(
    num_devices: int = 2, rank_entry: str = RANK_PROGRAMS, **environment: str
) -> Iterator[LocalNodes]:
    """This machine as one node, started in an environment; nothing of it may be left."""
    with several_nodes([rank_entry], num_devices, **environment) as nodes:
        yield nodes.parts[0]


@contextmanager
def several_nodes(
    rank_entries: Sequence[str], num_devices: int = 2, **environment: str
) -> Iterator[SeveralLocalNodes]:
    """This machine as several nodes, started in an environment; nothing of them may be left."""
    mark = os.urandom(8).hex()
    with patch.dict(os.environ, {**environment, MARK: mark}):
        nodes = SeveralLocalNodes(rank_entries, num_devices=num_devices)
    try:
        nodes.wait_until_ready()
        yield nodes
    finally:
        nodes.close()
    wait_until("nothing of the nodes is left", lambda: not marked(mark))
    assert not any(part.ranks._scratch.exists() for part in nodes.parts)


def below_zygote(nodes: LocalNodes) -> list[psutil.Process]:
    """Keepers, ranks, and what they have started."""
    return psutil.Process(nodes.ranks.pids["zygote"]).children(recursive=True)


def keeper_of(rank: int) -> int:
    """The keeper of a rank, by its pid."""
    return psutil.Process(rank).ppid()


def failure_of(nodes: NodeSet, kind: str, **options: Any) -> GroupFailure:
    """What a group of test ranks fails of."""
    end = run_group(nodes, kind, **options)
    assert end.failure is not None, end
    return end.failure


class Hanging:
    """Takes the events of ranks that hang, notes their pids, and does something once all hang."""

    def __init__(self, num_ranks: int = 0, then: Callable[[], Any] = lambda: None) -> None:
        self.pids: list[int] = []
        self._num_ranks, self._then = num_ranks, then

    def __call__(self, event: dict[str, Any]) -> None:
        self.pids.append(event["pid"])
        if len(self.pids) == self._num_ranks:
            self._then()


def make_probe(**changes: Any) -> ProbeRequest:
    """A short probe of the tiny model on two devices."""
    fields: dict[str, Any] = {
        "model": model_preset("tiny"),
        "layout": Layout(tp=2, num_microbatches=2),
        "warmup": 2,
        "iterations": 2,
        "deadline_s": 60.0,
    }
    return ProbeRequest(**{**fields, **changes})


def run_probe(launcher: GroupLauncher, request: ProbeRequest, **options: Any) -> Outcome:
    """Runs a probe that nobody watches or cancels, unless the options say otherwise."""
    quiet = {"on_event": lambda _: None, "cancelled": lambda: False}
    return launcher.run(request, **{**quiet, **options})
