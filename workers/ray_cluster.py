"""The worker's own Ray cluster on this machine: started, joined, and ended with the worker."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from workers.errors import RayClusterFailedError
from workers.warden import python_module, start_under_warden

_LOG = logging.getLogger(__name__)

NODE_ADDRESS: Final = "127.0.1.11"
"""Ray rewrites 127.0.0.1 to the host's own address; another loopback address it leaves alone."""

RAY: Final = tuple(python_module("ray.scripts.scripts"))

_START_WITHIN_S: Final = 90.0
_STOP_WITHIN_S: Final = 20.0
_OBJECT_STORE_BYTES: Final = 80_000_000
"""About the least that Ray accepts; nothing but small documents passes through it."""


def prepare_environment() -> None:
    """Has Ray ask every client for a token; to be called before Ray is imported.

    Ray reads this from the environment while it is imported, in every process that takes part. An
    allocation whose nodes are started by others gives the token in RAY_AUTH_TOKEN.
    """
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"


class LocalRay:
    """A Ray cluster of one node, below a warden of this process.

    However this process ends, the warden ends every process of the cluster. There can be one in a
    process at a time. It is reached with a token of its own, over loopback alone.

    Args:
        command: what `ray` is on a command line.

    Raises:
        RayClusterFailedError: it could not be started or joined.
    """

    def __init__(self, command: Sequence[str] = RAY) -> None:
        prepare_environment()
        self._command = command
        # Paths of unix sockets end at 107 bytes, so Ray's directory must be a short one.
        self._directory = Path(tempfile.mkdtemp(prefix="lt-ray-", dir=_short_temporary_directory()))
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the cluster)
        self._head = self._start_head()
        try:
            self.address = self._wait_for_address()
            self._join()
        except BaseException:
            self.close()
            raise

    def has_ended(self) -> bool:
        """Whether the cluster has ended by itself; then no process of it is left.

        `ray start` ends a second after any of its processes, and the warden ends the rest. Ray tells
        its clients much later.
        """
        return self._head.poll() is not None

    def close(self) -> None:
        """Leaves the cluster and ends all of it; the warden removes its files."""
        ray = sys.modules.get("ray")
        if ray is not None:
            with contextlib.suppress(Exception):  # a cluster that is gone can't be left properly
                ray.shutdown()
        self._head.terminate()
        try:
            self._head.wait(_STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            _LOG.error("the warden of Ray, pid %d, does not end", self._head.pid)
        self._log.close()

    def _start_head(self) -> subprocess.Popen[bytes]:
        options = {
            "port": "0",
            "node-ip-address": NODE_ADDRESS,
            "temp-dir": str(self._directory),
            "min-worker-port": "0",
            "max-worker-port": "0",
            "include-dashboard": "false",
            "num-cpus": "1",
            "num-gpus": "0",
            "object-store-memory": str(_OBJECT_STORE_BYTES),
        }
        flags = [f"--{name}={value}" for name, value in options.items()]
        return start_under_warden(
            [*self._command, "start", "--head", "--block", *flags, "--disable-usage-stats"],
            env=dict(os.environ),
            remove=self._directory,
            stdout=self._log.fileno(),
            stderr=self._log.fileno(),
        )

    def _wait_for_address(self) -> str:
        """Ray writes the address into its directory when the cluster is up."""
        path = self._directory / "ray_current_cluster"
        give_up_at = time.monotonic() + _START_WITHIN_S
        while time.monotonic() < give_up_at:
            if self._head.poll() is not None:
                break
            if path.exists() and (address := path.read_text().strip()):
                return address
            time.sleep(0.02)
        ended = self._head.poll() is not None
        what = "ended at its start" if ended else f"was not up within {_START_WITHIN_S:g} s"
        self._log.seek(0)
        last_words = " / ".join(self._log.read().splitlines()[-5:])
        raise RayClusterFailedError(f"Ray {what}; its last words: {last_words}")

    def _join(self) -> None:
        import ray

        on_sigterm = signal.getsignal(signal.SIGTERM)
        # Ray has its workers look for modules where the driver stands first, so before our own
        # package; this directory holds none. Nothing of this process uses a relative path meanwhile.
        with contextlib.chdir(self._directory), warnings.catch_warnings():
            # Ray announces a change of what an actor without GPUs sees; ours sets it by itself.
            warnings.filterwarnings("ignore", category=FutureWarning, module="ray")
            try:
                ray.init(
                    address=self.address,
                    _node_ip_address=NODE_ADDRESS,
                    log_to_driver=False,
                    configure_logging=False,
                )
            except Exception as error:
                raise RayClusterFailedError(
                    f"the Ray cluster at {self.address} could not be joined: {error}"
                ) from error
            finally:
                if threading.current_thread() is threading.main_thread():
                    signal.signal(signal.SIGTERM, on_sigterm)  # Ray has put its own there


def _short_temporary_directory() -> str | None:
    """The usual place for temporary files, or /tmp where that has a long name."""
    usual = tempfile.gettempdir()
    return usual if len(usual) <= 20 else "/tmp"  # noqa: S108 (mkdtemp makes a private one below)
