"""Several groups of test ranks on one node at once, and what each of them says."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any

import pytest

from layout_tuner.workers.ranks.json_lines import Document
from layout_tuner.workers.ranks.rank_task import RankTask
from layout_tuner.workers.ranks.zygote_client import ZygoteClient
from tests.workers.process_checks import RANK_PROGRAMS

_PATIENCE_S = 20.0


def make_task(group: str, *, kind: str = "succeed", **fields: Any) -> RankTask:
    """A rank that does `kind`, alone on its node unless the fields say otherwise."""
    usual: dict[str, Any] = {
        "rank": 0,
        "world_size": 1,
        "local_rank": 0,
        "local_world_size": 1,
        "node_rank": 0,
        "device": "cpu",
        "device_index": 0,
        "cores": (),
        "address": "127.0.0.1",
        "master_address": "127.0.0.1",
        "rendezvous": False,
        "oversubscribed": False,
        "deadline_s": 100.0,
        "job": {"kind": kind},
    }
    values = {**usual, **fields}
    return RankTask(group=group, **{"visible_devices": (values["device_index"],), **values})


class SideBySide:
    """One node whose events are sorted by group."""

    def __init__(self) -> None:
        self.ranks = ZygoteClient(rank_entry=RANK_PROGRAMS)
        self.ranks.wait_until_ready()
        self._events: list[Document] = []

    def start(self, kind: str, *, num_ranks: int = 1, cores: tuple[int, ...] = ()) -> str:
        """Starts a group and returns its name."""
        group = secrets.token_hex(4)
        places = [{"rank": i, "local_rank": i, "device_index": i} for i in range(num_ranks)]
        tasks = [
            make_task(group, kind=kind, world_size=num_ranks, cores=cores, **place)
            for place in places
        ]
        self.ranks.start(tasks)
        return group

    def report(self, group: str, event: str) -> Document:
        """Waits for a report of the group's; returns what the rank said."""

        def is_it(document: Document) -> bool:
            return document["event"] == "report" and document["document"]["event"] == event

        return self.wait(group, is_it)["document"]

    def reports(self, group: str, event: str, count: int) -> list[Document]:
        """Waits for so many reports; returns what the ranks said."""

        def said() -> list[Document]:
            of_group = [one for one in self._events if one.get("group") == group]
            documents = [one["document"] for one in of_group if one["event"] == "report"]
            return [document for document in documents if document["event"] == event]

        self._wait(lambda: len(said()) >= count)
        return said()

    def event(self, group: str, event: str) -> Document:
        """Waits for an event of the group's that no rank sent."""
        return self.wait(group, lambda document: document["event"] == event)

    def wait(self, group: str, wanted: Callable[[Document], Any]) -> Document:
        """Waits for an event of the group's that is wanted."""

        def found() -> list[Document]:
            return [one for one in self._events if one.get("group") == group and wanted(one)]

        self._wait(found)
        return found()[0]

    def _wait(self, condition: Callable[[], Any]) -> None:
        give_up_at = time.monotonic() + _PATIENCE_S
        while not condition():
            if time.monotonic() > give_up_at:
                pytest.fail(f"waited in vain; what happened: {self._events[-20:]}")
            self._events += self.ranks.poll(0.1)
