"""What keeps a Ray node and the process that uses Ray up: it starts again and leaves nothing."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import ClassVar

import psutil
import pytest

from layout_tuner.workers.errors import NodeLostError, RayClusterFailedError
from layout_tuner.workers.launchers.agent import ADDRESS_VARIABLE, TOKEN_VARIABLE, greet
from layout_tuner.workers.launchers.ray.cluster import (
    HeadWatch,
    JoinedRay,
    RayNodeProcesses,
    resolved,
)
from layout_tuner.workers.launchers.ray.launcher import RayNodes
from layout_tuner.workers.ranks.json_lines import JsonLines
from tests.kit.python_process import run_python, start_python
from tests.kit.waiting import wait_until
from tests.workers.ray_nodes import PATIENCE_S, make_nodes

pytestmark = pytest.mark.ranks

ADDRESS = "127.0.1.41"


def directory_of(raylet: int) -> Path:
    """Where a node has its files. A process that was just forked has its name before its flags."""
    found: list[Path] = []

    def has_flags() -> bool:
        flags = [word.partition("=") for word in psutil.Process(raylet).cmdline()]
        found[:] = [Path(value).parent for name, _, value in flags if name == "--session_dir"]
        return bool(found)

    wait_until("the raylet has its flags", has_flags, PATIENCE_S)
    return found[0]


def holds_pidfd(pid: int) -> bool:
    try:
        return any("pidfd" in str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:  # one was closed meanwhile
        return False


def test_a_node_without_a_token_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    program = "import runpy; runpy.run_module('layout_tuner.workers.ray_node', run_name='__main__')"
    ended = run_python(program, f"--head={ADDRESS}:1", options=["-P"], cwd=tmp_path)
    assert ended.returncode == 1
    assert ended.stderr.startswith("RAY_AUTH_TOKEN is not set")


def test_host_names_are_resolved_before_ray_sees_them() -> None:
    assert resolved("localhost:6379") == "127.0.0.1:6379"
    assert resolved(ADDRESS) == ADDRESS
    with pytest.raises(RayClusterFailedError, match=r"no-such-host\.invalid can't be found"):
        resolved("no-such-host.invalid:1")


def test_a_cluster_that_is_not_there_is_given_up_in_time() -> None:
    with pytest.raises(RayClusterFailedError, match=r"no Ray cluster answered at 127\.0\.1\.41:1 "):
        JoinedRay(f"{ADDRESS}:1", within_s=0.1)


def test_a_head_has_ended_when_its_port_is_refused_and_not_when_it_closes_a_connection() -> None:
    server = socket.create_server((ADDRESS, 0))
    watch = HeadWatch(f"{ADDRESS}:{server.getsockname()[1]}")
    assert not watch.has_ended()
    taken, _ = server.accept()
    taken.sendall(b"a greeting")
    assert not watch.has_ended()
    taken.close()
    assert not watch.has_ended()  # it took another connection
    taken, _ = server.accept()
    server.close()
    assert not watch.has_ended()  # the connection is as good as before
    taken.close()
    wait_until("the end shows", watch.has_ended)
    watch.close()


STARTER = """
import shutil, subprocess, sys, time
names = ["raylet", *(["gcs_server"] if "--head" in sys.argv else [])]
for name in names:  # as `ray start`, which goes on without a server that ends with code 0
    shutil.copy(sys.executable, f"{sys.argv[1]}/{name}")
    subprocess.Popen([f"{sys.argv[1]}/{name}", "-c", "input()"], stdin=subprocess.PIPE)
time.sleep(3600)
"""


@pytest.mark.parametrize(
    ("port", "victim"), [(0, "raylet"), (0, "gcs_server"), (None, "raylet")], ids=str
)
def test_a_node_without_one_of_its_servers_has_ended_although_ray_start_goes_on(
    port: int | None, victim: str, tmp_path: Path
) -> None:
    starter = [sys.executable, "-c", STARTER, str(tmp_path)]
    node = RayNodeProcesses(
        address=ADDRESS, name="n0", port=port, head=f"{ADDRESS}:1", command=starter
    )
    names = {"raylet"} if port is None else {"raylet", "gcs_server"}

    def servers() -> dict[str, psutil.Process]:
        below = psutil.Process(node.warden.pid).children(recursive=True)
        return {process.name(): process for process in below if process.name() in names}

    try:
        wait_until("its servers run", lambda: servers().keys() == names)
        assert not node.has_ended()
        servers()[victim].kill()
        wait_until("the end of the node shows", node.has_ended)
        assert node.warden.poll() is None
    finally:
        node.close()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_node_is_kept_up_and_leaves_nothing_when_its_supervisor_is_killed() -> None:
    """That it leaves nothing when it is told to end, `RayNodeProcess.end` checks elsewhere."""
    (head,) = make_nodes(ADDRESS)
    head.start()
    raylet = head.pid_of("raylet")
    up = directory_of(raylet) / "ray_current_cluster"
    wait_until("it is up", up.exists, PATIENCE_S)
    assert "gcs_server" in head.pids_by_name()
    os.kill(raylet, signal.SIGKILL)
    wait_until("it is up again", lambda: head.pid_of("raylet") != raylet, PATIENCE_S)
    directory = directory_of(head.pid_of("raylet"))
    assert directory.exists()
    head.process.kill()
    head.process.wait()
    head.wait_until_nothing_is_left()
    assert not directory.exists()


def test_a_node_whose_starter_is_gone_ends_even_while_it_waits_for_its_head() -> None:
    _, joiner = make_nodes(ADDRESS, "127.0.1.42")
    program = (
        "import sys, time; from tests.workers.ray_nodes import RayNodeProcess as N;"
        "n = N(name='n', address=sys.argv[1], head=sys.argv[2], token='x' * 64, mark=sys.argv[3]);"
        "n.start(); print(n.process.pid, flush=True); time.sleep(3600)"
    )
    with start_python(program, joiner.address, joiner.head, joiner.mark) as starter:
        pid = int(starter.stdout.readline())
        try:
            wait_until("it watches its starter", lambda: holds_pidfd(pid), PATIENCE_S)
        finally:
            starter.kill()
    joiner.wait_until_nothing_is_left()


class FakeBridge:
    """Stands for the process that uses Ray: an agent connects, and it ends where a test says so."""

    starts = 0
    starts_to_fail = (2, 3)
    agents: ClassVar[list[JsonLines]] = []
    num_ended = 0

    def __init__(self, _flags: Sequence[str], variables: Mapping[str, str]) -> None:
        FakeBridge.starts += 1
        if FakeBridge.starts in FakeBridge.starts_to_fail:
            raise OSError(28, "No space left on device")
        self.to_end: SimpleQueue[None] = SimpleQueue()
        self.address, self.token = (variables[name] for name in (ADDRESS_VARIABLE, TOKEN_VARIABLE))
        self.agent = self.start_agent(FakeBridge.starts)

    def wait(self) -> str:
        self.to_end.get(timeout=60)
        self.to_end.put(None)  # it has ended for good
        return "exit code 1"

    def close(self) -> None:
        self.to_end.put(None)

    def end(self) -> None:
        FakeBridge.num_ended += 1
        self.to_end.put(None)

    def replace(self, _node: str) -> None:
        """Does nothing: its cluster hangs."""

    def last_words(self) -> str:
        return ""

    def start_agent(self, pid: int, name: str = "n0") -> JsonLines:
        where = {"node": f"key-{pid}", "name": name, "address": "127.0.0.1"}
        agent = greet(self.address, self.token, where)
        FakeBridge.agents.append(agent)
        agent.send({"event": "ready", "pids": {"agent": pid}})
        return agent


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[RayNodes]:
    monkeypatch.setattr("layout_tuner.workers.launchers.ray.launcher.BridgeProcess", FakeBridge)
    monkeypatch.setattr(FakeBridge, "starts", 0)
    monkeypatch.setattr(FakeBridge, "agents", [])
    monkeypatch.setattr(FakeBridge, "num_ended", 0)
    nodes = RayNodes(num_devices=2)
    yield nodes
    nodes.close()
    for agent in FakeBridge.agents:
        agent.close()


def test_a_bridge_that_does_not_start_is_started_again(
    nodes: RayNodes, caplog: pytest.LogCaptureFixture
) -> None:
    nodes._bridge.to_end.put(None)
    wait_until("it has joined again", lambda: nodes.pids == [{"agent": 4}], 60)
    assert not nodes.lost()
    assert caplog.text.count("No space left on device") == len(FakeBridge.starts_to_fail)


def test_bridges_that_worked_are_started_again_at_once_however_often_they_are_killed(
    nodes: RayNodes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(FakeBridge, "starts_to_fail", ())
    for number in range(1, 5):
        nodes._bridge.to_end.put(None)
        wait_until("it has joined again", lambda n=number: nodes.pids == [{"agent": n + 1}])
    assert caplog.text.count("another one starts in 0.1 s") == 4


def test_an_agent_that_greets_again_takes_the_place_of_the_one_before(nodes: RayNodes) -> None:
    agent = nodes._bridge.start_agent(9)
    wait_until("it has joined", lambda: nodes.pids == [{"agent": 9}])
    assert nodes._bridge.agent.receive() is None  # so it ends
    assert not nodes.lost()
    agent.close()
    wait_until("its end is noticed", lambda: nodes.lost())
    assert nodes.lost() == {0: "node n0 was lost: its agent has ended"}


def test_a_node_that_does_not_recover_gets_another_bridge_once_no_other_node_works(
    nodes: RayNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeBridge, "starts_to_fail", ())
    monkeypatch.setattr("layout_tuner.workers.launchers.ray.launcher.START_WITHIN_S", 0.05)
    other = nodes._bridge.start_agent(9, name="n1")
    wait_until("two have joined", lambda: len(nodes.pids) == 2)
    nodes._bridge.agent.close()
    wait_until("one is lost", lambda: nodes.lost().keys() == {0})
    with pytest.raises(NodeLostError, match=r"has not recovered in 0\.05 s$"):
        nodes.recover(0)
    assert FakeBridge.num_ended == 0  # the other node's probes go on
    other.close()
    wait_until("both are lost", lambda: nodes.lost().keys() == {0, 1})
    with pytest.raises(NodeLostError, match="has not recovered"):
        nodes.recover(0)
    assert FakeBridge.num_ended == 1
    wait_until("the next bridge has brought it back", lambda: 0 not in nodes.lost())


def test_a_node_of_a_cluster_of_others_says_what_to_do(
    nodes: RayNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeBridge, "starts_to_fail", ())
    monkeypatch.setattr("layout_tuner.workers.launchers.ray.launcher.START_WITHIN_S", 0.05)
    joined = RayNodes(num_devices=2, address="127.0.0.1:1")
    try:
        joined._bridge.agent.close()
        wait_until("it is lost", joined.lost)
        with pytest.raises(NodeLostError, match=r"; start Ray on n0 again, .* 127\.0\.0\.1:1"):
            joined.recover(0)
    finally:
        joined.close()


def test_only_losses_of_agents_are_counted_as_such(nodes: RayNodes) -> None:
    nodes._bridge.agent.send({"event": "lost", "message": "the zygote ended"})
    wait_until("the zygote's loss shows", lambda: "zygote" in nodes.lost().get(0, ""))
    nodes._bridge.agent.close()
    nodes._bridge.start_agent(9)
    wait_until("it is back", lambda: nodes.pids == [{"agent": 9}] and not nodes.lost())
    assert nodes.agent_ends(0) == 0
    FakeBridge.agents[-1].close()
    wait_until("it is lost again", nodes.lost)
    assert nodes.agent_ends(0) == 1
