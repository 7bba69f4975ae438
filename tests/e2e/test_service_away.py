"""Service and worker are apart for longer than a lease: down, with a full disk, or a cut link."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.service.live_service import LiveProcess, LiveService, wait_until
from tests.e2e.held_probes import (
    LEASE_PATIENCE_S,
    PATIENCE_S,
    RANK_ENTRY,
    HeldProbes,
    assert_nothing_left,
    spooled,
)

pytestmark = [pytest.mark.slow, pytest.mark.ranks, pytest.mark.timeout(400)]

AWAY_S = 20.0
"""Longer than a lease."""


@contextmanager
def small_disk(directory: Path, size: str) -> Iterator[Path]:
    """A file system of its own, of this size."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    directory.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "tmpfs", str(directory)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


def fill(directory: Path) -> Path:
    """Takes the last byte of a small disk; returns the file to remove."""
    ballast = directory / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError:
            pass
    return ballast


def started(service: LiveService, **options: object) -> tuple[HeldProbes, LiveProcess]:
    probes = HeldProbes(service)
    worker = service.worker(rank_entry=RANK_ENTRY, **options)  # type: ignore[arg-type]
    worker.start()
    return probes, worker


def assert_all_goes_on(
    service: LiveService, probes: HeldProbes, worker: LiveProcess, trial: int
) -> None:
    """The held probe and one after it complete, and nothing is left of them."""
    service.wait_for_end([trial, after := probes.add()], PATIENCE_S)
    assert service.trial(trial).trial.state == "COMPLETED", worker.said()
    assert service.trial(after).trial.state == "COMPLETED"
    assert_nothing_left(service, worker)


def test_a_service_that_was_away_for_longer_than_a_lease_hears_what_ended_meanwhile(
    tmp_path: Path,
) -> None:
    with LiveService(tmp_path) as service:
        probes, worker = started(service, spool_dir=tmp_path / "spool")
        trial = probes.hold()
        service.serve.kill()
        killed_at = time.monotonic()
        probes.let_go()
        wait_until("its outcome is kept", lambda: spooled(tmp_path / "spool"), PATIENCE_S)
        wait_until("a lease would have run out", lambda: time.monotonic() - killed_at > AWAY_S)
        service.start()
        assert_all_goes_on(service, probes, worker, trial)
        assert probes.endings(trial) == ["reported"]


def test_a_worker_whose_spool_is_full_posts_from_memory(tmp_path: Path) -> None:
    with small_disk(tmp_path / "spool", "64k") as spool, LiveService(tmp_path) as service:
        probes, worker = started(service, spool_dir=spool)
        trial = probes.hold()
        fill(spool)
        service.serve.kill()
        probes.let_go()
        wait_until("it says so", lambda: "is kept in memory" in worker.said(9000), PATIENCE_S)
        service.start()
        assert_all_goes_on(service, probes, worker, trial)
        assert probes.endings(trial) == ["reported"]


def test_a_service_whose_disk_is_full_takes_the_outcome_once_it_has_room(tmp_path: Path) -> None:
    with (
        small_disk(tmp_path / "disk", "8m") as disk,
        LiveService(tmp_path, data_dir=disk / "data") as service,
    ):
        probes, worker = started(service, spool_dir=tmp_path / "spool")
        trial = probes.hold()
        ballast = fill(disk)
        probes.let_go()
        wait_until("its outcome is kept", lambda: spooled(tmp_path / "spool"), PATIENCE_S)
        wait_until("the worker has heard why", lambda: "full" in worker.said(9000), PATIENCE_S)
        assert not service.serve.has_ended(), service.serve.said()
        ballast.unlink()
        assert_all_goes_on(service, probes, worker, trial)
        assert len(service.trial(trial).attempts) <= 2


def ip(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], check=check, capture_output=True, text=True)


class Namespace:
    """A network namespace that reaches this one over a link of its own.

    A third of the addresses of 10.213.0.0/16 follow from the name: two runs at once don't meet.
    """

    def __init__(self) -> None:
        name = uuid.uuid4().hex[:6]
        self.name, self._link, peer = f"lt-{name}", f"lth{name}", f"ltn{name}"
        net = f"10.213.{int(name[:2], 16)}.{int(name[2:4], 16) & ~3}".rsplit(".", 1)
        self.host = f"{net[0]}.{int(net[1]) + 1}"
        inside = f"{net[0]}.{int(net[1]) + 2}"
        ip("netns", "add", self.name)
        try:
            ip("link", "add", self._link, "type", "veth", "peer", "name", peer)
            ip("link", "set", peer, "netns", self.name)
            ip("addr", "add", f"{self.host}/30", "dev", self._link)
            ip("link", "set", self._link, "up")
            ip("-n", self.name, "addr", "add", f"{inside}/30", "dev", peer)
            ip("-n", self.name, "link", "set", peer, "up")
            ip("-n", self.name, "link", "set", "lo", "up")
        except BaseException:
            self.remove()
            raise

    @property
    def prefix(self) -> tuple[str, ...]:
        """What runs a command in it."""
        return ("ip", "netns", "exec", self.name)

    def cut(self) -> None:
        ip("link", "set", self._link, "down")

    def mend(self) -> None:
        ip("link", "set", self._link, "up")

    def remove(self) -> None:
        ip("link", "del", self._link, check=False)
        ip("netns", "del", self.name, check=False)


def why_not() -> str:
    """Why there can be no network namespace here; empty: there can."""
    if shutil.which("ip") is None:
        return "`ip` is not installed (Debian's iproute2)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    made = ip("netns", "add", probe := f"lt-try-{uuid.uuid4().hex[:6]}", check=False)
    ip("netns", "del", probe, check=False)
    return "" if made.returncode == 0 else f"no network namespace can be made: {made.stderr}"


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A service here, a worker with its Ray and ranks behind a link that can be cut."""

    namespace: Namespace
    service: LiveService
    probes: HeldProbes
    worker: LiveProcess
    spool: Path


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if reason := why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("cut")
    namespace = Namespace()
    try:
        with LiveService(folder, host=namespace.host) as service:
            probes, spool = HeldProbes(service), folder / "spool"
            worker = service.worker(rank_entry=RANK_ENTRY, prefix=namespace.prefix, spool_dir=spool)
            worker.start()
            yield Cluster(
                namespace=namespace, service=service, probes=probes, worker=worker, spool=spool
            )
            assert_nothing_left(service, worker)
    finally:
        namespace.remove()


def test_a_probe_that_ends_while_the_network_is_cut_is_posted_once_it_is_back(
    cluster: Cluster,
) -> None:
    probes, service = cluster.probes, cluster.service
    trial = probes.hold()
    waiting = probes.add()
    cluster.namespace.cut()
    probes.let_go()
    wait_until("its outcome is kept", lambda: spooled(cluster.spool), PATIENCE_S)
    probes.wait_for_state(trial, "PENDING", LEASE_PATIENCE_S)  # longer than its lease
    cluster.namespace.mend()
    service.wait_for_end([trial, waiting], PATIENCE_S)
    found = service.trial(trial)
    assert (found.trial.state, found.trial.attempt) == ("COMPLETED", 1), cluster.worker.said()
    assert found.trial.lost_attempts == 0, "it was not lost after all"
    assert probes.endings(trial) == ["reported"]
    assert service.trial(waiting).trial.state == "COMPLETED"
    wait_until("nothing is kept any more", lambda: not spooled(cluster.spool), PATIENCE_S)


def test_a_probe_whose_lease_ran_out_is_ended_and_runs_again_once_the_network_is_back(
    cluster: Cluster,
) -> None:
    probes, service = cluster.probes, cluster.service
    trial = probes.hold()
    cluster.namespace.cut()
    probes.wait_for_state(trial, "PENDING", LEASE_PATIENCE_S)
    cluster.namespace.mend()
    service.wait_for_end([trial], PATIENCE_S)
    found = service.trial(trial)
    assert (found.trial.state, found.trial.attempt) == ("COMPLETED", 2), cluster.worker.said()
    assert probes.endings(trial) == ["lost", "reported"]
    assert found.trial.lost_attempts == 1
    assert len(found.iterations) == len({i.index for i in found.iterations}), "nothing doubled"
