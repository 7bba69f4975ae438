"""One node of an allocation's Ray cluster, kept running as long as the batch system's step lasts.

    python -P -m layout_tuner.workers.ray_node --head ADDRESS:PORT [--address OWN] [--name NAME]
        [--labels LEVEL=GROUP,...]

The node whose address is the head's is the head. When Ray ends, its warden ends all processes of
it, and it is started again; on other nodes than the head once the head answers. SIGTERM, SIGINT or
the end of the parent process end it. The token of the cluster is RAY_AUTH_TOKEN.
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

from layout_tuner.protocol.connection.backoff import Backoff
from layout_tuner.workers.errors import RayClusterFailedError
from layout_tuner.workers.launchers.ray.cluster import (
    HeadWatch,
    RayNodeProcesses,
    answers,
    resolved,
)
from layout_tuner.workers.ranks.processes import end_signals

_LOG = logging.getLogger(__name__)

_LOOK_S: Final = 0.25
_HEAD_LOOK_S: Final = 1.0


class RayNode:
    """Keeps one Ray node running, under a name that it keeps after a restart."""

    def __init__(self, head: str, address: str, name: str, labels: str = "") -> None:
        self._labels = labels
        self._head = head
        self._address = address
        self._name = name
        host, _, port = head.rpartition(":")
        self._port = int(port) if host == address else None
        self._end_signal = _EndSignal()

    def run(self) -> None:
        """Keeps Ray running until the end signal; then no process of it is left."""
        backoff = Backoff(0.5, 30.0)
        while self._wait_for_head():
            started = time.monotonic()
            words = self._run_once()
            if self._end_signal.within(0):
                return
            pause_s = backoff.take_after(time.monotonic() - started)
            _LOG.warning(
                "Ray on %s ended; it is started again in %g s; %s", self._address, pause_s, words
            )
            if self._end_signal.within(pause_s):
                return

    def _wait_for_head(self) -> bool:
        """Waits for the head to answer; returns false where the end signal came first."""
        while self._port is None and not answers(self._head):
            if self._end_signal.within(_HEAD_LOOK_S):
                return False
        return not self._end_signal.within(0)

    def _run_once(self) -> str:
        """Runs Ray until it, its head or this process must end; returns the reason."""
        processes = RayNodeProcesses(
            address=self._address,
            name=self._name,
            port=self._port,
            head=self._head,
            labels=self._labels,
        )
        _LOG.info("Ray starts on %s; the head is %s", self._address, self._head)
        head = HeadWatch(self._head)
        try:
            while not processes.has_ended() and not self._end_signal.within(_LOOK_S):
                # Ray itself would notice after a minute; a new head does not know this node.
                if self._port is None and head.has_ended():
                    return f"the head at {self._head} has ended"
            return f"its last words: {processes.last_words()}"
        finally:
            head.close()
            processes.close()


class _EndSignal:
    """Whether this process must end: after a signal, or after the end of its parent."""

    def __init__(self) -> None:
        parent = os.getppid()
        self._poll = select.poll()
        self._poll.register(end_signals(), select.POLLIN)
        try:
            self._poll.register(os.pidfd_open(parent), select.POLLIN)
        except ProcessLookupError:  # it has ended already
            signal.raise_signal(signal.SIGTERM)

    def within(self, timeout_s: float) -> bool:
        """Waits; returns whether the end came meanwhile, or before."""
        return bool(self._poll.poll(timeout_s * 1e3))


def main() -> None:
    parser = argparse.ArgumentParser(prog="layout_tuner.workers.ray_node", description=__doc__)
    parser.add_argument("--head", required=True)
    parser.add_argument("--address")
    parser.add_argument("--name", default=os.environ.get("SLURMD_NODENAME", socket.gethostname()))
    parser.add_argument("--labels", default="", help="Ray's labels of the node, as domain=rack3")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    if "RAY_AUTH_TOKEN" not in os.environ:
        sys.exit("RAY_AUTH_TOKEN is not set: give every node of the cluster the same token")
    try:
        own = resolved(arguments.address or socket.gethostname())
        RayNode(resolved(arguments.head), own, arguments.name, arguments.labels).run()
    except RayClusterFailedError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
