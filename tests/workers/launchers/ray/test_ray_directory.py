"""Ray's files lie in a directory that other users can't enter, and that is always removed."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.kit.waiting import wait_until
from tests.workers.process_checks import is_alive
from workers.errors import RayClusterFailedError
from workers.launchers.ray.cluster import LocalRay
from workers.launchers.ray.directory import (
    DIRECTORY_VARIABLE,
    RayDirectory,
    remove_abandoned,
)
from workers.ranks.scratch import remove

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[4]
NOBODY = 65534

# What `ray start` does with its own directory: it creates directories for everybody.
LIKE_RAY = """
for word in "$@"; do case "$word" in --temp-dir=*) own="${word#--temp-dir=}";; esac; done
mkdir -p "$own" && chmod 777 "$own" && mkdir "$own/packages" && chmod 777 "$own/packages"
touch "$own/packages/package" && chmod 666 "$own/packages/package"
ls -ld "${own%/r}" | cut -c1-10 >&2; echo "$own" >&2
sleep 1000 &
exec sleep 1000
"""

HOLDER = """
import sys, time
from workers.launchers.ray.directory import RayDirectory
held = RayDirectory.create()
print(held.path, flush=True)
time.sleep(1000)
"""


# Starts something with 1, 2, ... descriptors to spare, and prints how many each try has left open.
WITHOUT_DESCRIPTORS = """
import gc, os, resource, sys
from workers.errors import RayClusterFailedError
from workers.launchers.ray.bridge_process import BridgeProcess
from workers.ranks.node_ranks import NodeRanks
from workers.launchers.ray.cluster import RayNodeProcesses
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
    "ranks": (NodeRanks, 6),
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
        monkeypatch.setattr("workers.launchers.ray.directory._LAST_RESORT", name)
        yield Path(name).resolve()


def start_holder() -> tuple[subprocess.Popen[str], Path]:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
    )
    assert holder.stdout is not None
    return holder, Path(holder.stdout.readline().strip())


def end(holder: subprocess.Popen[str]) -> None:
    holder.kill()
    holder.communicate()


def names(place: Path) -> set[str]:
    return {path.name for path in place.iterdir()}


def as_nobody(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", script, "nobody", *arguments],
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("umask", [0o000, 0o022])
def test_others_are_kept_out_of_what_ray_makes_for_everybody(place: Path, umask: int) -> None:
    before = os.umask(umask)
    held = RayDirectory.create()
    try:
        held.rays_own.mkdir(mode=0o777)
        held.rays_own.chmod(0o777)
        assert stat.S_IMODE(held.path.stat().st_mode) == 0o700
        assert stat.S_IMODE((held.path / "lock").stat().st_mode) == 0o600
    finally:
        os.umask(before)
        held.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_can_replace_nothing_below_the_directory(place: Path) -> None:
    held = RayDirectory.create()
    package = held.rays_own / "package"
    held.rays_own.mkdir()
    held.rays_own.chmod(0o777)
    package.write_text("ours")
    package.chmod(0o666)
    attacks = {
        "overwrite": 'echo theirs >"$1"',
        "replace": 'rm -f "$1" && echo theirs >"$1"',
        "look": 'ls "$(dirname "$1")"',
        "rename": 'mv "$(dirname "$(dirname "$1")")" "$2/moved"',
        "chmod": 'chmod 777 "$(dirname "$(dirname "$1")")"',
    }
    results = {name: as_nobody(it, str(package), str(place)) for name, it in attacks.items()}
    assert [name for name, result in results.items() if result.returncode == 0] == []
    assert package.read_text() == "ours"
    held.close()


def test_a_ray_that_makes_directories_for_everybody_makes_them_below_a_closed_one(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.launchers.ray.cluster._START_WITHIN_S", 1.0)
    with pytest.raises(RayClusterFailedError) as failed:
        LocalRay(["sh", "-c", LIKE_RAY, "ray"])
    mode, own = str(failed.value).rpartition("last words: ")[2].split(" / ")
    assert mode == "drwx------"
    assert Path(own).parent.parent == place
    assert names(place) == set()


def test_a_place_where_others_can_replace_directories_is_not_used(
    place: Path, last_resort: Path
) -> None:
    place.chmod(0o777)
    held = RayDirectory.create()
    try:
        assert held.path.parent == last_resort
    finally:
        held.rays_own.parent.joinpath("lock").unlink()
        held.path.rmdir()
        held.close()


def test_a_place_that_is_too_deep_for_sockets_is_not_used(
    place: Path, last_resort: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = place / ("d" * 40)
    deep.mkdir(mode=0o700)
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
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
    deep = place / ("d" * 40)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    monkeypatch.setattr("workers.launchers.ray.directory._LAST_RESORT", str(place))
    place.chmod(0o777)
    with pytest.raises(RayClusterFailedError) as failed:
        RayDirectory.create()
    message = str(failed.value)
    assert f"socket paths below {deep} would have " in message
    assert (
        f"other users can replace what is in {place} (mode 777 without the sticky bit)" in message
    )
    assert message.endswith("set TMPDIR to a short path to which no other user can write")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_place_that_belongs_to_another_user_is_not_used(place: Path, last_resort: Path) -> None:
    os.chown(place, NOBODY, NOBODY)
    held = RayDirectory.create()
    try:
        assert held.path.parent == last_resort
    finally:
        (held.path / "lock").unlink()
        held.path.rmdir()
        held.close()


def test_the_directory_of_a_process_that_was_killed_goes_with_the_next_start(place: Path) -> None:
    dead, left = start_holder()
    (left / "r" / "session").mkdir(parents=True)
    end(dead)
    held = RayDirectory.create()
    assert names(place) == {held.path.name}
    held.close()


def test_directories_in_use_stay_whoever_starts_at_the_same_time(place: Path) -> None:
    holders = [start_holder() for _ in range(3)]
    made: list[RayDirectory] = []

    def create_some() -> None:
        for _ in range(20):
            held = RayDirectory.create()
            made.append(held)
            assert held.path.is_dir()

    threads = [threading.Thread(target=create_some) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 80
    assert all(path.is_dir() for _, path in holders)
    assert all((held.path / "lock").exists() for held in made)
    for held in made:
        held.close()
    RayDirectory.create().close()
    assert len(names(place)) == len(holders) + 1
    for holder, _ in holders:
        end(holder)


def test_a_process_that_still_works_in_an_abandoned_directory_ends_first(place: Path) -> None:
    dead, left = start_holder()
    end(dead)
    variables = {**os.environ, DIRECTORY_VARIABLE: str(left)}
    daemon = subprocess.Popen(["sleep", "1000"], env=variables, start_new_session=True)
    other = subprocess.Popen(
        ["sleep", "1000"], env={**os.environ, DIRECTORY_VARIABLE: f"{left}-of-another"}
    )
    RayDirectory.create().close()
    assert daemon.wait(60) == -signal.SIGKILL
    assert not left.exists()
    assert is_alive(other.pid)
    other.kill()
    other.wait()


def test_only_our_own_directories_of_this_machine_are_removed(place: Path) -> None:
    left: dict[str, Path] = {}
    for name in ("lt-ray-of-another-host", "lt-ray-of-older-version", "lt-ray-of-another-user"):
        left[name] = place / name
        left[name].mkdir()
        (left[name] / "file").touch()
    (left["lt-ray-of-another-host"] / "lock").write_text("n0042 0a0a0a0a")
    elsewhere = place / "home"
    elsewhere.mkdir()
    (elsewhere / "lock").write_text((place / "lt-ray-of-another-host" / "lock").read_text())
    (place / "lt-ray-link").symlink_to(elsewhere)
    if os.geteuid() == 0:
        os.chown(left["lt-ray-of-another-user"], NOBODY, NOBODY)
    before = names(place)
    held = RayDirectory.create()
    assert names(place) == before | {held.path.name}
    assert (elsewhere / "lock").exists()
    held.close()


def test_a_lock_that_is_a_link_is_not_followed(place: Path) -> None:
    target = place / "target"
    target.write_text("ours")
    trap = place / "lt-ray-trap"
    trap.mkdir(mode=0o700)
    (trap / "lock").symlink_to(target)
    RayDirectory.create().close()
    assert target.read_text() == "ours"
    assert trap.exists()


def test_a_directory_that_vanishes_before_it_is_locked_is_created_again(
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
def test_a_start_without_descriptors_to_spare_leaves_none_open_and_its_directory_abandoned(
    place: Path, what: str
) -> None:
    tried = subprocess.run(
        [sys.executable, "-c", WITHOUT_DESCRIPTORS, what],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert tried.returncode == 0, tried.stderr
    assert len(tried.stdout.splitlines()) >= 4
    assert [line for line in tried.stdout.splitlines() if not line.startswith("0 ")] == []
    RayDirectory.create().close()
    assert len(names(place)) == 1


def test_starts_that_sweep_at_once_have_nothing_to_warn_of(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        made = [RayDirectory.create() for _ in range(10)]
        for held in made:
            held.close()
        threads = [threading.Thread(target=remove_abandoned, args=(place,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [record.getMessage() for record in caplog.records if record.levelname != "INFO"] == []


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
