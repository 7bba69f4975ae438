"""What keeps a Ray node up: it waits, starts again, and leaves nothing."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import psutil
import pytest

from tests.kit.python_process import run_python, start_python
from tests.kit.waiting import wait_until
from tests.workers.ray_nodes import PATIENCE_S, make_nodes
from workers.errors import RayClusterFailedError
from workers.launchers.ray.cluster import HeadWatch, JoinedRay, resolved

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
    program = "import runpy; runpy.run_module('workers.ray_node', run_name='__main__')"
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
