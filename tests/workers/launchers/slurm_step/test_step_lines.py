"""Strangers that connect to the port of the steps' nodes get no answer and disturb nothing."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.waiting import wait_until
from workers.launchers.slurm_step.step_lines import StepLines
from workers.ranks.json_lines import Document, JsonLines

TOKEN = "the token of a step"


class Step:
    """Takes one node, and notes what it says."""

    def __init__(self) -> None:
        self.documents: list[Document] = []
        self.called_by: list[Document] = []

    def connected(self, hello: Document, line: JsonLines) -> int | None:
        self.called_by.append(hello)
        return 0

    def take(self, node: int, documents: list[Document]) -> None:
        self.documents += documents

    def disconnected(self, node: int, *, is_cut_off: bool) -> None:
        self.documents.append({"hung_up": node, "is_cut_off": is_cut_off})


@pytest.fixture
def lines() -> Iterator[StepLines]:
    lines = StepLines("127.0.0.1")
    yield lines
    lines.close()


def connect(lines: StepLines) -> socket.socket:
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
def test_whatever_a_stranger_says_it_is_hung_up_on_and_nodes_still_get_in(
    lines: StepLines, said: bytes
) -> None:
    step = Step()
    lines.expect(TOKEN, step)
    with ExitStack() as closing:
        stranger = closing.enter_context(connect(lines))
        try:
            stranger.sendall(said)
            assert stranger.recv(100) == b""
        except ConnectionError:  # it hung up while we were still at it
            pass
        node = closing.enter_context(connect(lines))
        node.sendall(json.dumps({"token": TOKEN, "name": "n0"}).encode() + b'\n{"event": 1}\n')
        wait_until("the node is in", lambda: step.documents)
    assert [hello["name"] for hello in step.called_by] == ["n0"]
    assert step.documents[0] == {"event": 1}
