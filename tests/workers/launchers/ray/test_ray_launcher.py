"""The same groups over a real Ray cluster, and what is left when its processes are killed."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from search_spaces.spec.presets.clusters import resolve_cluster
from tests.kit.waiting import wait_until
from tests.workers.grpc_call import call
from tests.workers.process_checks import (
    MARK,
    RANK_PROGRAMS,
    command_line,
    environment_of,
    is_alive,
    make_decoys,
    marked,
    run_group,
    wait_until_gone,
)
from workers.errors import RayClusterFailedError
from workers.launchers.ray.directory import DIRECTORY_VARIABLE, RayDirectory
from workers.launchers.ray.launcher import RayNodes, ray_launcher

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[4]

RAYS_SERVICES = (
    "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo",
    "/ray.rpc.NodeManagerService/GetNodeStats",
    "/ray.rpc.ObjectManagerService/Pull",
    "/ray.rpc.CoreWorkerService/GetCoreWorkerStats",
)

HANGING = f"""
import sys
from tests.workers.process_checks import run_group
from workers.launchers.ray.launcher import RayNodes
nodes = RayNodes(num_devices=2, rank_entry={RANK_PROGRAMS!r})
run_group(nodes, "daemonise", num_ranks=1)
tell = lambda event: print(event["pid"], flush=True)
run_group(nodes, "daemonise-then-hang", on_event=tell, deadline_s=100)
"""


IN_A_FULL_DIRECTORY = f"""
from tests.workers.process_checks import run_group
from workers.launchers.ray.launcher import RayNodes
nodes = RayNodes(num_devices=2, rank_entry={RANK_PROGRAMS!r})
failure = run_group(nodes, "succeed").failure
nodes.close()
assert failure is None, failure
"""


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    nodes = RayNodes(num_devices=2, rank_entry=RANK_PROGRAMS)
    yield nodes
    pids = [pid for on_node in nodes.pids for pid in on_node.values()]
    nodes.close()
    wait_until_gone(pids)


def test_a_group_runs_over_ray_and_its_ranks_meet(nodes: RayNodes) -> None:
    end = run_group(nodes, "meet")
    assert end.failure is None
    where = {"address": nodes.nodes[0].address, "port": 4321}
    assert [end.results[rank]["told"] for rank in (0, 1)] == [where, where]


def test_the_first_failure_ends_the_group_over_ray(nodes: RayNodes) -> None:
    hanging: list[int] = []
    end = run_group(
        nodes,
        "hang",
        by_rank={"1": "fail-late"},
        on_event=lambda event: hanging.append(event["pid"]),
    )
    assert end.failure is not None
    assert end.failure.message == "rank 1: ValueError: this rank was told to fail"
    assert end.log_tail.endswith("ValueError: this rank was told to fail")
    assert end.duration_s < 15.0  # and not at the deadline
    assert not any(map(is_alive, hanging))


def test_a_daemon_of_a_rank_is_gone_after_the_group_over_ray(nodes: RayNodes) -> None:
    end = run_group(nodes, "daemonise")
    assert not any(is_alive(result["daemon"]) for result in end.results.values())


@pytest.mark.slow
def test_packages_of_our_names_where_the_worker_stands_are_left_alone(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-P", "-c", IN_A_FULL_DIRECTORY],
        cwd=make_decoys(tmp_path),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(
    "victim",
    [
        "agent",
        pytest.param("zygote", marks=pytest.mark.slow),
        pytest.param("raylet", marks=pytest.mark.slow),
    ],
)
def test_sigkill_on_a_node_leaves_no_rank_and_the_cluster_recovers(
    nodes: RayNodes, victim: str
) -> None:
    pids = dict(nodes.pids[0])
    pids["raylet"] = psutil.Process(pids["agent"]).ppid()
    assert psutil.Process(pids["raylet"]).name() == "raylet"
    hanging: list[int] = []

    def kill_when_all_hang(event: dict[str, Any]) -> None:
        hanging.append(event["pid"])
        if len(hanging) == 2:
            os.kill(pids[victim], signal.SIGKILL)

    end = run_group(nodes, "hang", on_event=kill_when_all_hang)
    assert end.failure is not None
    assert end.failure.reason == "node_lost"
    wait_until_gone([*hanging, pids["warden"], pids["zygote"]])
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
    for attack in ('touch "$1/py_modules_files"', 'mv "$1" "$1-moved"', 'ls "$1/../sockets"'):
        tried = subprocess.run(
            ["sh", "-c", attack, "nobody", str(packages)],
            user=65534,
            group=65534,
            extra_groups=[],
            capture_output=True,
            text=True,
            check=False,
        )
        assert "Permission denied" in tried.stderr
        assert tried.returncode != 0


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
                service: call(nodes.nodes[0].address, port, service, token=token)
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
def test_sigkill_of_agent_warden_zygote_and_keeper_at_once_leaves_no_daemon(
    nodes: RayNodes,
) -> None:
    hanging: list[int] = []
    daemons: list[int] = []

    def kill_when_all_hang(event: dict[str, Any]) -> None:
        hanging.append(event["pid"])
        if len(hanging) == 2:
            (keeper,) = {psutil.Process(pid).ppid() for pid in hanging}
            daemons.extend({child.pid for child in psutil.Process(keeper).children()} - {*hanging})
            kill_at_once([*nodes.pids[0].values(), keeper])

    end = run_group(nodes, "daemonise-then-hang", on_event=kill_when_all_hang)
    assert len(daemons) == 2
    assert end.failure is not None
    assert end.failure.reason == "node_lost"
    wait_until_gone([*hanging, *daemons])
    nodes.recover(0)
    assert run_group(nodes, "succeed").failure is None


@pytest.mark.slow
def test_sigkill_of_all_wardens_at_once_leaves_nothing_and_the_next_start_cleans_up(
    nodes: RayNodes,
) -> None:
    directory = directory_of(nodes)
    before = set(workings(directory))
    names = {process.name() for process in before}
    assert {"raylet", "gcs_server"} <= names
    wardens = [process for process in before if "workers.ranks.warden" in command_line(process)]
    assert len(wardens) == 3
    kill_at_once([process.pid for process in wardens])
    wait_until("no process of it is left", lambda: not workings(directory), 20)
    # As a worker does: a node is brought back once its loss was noticed.
    lost = run_group(nodes, "succeed").failure
    assert lost is not None
    assert lost.reason == "node_lost"
    nodes.recover(0)
    assert run_group(nodes, "succeed").failure is None
    assert not directory.exists()


def directory_of(nodes: RayNodes) -> Path:
    agent = psutil.Process(nodes.pids[0]["agent"])
    return Path(agent.environ()[DIRECTORY_VARIABLE])


def workings(directory: Path) -> list[psutil.Process]:
    """The processes that work in a directory of Ray's."""
    return marked(str(directory), variable=DIRECTORY_VARIABLE)


def kill_at_once(pids: Sequence[int]) -> None:
    """Kills processes, none of which sees the end of another."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def test_a_cluster_can_not_be_joined_without_its_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    frontier, _ = resolve_cluster("frontier")
    with pytest.raises(
        RayClusterFailedError, match=r"the token with which the nodes of n1:20001 were"
    ):
        ray_launcher(frontier, address="n1:20001", num_nodes=2)


@pytest.mark.slow
@pytest.mark.parametrize("wardens_too", [False, True])
def test_sigkill_of_the_process_that_holds_ray_leaves_nothing(
    wardens_too: bool, place: Path
) -> None:
    mark = uuid.uuid4().hex
    with hanging_holder(mark, place) as (holder, hanging):
        found = marked(mark)
        assert {"raylet", "gcs_server"} <= {process.name() for process in found}
        assert all(map(is_alive, hanging))
        (directory,) = {environment_of(process).get(DIRECTORY_VARIABLE) for process in found} - {
            None
        }
        wardens = [
            process.pid for process in found if "workers.ranks.warden" in command_line(process)
        ]
        assert len(wardens) == 3
        kill_at_once([holder.pid, *(wardens if wardens_too else [])])
    wait_until_gone(hanging)
    wait_until("no process of the cluster is left", lambda: not marked(mark), 5)
    assert Path(str(directory)).parent == place
    assert Path(str(directory)).exists() == wardens_too
    RayDirectory.create().close()
    assert not Path(str(directory)).exists()


@pytest.mark.slow
def test_daemons_that_survive_everything_above_them_end_with_the_next_start(place: Path) -> None:
    mark = uuid.uuid4().hex
    with hanging_holder(mark, place) as (_, hanging):
        found = {process.pid: process for process in marked(mark)}
        (keeper,) = {psutil.Process(pid).ppid() for pid in hanging}
        daemons = {child.pid for child in psutil.Process(keeper).children()} - {*hanging}
        assert len(daemons) == 2
        kill_at_once([pid for pid in found if pid not in daemons])
    wait_until("the daemons alone are left", lambda: {p.pid for p in marked(mark)} == daemons, 5)
    RayDirectory.create().close()
    wait_until_gone(daemons)


@contextmanager
def hanging_holder(mark: str, place: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A process that holds a Ray cluster with two ranks that hang beside daemons; and their pids.

    Args:
        mark: of every process of it.
        place: for its temporary files.
    """
    with subprocess.Popen(
        [sys.executable, "-c", HANGING],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, MARK: mark, "TMPDIR": str(place), "PYTHONPATH": str(ROOT)},
    ) as holder:
        assert holder.stdout is not None
        try:
            yield holder, [int(holder.stdout.readline()) for _ in range(2)]
        finally:
            holder.kill()
