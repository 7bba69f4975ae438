"""The process that talks to Ray is restarted until that works; a stand-in for it, without Ray."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from queue import SimpleQueue

import pytest

from tests.waiting import wait_until
from workers.launchers.ray.launcher import RayNodes
from workers.ranks.json_lines import Document


class FakeBridge:
    """Tells of one node at each start, then what a test wants told, and ends at None."""

    starts_to_fail = 2

    def __init__(self, _flags: Sequence[str], _variables: Mapping[str, str]) -> None:
        self.to_tell: SimpleQueue[Document | None] = SimpleQueue()
        self.starts = 1
        self.lives = True
        self.terminated = 0

    def events(self) -> Iterator[Document]:
        if not self.lives:
            return
        told = {"num_cores": 2, "core_ids": [0, 1], "pids": {}, "name": "n0"}
        where = {"name": "n0", "address": "127.0.0.1"}
        yield {"event": "joined", "node": f"key-{self.starts}", "description": told, **where}
        while (event := self.to_tell.get(timeout=60)) is not None:
            yield event

    def restart(self) -> None:
        self.starts += 1
        self.lives = self.starts > 1 + self.starts_to_fail
        if not self.lives:
            raise OSError(28, "No space left on device")

    def wait(self) -> str:
        return "exit code 1"

    def terminate(self) -> None:
        self.terminated += 1

    def close(self) -> None:
        self.to_tell.put(None)


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[RayNodes]:
    monkeypatch.setattr("workers.launchers.ray.launcher.BridgeProcess", FakeBridge)
    nodes = RayNodes(num_devices=2)
    yield nodes
    nodes.close()


def bridge_of(nodes: RayNodes) -> FakeBridge:
    assert isinstance(nodes._bridge, FakeBridge)
    return nodes._bridge


def test_a_bridge_that_can_not_be_started_again_for_a_while_costs_no_more_than_that_while(
    nodes: RayNodes, caplog: pytest.LogCaptureFixture
) -> None:
    bridge = bridge_of(nodes)
    bridge.to_tell.put(None)
    wait_until("it has been started again", lambda: bridge.starts == 4 and not nodes.lost(), 60)
    assert caplog.text.count("No space left on device") == FakeBridge.starts_to_fail


def test_a_bridge_that_can_not_be_understood_is_ended_and_started_again(nodes: RayNodes) -> None:
    bridge = bridge_of(nodes)
    bridge.to_tell.put({"event": "news", "node": "nobody has told of it", "documents": []})
    wait_until("it has been started again", lambda: bridge.starts == 4 and not nodes.lost(), 60)
    assert bridge.terminated == 1
