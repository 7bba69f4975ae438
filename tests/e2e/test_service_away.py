"""The service is down for longer than a lease, or its disk, or the worker's disk, is full."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.service.live_service import LiveProcess, LiveService, wait_until
from tests.e2e.held_probes import (
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
        assert service.serve.process is not None
        assert not service.serve.has_ended(), service.serve.said()
        ballast.unlink()
        assert_all_goes_on(service, probes, worker, trial)
        assert len(service.trial(trial).attempts) <= 2
