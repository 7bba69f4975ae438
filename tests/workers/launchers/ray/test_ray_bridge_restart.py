"""The process that uses Ray is restarted until that works; a stand-in for it, without Ray."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from queue import SimpleQueue
from typing import ClassVar

import pytest

from tests.kit.waiting import wait_until
from workers.launchers.agent import ADDRESS_VARIABLE, TOKEN_VARIABLE, greet
from workers.launchers.ray.launcher import RayNodes
from workers.ranks.json_lines import JsonLines


class FakeBridge:
    """Has an agent connect at its start, and ends where a test wants it."""

    starts = 0
    starts_to_fail = (2, 3)
    agents: ClassVar[list[JsonLines]] = []

    def __init__(self, _flags: Sequence[str], variables: Mapping[str, str]) -> None:
        FakeBridge.starts += 1
        if FakeBridge.starts in FakeBridge.starts_to_fail:
            raise OSError(28, "No space left on device")
        self.to_end: SimpleQueue[None] = SimpleQueue()
        self.address, self.token = (variables[name] for name in (ADDRESS_VARIABLE, TOKEN_VARIABLE))
        self.agent = self.start_agent(FakeBridge.starts)

    def wait(self) -> str:
        self.to_end.get(timeout=60)
        self.to_end.put(None)  # it has ended for good
        return "exit code 1"

    def close(self) -> None:
        self.to_end.put(None)

    def start_agent(self, pid: int) -> JsonLines:
        where = {"node": f"key-{pid}", "name": "n0", "address": "127.0.0.1"}
        agent = greet(self.address, self.token, where)
        FakeBridge.agents.append(agent)
        agent.send({"event": "ready", "pids": {"agent": pid}})
        return agent


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[RayNodes]:
    monkeypatch.setattr("workers.launchers.ray.launcher.BridgeProcess", FakeBridge)
    monkeypatch.setattr(FakeBridge, "starts", 0)
    monkeypatch.setattr(FakeBridge, "agents", [])
    nodes = RayNodes(num_devices=2)
    yield nodes
    nodes.close()
    for agent in FakeBridge.agents:
        agent.close()


def test_a_bridge_that_does_not_start_is_started_again(
    nodes: RayNodes, caplog: pytest.LogCaptureFixture
) -> None:
    nodes._bridge.to_end.put(None)
    wait_until("it has joined again", lambda: nodes.pids == [{"agent": 4}], 60)
    assert not nodes.lost()
    assert caplog.text.count("No space left on device") == len(FakeBridge.starts_to_fail)


def test_an_agent_that_greets_again_takes_the_place_of_the_one_before(nodes: RayNodes) -> None:
    agent = nodes._bridge.start_agent(9)
    wait_until("it has joined", lambda: nodes.pids == [{"agent": 9}])
    assert nodes._bridge.agent.receive() is None  # so it ends
    assert not nodes.lost()
    agent.close()
    wait_until("its end is noticed", lambda: nodes.lost())
    assert nodes.lost() == {0: "node n0 was lost: its agent has ended"}
