"""Ray nodes for tests: several on this machine, each kept up by `workers.ray_node`."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.kit.waiting import wait_until
from tests.workers.process_checks import MARK, kill, marked

ROOT = Path(__file__).parents[2]
PATIENCE_S = 150.0


@dataclass(kw_only=True)
class RayNodeProcess:
    """A node's supervisor, and how to find what is below it."""

    name: str
    address: str
    head: str
    token: str
    labels: str = ""
    mark: str = field(default_factory=lambda: secrets.token_hex(8))
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        flags = {"head": self.head, "address": self.address, "name": self.name}
        flags |= {"labels": self.labels} if self.labels else {}
        environment = {
            **os.environ,
            MARK: self.mark,
            "PYTHONPATH": str(ROOT),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self.token,
        }
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "layout_tuner.workers.ray_node"),
                *(f"--{name}={value}" for name, value in flags.items()),
            ],
            env=environment,
        )

    def pids_by_name(self) -> dict[str, int]:
        """The living processes of the node; of those of one name the last."""
        found: dict[str, int] = {}
        for process in marked(self.mark):
            with suppress(psutil.Error):  # it has just ended
                found[process.name()] = process.pid
        return found

    def pid_of(self, name: str) -> int:
        """The pid of this node's raylet or GCS."""
        has_one = f"{self.name} has a {name}"
        return wait_until(has_one, lambda: self.pids_by_name().get(name), PATIENCE_S)

    def end(self) -> None:
        """Ends it as the batch system does; then nothing of it may be left."""
        self.process.terminate()
        self.process.wait(PATIENCE_S)
        self.wait_until_nothing_is_left()

    def kill_tree(self) -> list[psutil.Process]:
        """Kills every process of the node at once, as the end of a machine does."""
        found = marked(self.mark)
        for process in found:
            process.suspend()  # nobody is to see another's end
        kill(found)  # the kernel takes some of them along with others
        self.process.wait(PATIENCE_S)
        return found

    def wait_until_nothing_is_left(self) -> None:
        wait_until(f"nothing of {self.name} is left", lambda: not marked(self.mark), PATIENCE_S)


def free_port(address: str) -> int:
    """A port below those that the kernel deals out by itself and those of Ray's workers."""
    for port in range(6400, 9999):
        try:
            socket.create_server((address, port)).close()
        except OSError:
            continue
        return port
    raise AssertionError(f"no port is free at {address}")


def make_nodes(*addresses: str) -> list[RayNodeProcess]:
    """Nodes of one cluster, the first of which is the head; none is started."""
    head = f"{addresses[0]}:{free_port(addresses[0])}"
    token = secrets.token_hex(32)
    return [
        RayNodeProcess(name=f"n{index}", address=address, head=head, token=token)
        for index, address in enumerate(addresses)
    ]
