"""Ray's files lie in a directory that other users can't enter, and that is always removed."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from layout_tuner.workers.errors import RayClusterFailedError
from layout_tuner.workers.launchers.ray.cluster import LocalRay
from layout_tuner.workers.launchers.ray.directory import DIRECTORY_VARIABLE, PREFIX, RayDirectory
from layout_tuner.workers.ranks.scratch import remove, remove_abandoned
from tests.kit.python_process import printed_by, start_python
from tests.kit.waiting import wait_until
from tests.workers.process_checks import NOBODY, is_alive

pytestmark = pytest.mark.ranks

HOLDER = """
import sys, time
from layout_tuner.workers.launchers.ray.directory import RayDirectory
held = RayDirectory.create()
print(held.path, flush=True)
time.sleep(1000)
"""


# Starts something with 1, 2, ... descriptors to spare, and prints how many each try has left open.
WITHOUT_DESCRIPTORS = """
import gc, os, resource, sys
from layout_tuner.workers.errors import RayClusterFailedError
from layout_tuner.workers.launchers.ray.bridge_process import BridgeProcess
from layout_tuner.workers.ranks.zygote_client import ZygoteClient
from layout_tuner.workers.launchers.ray.cluster import RayNodeProcesses
def open_ones():
    return sorted(map(int, os.listdir("/proc/self/fd")))
def attempt(start, num_to_spare):
    lowest = os.open("/dev/null", os.O_RDONLY)
    os.close(lowest)
    before = open_ones()
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + num_to_spare, hard))
    try:
        start()
    except (OSError, RayClusterFailedError) as error:
        return error, before
    raise AssertionError("it was started")
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
starts = {
    "bridge": (lambda: BridgeProcess([], {}), 7),
    "node": (lambda: RayNodeProcesses(address="127.0.1.11", name="n", port=0), 5),
    "ranks": (ZygoteClient, 6),
}
gc.disable()
start, most = starts[sys.argv[1]]
for num_to_spare in range(1, most):
    error, before = attempt(start, num_to_spare)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    print(len(open_ones()) - len(before), repr(error))
"""


@pytest.fixture
def last_resort(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty directory in /tmp's place, where it is used because another one is not safe."""
    with tempfile.TemporaryDirectory(prefix="lt-", dir="/tmp") as name:
        monkeypatch.setattr("layout_tuner.workers.launchers.ray.directory._LAST_RESORT", name)
        yield Path(name).resolve()


@contextmanager
def held_by_another() -> Iterator[Path]:
    """A directory that another process holds, which is killed at the end."""
    with start_python(HOLDER) as holder:
        yield Path(holder.stdout.readline().strip())
        holder.kill()


def names(place: Path) -> set[str]:
    return {path.name for path in place.iterdir()}


def test_the_directory_is_closed_to_others_whatever_the_umask(place: Path) -> None:
    before = os.umask(0o000)
    try:
        held = RayDirectory.create()
    finally:
        os.umask(before)
    assert stat.S_IMODE(held.path.stat().st_mode) == 0o700
    assert stat.S_IMODE((held.path / "lock").stat().st_mode) == 0o600
    held.close()


def make_too_deep(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = place / ("d" * 40)
    deep.mkdir(mode=0o700)
    monkeypatch.setattr(tempfile, "tempdir", str(deep))


@pytest.mark.parametrize("why", ["others write there", "too deep for sockets", "another user's"])
def test_a_place_that_is_not_safe_is_not_used(
    place: Path, last_resort: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    if why == "others write there":
        place.chmod(0o777)
    elif why == "too deep for sockets":
        make_too_deep(place, monkeypatch)
    elif os.geteuid() == 0:
        os.chown(place, NOBODY, NOBODY)
    else:
        pytest.skip("only root can give a directory away")
    held = RayDirectory.create()
    try:
        assert held.path.parent == last_resort
        longest = held.rays_own / "session_2026-11-22_06-02-56_364178_4194304/sockets/plasma_store"
        assert len(os.fsencode(longest)) <= 107
    finally:
        (held.path / "lock").unlink()
        held.path.rmdir()
        held.close()


def test_no_safe_place_is_one_clear_error(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_too_deep(place, monkeypatch)
    monkeypatch.setattr("layout_tuner.workers.launchers.ray.directory._LAST_RESORT", str(place))
    place.chmod(0o777)
    with pytest.raises(RayClusterFailedError) as failed:
        RayDirectory.create()
    message = str(failed.value)
    assert f"socket paths below {tempfile.tempdir} would have " in message
    replaced = f"other users can replace what is in {place} (mode 777 without the sticky bit)"
    assert replaced in message
    assert message.endswith("set TMPDIR to a short path to which no other user can write")


def test_directories_in_use_stay(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    def create_some(_: int) -> list[RayDirectory]:
        made = [RayDirectory.create() for _ in range(10)]
        assert all(held.path.is_dir() for held in made)
        return made

    with held_by_another() as others, ThreadPoolExecutor(4) as pool:
        made = [held for some in pool.map(create_some, range(4)) for held in some]
        assert all((held.path / "lock").exists() for held in made)
        for held in made:
            held.close()
        list(pool.map(lambda _: remove_abandoned(place, PREFIX, DIRECTORY_VARIABLE), range(4)))
        assert names(place) == {others.name}
    assert [record.getMessage() for record in caplog.records if record.levelname != "INFO"] == []


def test_the_next_start_removes_what_a_killed_process_held(place: Path) -> None:
    with held_by_another() as left:
        (left / "r" / "session").mkdir(parents=True)

    def sleeping_in(directory: str) -> subprocess.Popen[bytes]:
        variables = {**os.environ, DIRECTORY_VARIABLE: directory}
        return subprocess.Popen(["sleep", "1000"], env=variables, start_new_session=True)

    daemon, other = sleeping_in(str(left)), sleeping_in(f"{left}-of-another")
    held = RayDirectory.create()
    assert daemon.wait(60) == -signal.SIGKILL
    assert names(place) == {held.path.name}
    assert is_alive(other.pid)
    other.kill()
    other.wait()
    held.close()


def test_only_our_own_directories_of_this_machine_are_removed(place: Path) -> None:
    left: dict[str, Path] = {}
    for name in ("lt-ray-of-another-host", "lt-ray-of-older-version", "lt-ray-of-another-user"):
        left[name] = place / name
        left[name].mkdir()
        (left[name] / "file").touch()
    (left["lt-ray-of-another-host"] / "lock").write_text("n0042 0a0a0a0a")
    elsewhere = place / "home"
    elsewhere.mkdir()
    (elsewhere / "lock").write_text("n0042 0a0a0a0a")
    (place / "lt-ray-link").symlink_to(elsewhere)
    (place / "lt-ray-trap").mkdir(mode=0o700)
    (place / "of-this-host").write_text(socket.gethostname())
    (place / "lt-ray-trap" / "lock").symlink_to(place / "of-this-host")
    if os.geteuid() == 0:
        os.chown(left["lt-ray-of-another-user"], NOBODY, NOBODY)
    before = names(place)
    held = RayDirectory.create()
    assert names(place) == before | {held.path.name}
    assert (elsewhere / "lock").exists()
    held.close()


def test_a_directory_that_vanishes_is_made_again(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    mkdtemp = tempfile.mkdtemp

    def taken_away(**options: Any) -> str:
        made.append(mkdtemp(**options))
        if len(made) < 3:
            Path(made[-1]).rmdir()
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", taken_away)
    held = RayDirectory.create()
    assert [str(held.path)] == made[2:]
    wait_until("it is there", held.path.is_dir)
    held.close()


@pytest.mark.parametrize("what", ["bridge", "node", "ranks"])
def test_a_start_that_lacks_descriptors_leaves_none_open(place: Path, what: str) -> None:
    lines = printed_by(WITHOUT_DESCRIPTORS, what).splitlines()
    assert len(lines) >= 4
    assert [line for line in lines if not line.startswith("0 ")] == []
    RayDirectory.create().close()
    assert len(names(place)) == 1


def test_what_can_not_be_removed_keeps_the_lock_and_nothing_else(place: Path) -> None:
    held = RayDirectory.create()
    held.close()
    inner = held.rays_own / "b"
    inner.mkdir(parents=True)
    (inner / "resists").touch()
    for name in ("a", "c"):
        (held.rays_own / name).mkdir()
        (held.rays_own / name / "file").touch()
    inner.chmod(0o500)
    if os.geteuid() == 0:
        for path in (held.path, *held.path.rglob("*")):
            os.chown(path, NOBODY, NOBODY)
    with as_user_of(held.path), pytest.raises(PermissionError, match="resists"):
        remove(held.path)
    assert {path.name for path in held.path.rglob("*")} == {"lock", "r", "b", "resists"}
    inner.chmod(0o700)
    remove(held.path)
    assert names(place) == set()


@contextmanager
def as_user_of(path: Path) -> Iterator[None]:
    """Root may remove everything, so this process acts as the file's owner for a while."""
    before = os.geteuid()
    os.seteuid(path.stat().st_uid)
    try:
        yield
    finally:
        os.seteuid(before)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("exit 1", "ended at its start; its last words: "),
        (
            "echo first >&2; echo no port left >&2; exit 3",
            "ended at its start; its last words: first / no port left",
        ),
        ("sleep 1000 & exec sleep 1000", "did not start within 0.3 s; its last words: "),
    ],
)
def test_a_ray_that_does_not_start_says_its_last_words_and_leaves_nothing(
    command: str, said: str, mark: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    within_s = 0.3 if "within" in said else 60.0
    monkeypatch.setattr("layout_tuner.workers.launchers.ray.cluster._START_WITHIN_S", within_s)
    with pytest.raises(RayClusterFailedError) as failed:
        LocalRay(["sh", "-c", command])
    assert str(failed.value) == f"Ray {said}"
    assert names(place) == set()


def test_the_variable_of_the_directory_stands_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/none")
    monkeypatch.setenv(DIRECTORY_VARIABLE, "/tmp/lt-ray-of-another")
    monkeypatch.setenv("SOMETHING_LATER", "x")
    with pytest.raises(RayClusterFailedError) as failed:
        LocalRay(["sh", "-c", "tr '\\0' '\\n' </proc/$$/environ"])
    last = str(failed.value).rpartition(" / ")[2]
    assert last.startswith(f"{DIRECTORY_VARIABLE}=")
    assert "of-another" not in last
