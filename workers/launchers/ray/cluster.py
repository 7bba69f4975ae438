"""The worker's Ray cluster: one of its own on this machine, or an allocation's that it joins."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

from workers.errors import RayClusterFailedError
from workers.visible_devices import ray_variables, with_variables
from workers.warden import python_module, start_under_warden

_LOG = logging.getLogger(__name__)

NODE_ADDRESS: Final = "127.0.1.11"
"""Ray rewrites 127.0.0.1 to the host's own address; another loopback address it leaves alone."""

RAY: Final = tuple(python_module("ray.scripts.scripts"))

_START_WITHIN_S: Final = 90.0
_STOP_WITHIN_S: Final = 20.0
_CONNECT_WITHIN_S: Final = 2.0
_LAST_WORDS: Final = 5
_LONGEST_USUAL: Final = 20
_OBJECT_STORE_BYTES: Final = 80_000_000
"""About the least that Ray accepts; nothing but small documents passes through it."""

_GCS_AWAY_S: Final = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""After so long without the cluster's head, Ray ends whatever process has joined it."""

_FOR_LONG_S: Final = str(10**6)


def prepare_environment() -> None:
    """Has Ray ask every client for a token; to be called before Ray is imported.

    Ray reads this from the environment while it is imported, in every process that takes part. An
    allocation whose nodes are started by others gives the token in RAY_AUTH_TOKEN.
    """
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ[_GCS_AWAY_S] = _FOR_LONG_S  # long enough to see its end and say so


class RayNodeProcesses:
    """The processes of one Ray node, below a warden of this process.

    However this process ends, the warden ends every one of them and removes their files.

    Args:
        address: the node's own. Several nodes on a machine need one each.
        name: of the node, for people; it comes back under the same one.
        port: of the cluster's head on this node, 0 for any; None: this node joins another head.
        head: "address:port" of that other head.
        command: what `ray` is on a command line.
        directory: for its files, with a short name; None: one is made.
    """

    def __init__(
        self,
        *,
        address: str,
        name: str,
        port: int | None,
        head: str | None = None,
        command: Sequence[str] = RAY,
        directory: Path | None = None,
    ) -> None:
        prepare_environment()
        self.directory = make_directory() if directory is None else directory
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed in `close`)
        as_head = ["--head", f"--port={port}", "--include-dashboard=false"]
        role = [f"--address={head}"] if port is None else as_head
        environment = with_variables(os.environ, ray_variables(os.environ))
        environment.pop(_GCS_AWAY_S, None)
        self.warden = start_under_warden(
            [*command, "start", *role, *_flags(address, name, self.directory)],
            env=environment,
            remove=self.directory,
            stdout=self._log.fileno(),
            stderr=self._log.fileno(),
        )

    def have_ended(self) -> bool:
        """Whether the node has ended by itself; then no process of it is left.

        `ray start` ends a second after any of its processes, and the warden ends the rest. Ray tells
        its clients much later.
        """
        return self.warden.poll() is not None

    def last_words(self) -> str:
        """What `ray start` printed last."""
        self._log.seek(0)
        return " / ".join(self._log.read().splitlines()[-_LAST_WORDS:])

    def close(self) -> None:
        """Ends all of it; the warden removes its files."""
        self.warden.terminate()
        try:
            self.warden.wait(_STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            _LOG.error("the warden of Ray, pid %d, does not end", self.warden.pid)
        self._log.close()


class RayCluster(Protocol):
    """A Ray cluster that this process has joined. A process can be in one at a time."""

    def has_ended(self) -> bool:
        """Whether it has ended, so that it can be left without asking it."""
        ...

    def close(self) -> None:
        """Leaves it, and ends what this process has started of it."""
        ...


class LocalRay:
    """A Ray cluster of one node, below a warden of this process.

    It is reached with a token of its own, over loopback alone.

    Args:
        command: what `ray` is on a command line.
        directory: for its files, with a short name; None: one is made.

    Raises:
        RayClusterFailedError: it could not be started or joined.
    """

    def __init__(self, command: Sequence[str] = RAY, directory: Path | None = None) -> None:
        self._processes = RayNodeProcesses(
            address=NODE_ADDRESS,
            name=socket.gethostname(),
            port=0,
            command=command,
            directory=directory,
        )
        try:
            self.address = self._wait_for_address()
            _join(self.address, NODE_ADDRESS)
        except BaseException:
            self.close()
            raise

    def has_ended(self) -> bool:
        """Whether the cluster has ended by itself; then no process of it is left."""
        return self._processes.have_ended()

    def close(self) -> None:
        """Leaves the cluster and ends all of it."""
        _leave()
        self._processes.close()

    def _wait_for_address(self) -> str:
        """Ray writes the address into its directory when the cluster is up."""
        path = self._processes.directory / "ray_current_cluster"
        give_up_at = time.monotonic() + _START_WITHIN_S
        while time.monotonic() < give_up_at:
            if self._processes.have_ended():
                break
            if path.exists() and (address := path.read_text().strip()):
                return address
            time.sleep(0.02)
        ended = self._processes.have_ended()
        what = "ended at its start" if ended else f"was not up within {_START_WITHIN_S:g} s"
        raise RayClusterFailedError(f"Ray {what}; its last words: {self._processes.last_words()}")


class JoinedRay:
    """A Ray cluster that others have started, with a node on this machine.

    Args:
        address: "address:port" of its head.
        within_s: how long to wait for the head.

    Raises:
        RayClusterFailedError: it does not answer, or could not be joined.
    """

    def __init__(self, address: str, *, within_s: float = _START_WITHIN_S) -> None:
        address = self.address = resolved(address)
        give_up_at = time.monotonic() + within_s
        while not answers(address):  # Ray itself blocks for 40 s where nobody does
            if time.monotonic() > give_up_at:
                raise RayClusterFailedError(
                    f"no Ray cluster answered at {address} within {within_s:g} s"
                )
            time.sleep(0.2)
        self._head = HeadWatch(address)
        host = address.rpartition(":")[0]
        _join(address, host if _is_ours(host) else None)

    def has_ended(self) -> bool:
        """Whether nobody serves the head's address any more."""
        return self._head.has_ended()

    def close(self) -> None:
        """Leaves the cluster."""
        self._head.close()
        _leave()


def resolved(address: str) -> str:
    """An address, with or without a port, by its number: Ray takes names for what they are not.

    Raises:
        RayClusterFailedError: the name is unknown.
    """
    host, colon, port = address.partition(":")
    try:
        return f"{socket.gethostbyname(host)}{colon}{port}"
    except OSError as error:
        raise RayClusterFailedError(f"the address of {host} can't be found: {error}") from error


def answers(address: str) -> bool:
    """Whether a TCP port can be reached."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), _CONNECT_WITHIN_S).close()
    except OSError:
        return False
    return True


class HeadWatch:
    """An idle connection to the head of a cluster: it closes the moment that the head ends.

    Looking costs the head nothing, however many nodes do so.

    Args:
        address: "address:port" of the head, which answers now.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._connection: socket.socket | None = None

    def has_ended(self) -> bool:
        """Whether nobody serves the port any more.

        A head may close an idle connection, and then takes another. One that can't be reached has
        not ended, as far as can be known.
        """
        if self._connection is not None and _is_open(self._connection):
            return False
        self.close()
        host, _, port = self._address.rpartition(":")
        try:
            self._connection = socket.create_connection((host, int(port)), _CONNECT_WITHIN_S)
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
        self._connection.setblocking(False)
        return False

    def close(self) -> None:
        """Gives the connection up."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _is_open(connection: socket.socket) -> bool:
    """Whether the other end is there; what it has said is dropped."""
    try:
        while connection.recv(4096):
            pass
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _flags(address: str, name: str, directory: Path) -> list[str]:
    """What every node of ours is started with."""
    options = {
        "node-ip-address": address,
        "node-name": name,
        "temp-dir": directory,
        "min-worker-port": 0,
        "max-worker-port": 0,
        "num-cpus": 1,
        "num-gpus": 0,
        "object-store-memory": _OBJECT_STORE_BYTES,
    }
    return ["--block", "--disable-usage-stats", *(f"--{k}={v}" for k, v in options.items())]


def _join(address: str, node_address: str | None) -> None:
    import ray

    with warnings.catch_warnings():
        # Ray announces a change of what an actor without GPUs sees; ours sets it by itself.
        warnings.filterwarnings("ignore", category=FutureWarning, module="ray")
        try:
            ray.init(
                address=address,
                _node_ip_address=node_address,
                log_to_driver=False,
                configure_logging=False,
            )
        except Exception as error:
            raise RayClusterFailedError(
                f"the Ray cluster at {address} could not be joined: {error}"
            ) from error


def _leave() -> None:
    ray = sys.modules.get("ray")
    if ray is not None:
        with contextlib.suppress(Exception):  # a cluster that is gone can't be left properly
            ray.shutdown()


def _is_ours(address: str) -> bool:
    """Whether an address is one of this machine's."""
    try:
        socket.create_server((address, 0)).close()
    except OSError:
        return False
    return True


def make_directory() -> Path:
    """A new directory for Ray's files: paths of unix sockets end at 107 bytes, so a short one."""
    usual = tempfile.gettempdir()
    short = usual if len(usual) <= _LONGEST_USUAL else "/tmp"  # noqa: S108 (a private one below it)
    return Path(tempfile.mkdtemp(prefix="lt-ray-", dir=short))
