"""The port for agents, where others get no answer, and the way of their events to the groups."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Final

import pytest

from layout_tuner.workers.errors import NodeLostError, RanksLeftError
from layout_tuner.workers.launchers import agent_listener
from layout_tuner.workers.launchers.agent import NodeAgent, log_tails
from layout_tuner.workers.launchers.agent_listener import AgentListener, Receiver
from layout_tuner.workers.launchers.event_router import EventRouter
from layout_tuner.workers.launchers.launcher_nodes import NodeEvent
from layout_tuner.workers.ranks.json_lines import Document, JsonLines
from tests.kit.waiting import wait_until

TOKEN = "the token of a launcher"


class Launcher:
    """Takes agents, and notes their events."""

    def __init__(self) -> None:
        self.documents: list[Document] = []
        self.hellos: list[Document] = []

    def connected(self, hello: Document, line: JsonLines) -> Receiver:
        self.hellos.append(hello)
        return Receiver(take=self.documents.extend, disconnected=self._note_end)

    def _note_end(self, is_cut_off: bool) -> None:
        self.documents.append({"is_cut_off": is_cut_off})


@pytest.fixture
def lines() -> Iterator[AgentListener]:
    lines = AgentListener("127.0.0.1")
    yield lines
    lines.close()


def connect(lines: AgentListener) -> socket.socket:
    host, _, port = lines.address.rpartition(":")
    return socket.create_connection((host, int(port)), 10)


@pytest.mark.parametrize(
    "said",
    [
        b"[" * 60_000 + b"\n",
        b'{"a":' * 10_000 + b"1" + b"}" * 10_000 + b"\n",
        b'{"token": ["a"]}\n',
        b'{"token": null}\n',
        b'"token"\n',
        b"1\n",
        b"\xff\xfe\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b'{"token": "wrong", "name": "\\u001b[2J"}\n',
        b"x" * (1 << 20),
        b"9" * 5000 + b"\n",
    ],
    ids=lambda said: repr(said[:12]),
)
def test_a_stranger_is_cut_off_and_a_node_still_connects(lines: AgentListener, said: bytes) -> None:
    launcher = Launcher()
    lines.expect(TOKEN, launcher.connected)
    with ExitStack() as closing:
        stranger = closing.enter_context(connect(lines))
        try:
            stranger.sendall(said)
            assert stranger.recv(100) == b""
        except ConnectionError:  # it hung up while we were still at it
            pass
        node = closing.enter_context(connect(lines))
        node.sendall(json.dumps({"token": TOKEN, "name": "n0"}).encode() + b'\n{"event": 1}\n')
        wait_until("the node is in", lambda: launcher.documents)
    assert [hello["name"] for hello in launcher.hellos] == ["n0"]
    assert launcher.documents[0] == {"event": 1}


@pytest.mark.parametrize("ends", [True, False])
def test_an_agent_that_is_silent_is_cut_off_and_one_that_ends_is_not(
    lines: AgentListener, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    monkeypatch.setattr(agent_listener, "_LOOK_EVERY_S", 0.05)
    monkeypatch.setattr(agent_listener, "_AGENTS_MAY_BE_SILENT_S", 0.5)
    launcher = Launcher()
    lines.expect(TOKEN, launcher.connected)
    with connect(lines) as agent:
        agent.sendall(json.dumps({"token": TOKEN, "name": "n0"}).encode() + b"\n")
        if ends:
            agent.close()
        wait_until("its end is noticed", lambda: launcher.documents)
    assert launcher.documents == [{"is_cut_off": not ends}]


def report(group: str, number: int) -> Document:
    return {"event": "report", "group": group, "rank": 0, "document": {"number": number}}


def numbers(events: list[NodeEvent]) -> list[int]:
    return [event.document["document"]["number"] for event in events]


def test_the_events_of_one_node_reach_their_groups_in_order() -> None:
    router = EventRouter()
    router.open("a", [0, 1])
    router.open("b", [1])
    router.deliver(1, [report("a", 1), report("b", 2), report("a", 3), report("gone", 4)])
    assert numbers(router.poll("b", 0)) == [2]
    assert numbers(router.poll("a", 0)) == [1, 3]
    assert router.poll("a", 0) == []


def test_a_lost_node_is_told_once_to_its_groups_and_to_no_other() -> None:
    router = EventRouter()
    router.open("a", [0, 1])
    router.open("b", [1])
    router.open("c", [0])
    router.open("closed", [1])
    router.close("closed")
    router.close("closed")
    router.lose(1, "cut off")
    router.lose(1, "said again")
    for group in ("a", "b"):
        lost = {"event": "lost", "message": "cut off"}
        assert router.poll(group, 0) == [NodeEvent(node=1, document=lost)]
        assert router.poll(group, 0) == []
    assert router.poll("c", 0) == []
    assert router.lost() == {1: "cut off"}


def test_no_group_starts_on_a_lost_node_until_it_is_found_again() -> None:
    router = EventRouter()
    router.lose(1, "cut off")
    with pytest.raises(NodeLostError, match="cut off") as refused:
        router.open("a", [0, 1])
    assert refused.value.node == 1
    router.find(1)
    assert router.lost() == {}
    router.open("a", [0, 1])
    router.deliver(1, [report("a", 5)])
    assert numbers(router.poll("a", 0)) == [5]


def test_an_event_wakes_the_group_that_waits_for_it() -> None:
    router = EventRouter()
    router.open("a", [0])
    router.open("b", [0])
    told: list[NodeEvent] = []
    waiting = threading.Thread(target=lambda: told.extend(router.poll("a", 60)))
    waiting.start()
    router.deliver(0, [report("b", 1)])
    router.deliver(0, [report("a", 2)])
    waiting.join(30)
    assert numbers(told) == [2]


class BrokenRanks:
    """Instead of a node's ranks: it cannot end them, and may not even start."""

    pids: Final = {"zygote": 1}

    def __init__(self, *, starts: bool, **_: object) -> None:
        self._starts = starts
        self._closed = threading.Event()

    def wait_until_ready(self) -> None:
        if not self._starts:
            raise NodeLostError("the zygote ended")

    def poll(self, _within_s: float) -> list[Document]:
        self._closed.wait(30)
        return [{"event": "lost", "message": "closed"}]

    def end(self, _group: str) -> dict[int, str]:
        raise RanksLeftError("processes [1] are still there")

    def close(self) -> None:
        self._closed.set()


@contextmanager
def told_by_an_agent(monkeypatch: pytest.MonkeyPatch, *, starts: bool) -> Iterator[JsonLines]:
    """The launcher's end of the line of an agent with broken ranks."""
    ranks = partial(BrokenRanks, starts=starts)
    monkeypatch.setattr("layout_tuner.workers.launchers.agent.ZygoteClient", ranks)
    near, far = socket.socketpair()
    with near, far:
        serving = threading.Thread(target=NodeAgent(JsonLines(far), "module:function").run)
        serving.start()
        line = JsonLines(near)
        yield line
        line.end_writing()
        serving.join(30)


def test_an_agent_tells_of_ranks_that_it_could_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with told_by_an_agent(monkeypatch, starts=True) as line:
        ready = line.receive()
        line.send({"order": "end", "group": "a"})
        ended = line.receive()
    assert ready is not None
    assert ready["event"] == "ready"
    assert ended is not None
    assert (ended["event"], ended["group"]) == ("ended", "a")
    with pytest.raises(RanksLeftError, match="are still there") as left:
        log_tails({3: ended})
    assert left.value.node == 3


def test_an_agent_whose_ranks_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with told_by_an_agent(monkeypatch, starts=False) as line:
        assert line.receive() == {"event": "lost", "message": "the zygote ended"}
