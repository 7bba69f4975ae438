"""The port for agents: others that connect to it get no answer, and silent agents are lost."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.kit.waiting import wait_until
from workers.launchers import agent_listener
from workers.launchers.agent_listener import AgentListener, Receiver
from workers.ranks.json_lines import Document, JsonLines

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
