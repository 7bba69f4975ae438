"""The same groups over a real Ray cluster, and what is left when its processes are killed."""

from __future__ import annotations

import os
import signal
import socket
import stat
import struct
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from layout_tuner.search_spaces.clusters.cluster_presets import resolve_cluster
from layout_tuner.workers.errors import RayClusterFailedError
from layout_tuner.workers.launchers.ray.directory import DIRECTORY_VARIABLE, RayDirectory
from layout_tuner.workers.launchers.ray.launcher import RayNodes, ray_launcher
from tests.kit.local_ranks import NEVER_S, Hanging, failure_of, keeper_of
from tests.kit.python_process import printed_by, start_python
from tests.kit.waiting import wait_until
from tests.workers.process_checks import (
    NOBODY,
    RANK_PROGRAMS,
    command_line,
    environment_of,
    is_alive,
    make_decoys,
    marked,
    run_group,
    wait_until_gone,
    wait_until_released,
)

pytestmark = pytest.mark.ranks


RAYS_SERVICES = (
    "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo",
    "/ray.rpc.NodeManagerService/GetNodeStats",
    "/ray.rpc.ObjectManagerService/Pull",
    "/ray.rpc.CoreWorkerService/GetCoreWorkerStats",
)

HANGING = f"""
import sys
from tests.workers.process_checks import run_group
from layout_tuner.workers.launchers.ray.launcher import RayNodes
nodes = RayNodes(num_devices=2, rank_entry={RANK_PROGRAMS!r})
run_group(nodes, "daemonise", num_ranks=1)
tell = lambda event: print(event["pid"], flush=True)
run_group(nodes, "daemonise-then-hang", on_event=tell, deadline_s=100)
"""


IN_A_FULL_DIRECTORY = f"""
from tests.workers.process_checks import run_group
from layout_tuner.workers.launchers.ray.launcher import RayNodes
nodes = RayNodes(num_devices=2, rank_entry={RANK_PROGRAMS!r})
failure = run_group(nodes, "succeed").failure
nodes.close()
assert failure is None, failure
"""


def test_rays_api_server_is_ended_and_the_rest_goes_on(nodes: RayNodes) -> None:
    below = psutil.Process().children(recursive=True)
    commands = {each.pid: " ".join(command_line(each)) for each in below}
    for server in ("gcs_server", "raylet"):
        assert any(server in command for command in commands.values())
    api_server = "dashboard/dashboard.py"
    wait_until_gone(pid for pid, command in commands.items() if api_server in command)
    assert run_group(nodes, "succeed").failure is None


def test_ranks_meet_over_ray_and_the_first_failure_ends_their_group(nodes: RayNodes) -> None:
    end = run_group(nodes, "meet")
    assert end.failure is None
    where = {"address": nodes.nodes[0].address, "port": 4321}
    assert [end.results[rank]["told"] for rank in (0, 1)] == [where, where]
    hanging = Hanging()
    end = run_group(
        nodes, "hang", by_rank={"1": "pause-then-fail"}, on_event=hanging, deadline_s=NEVER_S
    )
    assert end.failure.message == "rank 1: ValueError: this rank was told to fail"
    assert end.log_tail.endswith("ValueError: this rank was told to fail")
    assert not any(map(is_alive, hanging.pids))


@pytest.mark.slow
def test_packages_of_our_names_where_the_worker_stands_are_left_alone(tmp_path: Path) -> None:
    printed_by(IN_A_FULL_DIRECTORY, options=["-P"], cwd=make_decoys(tmp_path))


def test_sigkill_of_the_agent_leaves_no_rank_and_the_cluster_recovers(nodes: RayNodes) -> None:
    """Of the zygote and of the raylet: see `test_ray_nodes`."""
    pids = dict(nodes.pids[0])
    hanging = Hanging(2, lambda: os.kill(pids["agent"], signal.SIGKILL))
    assert failure_of(nodes, "hang", on_event=hanging).reason == "node_lost"
    wait_until_gone([*hanging.pids, pids["warden"], pids["zygote"]])
    handler = signal.getsignal(signal.SIGTERM)
    nodes.recover(0)
    assert signal.getsignal(signal.SIGTERM) is handler
    assert run_group(nodes, "succeed").failure is None


def test_another_user_can_not_reach_rays_sockets_and_packages(nodes: RayNodes) -> None:
    directory = directory_of(nodes)
    assert directory.lstat().st_uid == os.geteuid()
    assert stat.S_IMODE(directory.lstat().st_mode) == 0o700
    (packages,) = directory.glob("r/session_2*/runtime_resources/py_modules_files")
    if os.geteuid() != 0:
        pytest.skip("only root can try it as another user")
    nobody: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    for attack in ('touch "$1/py_modules_files"', 'mv "$1" "$1-moved"', 'ls "$1/../sockets"'):
        words = ["sh", "-c", attack, "nobody", str(packages)]
        tried = subprocess.run(words, **nobody, capture_output=True, text=True, check=False)
        assert "Permission denied" in tried.stderr
        assert tried.returncode != 0


_DATA, _HEADERS, _SETTINGS, _GOAWAY = 0, 1, 4, 7
"""Types of HTTP/2's frames."""
_END_STREAM, _END_HEADERS = 1, 4


def grpc_call(host: str, port: int, method: str, *, token: str | None = None) -> bytes:
    """What an attacker sends to a port that it finds: a call without any library.

    Returns all that a server answers to an empty message; its trailers name the status.
    """

    def text(said: str) -> bytes:
        data = said.encode()
        assert len(data) < 127
        return bytes([len(data)]) + data

    def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
        return len(payload).to_bytes(3) + struct.pack(">BBI", kind, flags, stream) + payload

    headers = b"\x83\x86" + b"\x04" + text(method) + b"\x01" + text(f"{host}:{port}")
    headers += b"\x00" + text("content-type") + text("application/grpc")
    headers += b"\x00" + text("te") + text("trailers")
    if token is not None:
        headers += b"\x00" + text("authorization") + text(f"Bearer {token}")
    call = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(_SETTINGS, 0, 0, b"")
    call += frame(_HEADERS, _END_HEADERS, 1, headers) + frame(_DATA, _END_STREAM, 1, bytes(5))
    with socket.create_connection((host, port), 10) as server, server.makefile("rb") as answer:
        server.sendall(call)
        received, kind, flags = b"", _SETTINGS, 0
        while kind != _GOAWAY and not (kind in (_DATA, _HEADERS) and flags & _END_STREAM):
            head = answer.read(9)
            kind, flags = head[3], head[4]
            received += answer.read(int.from_bytes(head[:3]))
    return received


def test_no_port_of_ray_serves_anybody_without_the_token(nodes: RayNodes) -> None:
    processes = workings(directory_of(nodes))
    ports = {
        connection.laddr.port
        for process in processes
        for connection in process.net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    refusals: dict[int, list[str]] = {}
    for port in ports:
        for token in (None, "0" * 64):
            answers = {
                service: grpc_call(nodes.nodes[0].address, port, service, token=token)
                for service in RAYS_SERVICES
            }
            refusals[port] = [name for name, it in answers.items() if b"InvalidAuthToken" in it]
            unknown = [name for name, it in answers.items() if b"grpc-status\x0212" in it]
            assert len(refusals[port]) == 1, answers  # another port would not ask for a token
            assert len(unknown) == len(RAYS_SERVICES) - 1, answers
    assert {name for names in refusals.values() for name in names} == set(RAYS_SERVICES)


def test_ray_on_one_machine_listens_on_loopback_alone(nodes: RayNodes) -> None:
    listening = {
        connection.laddr.ip
        for process in [psutil.Process(), *psutil.Process().children(recursive=True)]
        for connection in process.net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening
    assert listening <= {"127.0.0.1", "::ffff:127.0.0.1"}


@pytest.mark.slow
def test_sigkill_of_agent_warden_zygote_and_keeper_leaves_no_daemon(nodes: RayNodes) -> None:
    daemons: list[int] = []

    def kill_all_above() -> None:
        (keeper,) = {keeper_of(pid) for pid in hanging.pids}
        children = {child.pid for child in psutil.Process(keeper).children()}
        daemons.extend(children - {*hanging.pids})
        kill_at_once([*nodes.pids[0].values(), keeper])

    hanging = Hanging(2, kill_all_above)
    assert failure_of(nodes, "daemonise-then-hang", on_event=hanging).reason == "node_lost"
    assert len(daemons) == 2
    wait_until_gone([*hanging.pids, *daemons])
    nodes.recover(0)
    assert run_group(nodes, "succeed").failure is None


@pytest.mark.slow
def test_sigkill_of_all_wardens_at_once_leaves_nothing_in_the_end(nodes: RayNodes) -> None:
    directory = directory_of(nodes)
    before = set(workings(directory))
    assert {"raylet", "gcs_server"} <= {process.name() for process in before}
    kill_at_once(wardens_among(before))
    wait_until("no process of it is left", lambda: not workings(directory), 20)
    # As a worker does: a node is brought back once its loss was noticed.
    assert failure_of(nodes, "succeed").reason == "node_lost"
    nodes.recover(0)
    assert run_group(nodes, "succeed").failure is None
    assert not directory.exists()


def wardens_among(processes: Iterable[psutil.Process]) -> list[int]:
    found = [
        each.pid for each in processes if "layout_tuner.workers.ranks.warden" in command_line(each)
    ]
    assert len(found) == 3
    return found


def directory_of(nodes: RayNodes) -> Path:
    agent = psutil.Process(nodes.pids[0]["agent"])
    return Path(agent.environ()[DIRECTORY_VARIABLE])


def workings(directory: Path) -> list[psutil.Process]:
    """The processes that work in a directory of Ray's."""
    return marked(str(directory), variable=DIRECTORY_VARIABLE)


def kill_at_once(pids: Sequence[int]) -> None:
    """Kills processes, none of which sees the end of another.

    The kernel kills some of them with their parents.
    """
    for word in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, word)


def test_a_cluster_can_not_be_joined_without_its_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    frontier, _ = resolve_cluster("frontier")
    with pytest.raises(RayClusterFailedError, match="token with which the nodes of n1:20001 were"):
        ray_launcher(frontier, address="n1:20001", num_nodes=2)


@pytest.mark.slow
@pytest.mark.parametrize("wardens_too", [False, True])
def test_sigkill_of_rays_holder_leaves_nothing(wardens_too: bool, mark: str, place: Path) -> None:
    with hanging_holder() as (holder, hanging):
        found = marked(mark)
        assert {"raylet", "gcs_server"} <= {process.name() for process in found}
        assert all(map(is_alive, hanging))
        named = {environment_of(process).get(DIRECTORY_VARIABLE) for process in found}
        (directory,) = (Path(each) for each in named if each is not None)
        wardens = wardens_among(found)
        kill_at_once([holder.pid, *(wardens if wardens_too else [])])
    wait_until_gone(hanging)
    wait_until("no process of the cluster is left", lambda: not marked(mark), 5)
    assert directory.parent == place
    assert directory.exists() == wardens_too
    wait_until_released(place.glob("*/lock"))
    RayDirectory.create().close()
    assert not directory.exists()


@pytest.mark.slow
def test_daemons_that_survive_all_above_end_with_the_next_start(mark: str, place: Path) -> None:
    with hanging_holder() as (_, hanging):
        found = {process.pid: process for process in marked(mark)}
        (keeper,) = {keeper_of(pid) for pid in hanging}
        daemons = {child.pid for child in psutil.Process(keeper).children()} - {*hanging}
        assert len(daemons) == 2
        kill_at_once([pid for pid in found if pid not in daemons])
    wait_until("the daemons alone are left", lambda: {p.pid for p in marked(mark)} == daemons, 5)
    wait_until_released(place.glob("*/lock"))
    RayDirectory.create().close()
    wait_until_gone(daemons)


@contextmanager
def hanging_holder() -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A process that holds a Ray cluster, and the pids of two ranks that hang beside daemons."""
    with start_python(HANGING) as holder:
        try:
            yield holder, [int(holder.stdout.readline()) for _ in range(2)]
        finally:
            holder.kill()
