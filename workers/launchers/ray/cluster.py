"""The worker's Ray cluster: one that it starts on this machine, or one that it joins."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import select
import signal
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Final

from layout_tuner.process_resources import kernel_text
from layout_tuner.workers.errors import RayClusterFailedError
from layout_tuner.workers.launchers.ray.directory import DIRECTORY_VARIABLE, RayDirectory
from layout_tuner.workers.ranks.processes import children, ended_within, last_words
from layout_tuner.workers.ranks.visible_devices import ray_variables, with_variables
from layout_tuner.workers.ranks.warden import python_module, start_under_warden

_LOG = logging.getLogger(__name__)

NODE_ADDRESS: Final = "127.0.0.1"
"""Of a node alone: its servers listen there only. At any other address, Ray's servers listen on
every interface."""

ALONE: Final = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""For every process of a cluster of one node, before Ray is imported. Without it, Ray replaces
127.0.0.1 by the host's address on Linux."""

RAY: Final = tuple(python_module("ray.scripts.scripts"))

_HEADS_OWN: Final = "gcs_server"
_EVERY_NODES: Final = "raylet"
"""The servers without which a node does no work, by their names in the process list."""

_API_SERVER: Final = "/dashboard/dashboard.py"

_START_WITHIN_S: Final = 90.0
_STOP_WITHIN_S: Final = 20.0
_CONNECT_WITHIN_S: Final = 2.0
_LAST_WORDS: Final = 5
_OBJECT_STORE_BYTES: Final = 80_000_000
"""About the minimum that Ray accepts; only small documents pass through it."""

_GCS_AWAY_S: Final = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""After this time without the cluster's head, Ray ends every process that has joined."""

_FOR_LONG_S: Final = str(10**6)

_SELDOM: Final = {
    "RAY_raylet_report_resources_period_milliseconds": "1000",
    "RAY_raylet_check_gc_period_milliseconds": "10000",
    "RAY_object_manager_timer_freq_ms": "10000",
    "RAY_kill_idle_workers_interval_ms": "10000",
    "RAY_gcs_pull_resource_loads_period_milliseconds": "10000",
    "RAY_core_worker_internal_heartbeat_ms": "10000",
    "RAY_report_worker_backlog_interval_ms": "10000",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_emit_main_service_metrics": "0",
    "RAY_event_stats": "0",
}
"""Ray looks at each of these one to ten times a second, and counts events for metrics that nobody
reads. Ranks may have the same cores; objects are small here and few, and no worker ends for lack of
memory or of work."""


def prepare_environment() -> None:
    """Makes Ray require a token of every client; to be called before Ray is imported.

    Every process of the cluster reads these variables while it imports Ray. An allocation whose
    nodes are started by other processes gives the token in RAY_AUTH_TOKEN.
    """
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ[_GCS_AWAY_S] = _FOR_LONG_S  # so that the bridge can report the end
    for variable, value in _SELDOM.items():
        os.environ.setdefault(variable, value)


class RayNodeProcesses:
    """The processes of one Ray node, below a warden of this process.

    When this process ends for any reason, the warden ends all of them and removes their files.

    Args:
        address: of the node. Several nodes on a machine need one each.
        name: of the node; it is the same after a restart.
        port: of the cluster's head on this node, 0 for any; None: this node joins another head.
        head: "address:port" of that other head.
        command: the command `ray`.
        directory: for its files, which another process holds too; None: one is created.
        labels: of the node, as "domain=rack3,building=b1".

    Raises:
        RayClusterFailedError: no directory can be created.
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
        labels: str = "",
    ) -> None:
        prepare_environment()
        # Ray's monitor scales clusters in a cloud; here it would only serve metrics on 0.0.0.0.
        as_head = ["--head", f"--port={port}", "--include-dashboard=false", "--no-monitor"]
        role = [f"--address={head}"] if port is None else as_head
        role += [f"--labels={labels}"] if labels else []
        environment = with_variables(os.environ, ray_variables(os.environ))
        environment.pop(_GCS_AWAY_S, None)
        environment.pop(DIRECTORY_VARIABLE, None)  # the new one stands last: see `end_marked`
        with closing(
            RayDirectory.create() if directory is None else RayDirectory.hold(directory)
        ) as held:
            self.directory = held.rays_own
            self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `close`)
            self._unseen = {_EVERY_NODES} if port is None else {_EVERY_NODES, _HEADS_OWN}
            """Servers that have not been found among the processes yet."""
            self._pidfds: list[int] = []
            try:
                self.warden = start_under_warden(
                    [*command, "start", *role, *_flags(address, name, self.directory)],
                    env=environment | held.variables,
                    directory=held,
                    log_fd=self._log.fileno(),
                )
            except BaseException:
                self._log.close()
                raise

    def has_ended(self) -> bool:
        """Whether the node, or a server that it needs, has ended; `close` ends what is left.

        `ray start` ends a second after a process of its own that fails, and the warden ends the
        rest. But it goes on without a server that ends with exit code 0, as a raylet does when its
        dashboard or runtime-env agent is killed. Clients of Ray learn of either much later.
        """
        if self.warden.poll() is not None:
            return True
        if self._unseen:
            self._find_servers()
        return bool(select.select(self._pidfds, [], [], 0)[0])

    def _servers(self) -> list[int]:
        """The processes below `ray start`."""
        return [pid for start in children(self.warden.pid) for pid in children(start)]

    def _find_servers(self) -> None:
        """Opens a pidfd of each server that has started since the last call."""
        for pid in self._servers():
            with contextlib.suppress(ProcessLookupError):
                pidfd = os.pidfd_open(pid)
                name = kernel_text(Path(f"/proc/{pid}/comm")).strip()
                if name in self._unseen:
                    self._unseen.remove(name)
                    self._pidfds.append(pidfd)
                else:
                    os.close(pidfd)

    def last_words(self) -> str:
        return last_words(self._log.fileno(), _LAST_WORDS)

    def close(self) -> None:
        """Ends all processes; the warden removes their files."""
        self.warden.terminate()
        if not ended_within(self.warden, _STOP_WITHIN_S):
            _LOG.error("the warden of Ray, pid %d, does not end", self.warden.pid)
        while self._pidfds:
            os.close(self._pidfds.pop())
        self._log.close()


class LocalRay(RayNodeProcesses):
    """A Ray cluster of one node, below a warden of this process.

    Its servers listen on 127.0.0.1, and refuse calls without the cluster's token. This process must
    have imported Ray with the variables of `ALONE`.

    Raises:
        RayClusterFailedError: it could not be started or joined.
    """

    def __init__(self, command: Sequence[str] = RAY, directory: Path | None = None) -> None:
        super().__init__(
            address=NODE_ADDRESS,
            name=socket.gethostname(),
            port=0,
            command=command,
            directory=directory,
        )
        try:
            self.address = self._wait_for_address()
            _join(self.address, NODE_ADDRESS)
            self._end_api_server()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Leaves the cluster and ends all of its processes."""
        _leave()
        super().close()

    def _end_api_server(self) -> None:
        """Ends the server of Ray's HTTP API, which takes 65 MiB and which nobody asks.

        No option leaves it out. After SIGTERM, `ray start --block` goes on without it.
        """
        for pid in self._servers():
            if _API_SERVER in kernel_text(Path(f"/proc/{pid}/cmdline")):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)

    def _wait_for_address(self) -> str:
        """Waits until the cluster runs: Ray then writes its address into its directory."""
        path = self.directory / "ray_current_cluster"
        give_up_at = time.monotonic() + _START_WITHIN_S
        while time.monotonic() < give_up_at and not self.has_ended():
            if path.exists() and (address := path.read_text().strip()):
                return address
            time.sleep(0.02)
        ended = self.has_ended()
        what = "ended at its start" if ended else f"did not start within {_START_WITHIN_S:g} s"
        raise RayClusterFailedError(f"Ray {what}; its last words: {self.last_words()}")


class HeadWatch:
    """An idle connection to the head of a cluster, at "address:port"; it closes when the head ends.

    Checking it costs the head nothing, with any number of nodes.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._connection: socket.socket | None = None

    def has_ended(self) -> bool:
        """Whether the port of the head refuses connections.

        A head may close an idle connection, and then accepts another. A head that can't be reached
        may still run, so it does not count as ended.
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
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class JoinedRay:
    """A Ray cluster that other processes have started, with a node on this machine.

    Its head is at "address:port" and may take some time to answer.

    Raises:
        RayClusterFailedError: it does not answer, or could not be joined.
    """

    def __init__(self, address: str, *, within_s: float = _START_WITHIN_S) -> None:
        address = self.address = resolved(address)
        give_up_at = time.monotonic() + within_s
        while not answers(address):  # Ray itself would block for 40 s
            if time.monotonic() > give_up_at:
                raise RayClusterFailedError(
                    f"no Ray cluster answered at {address} within {within_s:g} s"
                )
            time.sleep(0.2)
        self._head = HeadWatch(address)
        host = address.rpartition(":")[0]
        _join(address, host if _is_ours(host) else None)

    def has_ended(self) -> bool:
        """Whether the head has ended."""
        return self._head.has_ended()

    def close(self) -> None:
        self._head.close()
        _leave()


RayCluster = LocalRay | JoinedRay
"""A Ray cluster that this process has joined. A process can be in one at a time. One that has ended
must be left without calls to it."""


def resolved(address: str) -> str:
    """The numeric form of an address, with or without a port: Ray misreads names.

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


def _is_open(connection: socket.socket) -> bool:
    """Whether the connection is open; bytes of the other end are dropped."""
    try:
        while connection.recv(4096):
            pass
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _flags(address: str, name: str, directory: Path) -> list[str]:
    """The options of `ray start` for every node."""
    options = {
        "node-ip-address": address,
        "node-name": name,
        "temp-dir": directory,
        "min-worker-port": 0,
        "max-worker-port": 0,
        "num-cpus": 1,
        "num-gpus": 0,
        "object-store-memory": _OBJECT_STORE_BYTES,
        # It would look at log files ten times a second, and nobody reads them through Ray.
        "include-log-monitor": False,
    }
    return ["--block", "--disable-usage-stats", *(f"--{k}={v}" for k, v in options.items())]


def _join(address: str, node_address: str | None) -> None:
    import ray

    with warnings.catch_warnings():
        # Ray warns of a change in which GPUs an actor without GPUs sees; ours are set explicitly.
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
        with contextlib.suppress(Exception):  # the cluster may have ended
            ray.shutdown()


def _is_ours(address: str) -> bool:
    try:
        socket.create_server((address, 0)).close()
    except OSError:
        return False
    return True
