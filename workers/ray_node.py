"""One node of an allocation's Ray cluster, kept up for as long as the batch system's step lasts.

    python -P -m workers.ray_node --head ADDRESS:PORT [--address OWN] [--name NAME]

The node whose address is the head's is the head. Ray is started again when it ends: after its
warden has ended every process of it, and for other nodes than the head once the head answers.
All of it ends with SIGTERM, SIGINT, or the end of whoever started this. The token of the cluster
is RAY_AUTH_TOKEN.
"""

from __future__ import annotations

import argparse
import logging
import os
import select
import signal
import socket
import sys
import time
from typing import Final

from workers.errors import RayClusterFailedError
from workers.ray_cluster import HeadWatch, RayNodeProcesses, answers, resolved

_LOG = logging.getLogger(__name__)

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_LOOK_S: Final = 0.25
_HEAD_LOOK_S: Final = 1.0
_SHORTEST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 30.0
_HEALTHY_AFTER_S: Final = 60.0
"""A Ray that has lasted for so long has ended by an accident, not because it can't work here."""


class RayNode:
    """Keeps one Ray node up.

    Args:
        head: "address:port" of the cluster's head.
        address: of this node.
        name: of this node, for people; it comes back under the same one.
    """

    def __init__(self, head: str, address: str, name: str) -> None:
        self._head = head
        self._address = address
        self._name = name
        host, _, port = head.rpartition(":")
        self._port = int(port) if host == address else None
        self._told = _Told()

    def run(self) -> None:
        """Keeps it up until told to end; then nothing of it is left."""
        pause_s = _SHORTEST_PAUSE_S
        while self._wait_for_head():
            started = time.monotonic()
            words = self._run_once()
            if self._told.within(0):
                return
            if time.monotonic() - started > _HEALTHY_AFTER_S:
                pause_s = _SHORTEST_PAUSE_S
            _LOG.warning(
                "Ray on %s ended; it is started again in %g s; %s", self._address, pause_s, words
            )
            if self._told.within(pause_s):
                return
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _wait_for_head(self) -> bool:
        """Waits for the head to answer; returns false when told to end instead."""
        while self._port is None and not answers(self._head):
            if self._told.within(_HEAD_LOOK_S):
                return False
        return not self._told.within(0)

    def _run_once(self) -> str:
        """Runs Ray until it ends, or there is no more use for it; returns its last words."""
        processes = RayNodeProcesses(
            address=self._address, name=self._name, port=self._port, head=self._head
        )
        _LOG.info("Ray starts on %s; the head is %s", self._address, self._head)
        head = HeadWatch(self._head)
        try:
            while not processes.have_ended() and not self._told.within(_LOOK_S):
                # Ray would notice after a minute, and its new head knows nothing of this node.
                if self._port is None and head.has_ended():
                    return f"nobody serves the head's port at {self._head} any more"
            return f"its last words: {processes.last_words()}"
        finally:
            head.close()
            processes.close()


class _Told:
    """Whether this process shall end: by a signal, or because its parent has ended."""

    def __init__(self) -> None:
        self._told_r, told_w = os.pipe()
        os.set_blocking(told_w, False)
        parent = os.getppid()
        for number in _SIGNALS:
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(told_w, warn_on_full_buffer=False)
        self._poll = select.poll()
        self._poll.register(self._told_r, select.POLLIN)
        try:
            self._poll.register(os.pidfd_open(parent), select.POLLIN)
        except ProcessLookupError:
            os.write(told_w, b"!")

    def within(self, timeout_s: float) -> bool:
        """Waits; returns whether it was told meanwhile, or before."""
        return bool(self._poll.poll(timeout_s * 1e3))


def main() -> None:
    parser = argparse.ArgumentParser(prog="workers.ray_node", description=__doc__)
    parser.add_argument("--head", required=True)
    parser.add_argument("--address")
    parser.add_argument("--name", default=os.environ.get("SLURMD_NODENAME", socket.gethostname()))
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    if "RAY_AUTH_TOKEN" not in os.environ:
        sys.exit("RAY_AUTH_TOKEN is not set: give every node of the cluster the same token")
    try:
        own = resolved(arguments.address or socket.gethostname())
        node = RayNode(resolved(arguments.head), own, arguments.name)
    except RayClusterFailedError as error:
        sys.exit(str(error))
    node.run()


if __name__ == "__main__":
    main()
