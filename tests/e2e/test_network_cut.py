"""The network between worker and service is cut for longer than a lease, and comes back."""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
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


def ip(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], check=check, capture_output=True, text=True)


class Namespace:
    """A network namespace that reaches this one over a link of its own.

    A third of the addresses of 10.213.0.0/16 follow from the name: two runs at once don't meet.
    """

    def __init__(self) -> None:
        name = uuid.uuid4().hex[:6]
        self.name, self._link, peer = f"lt-{name}", f"lth{name}", f"ltn{name}"
        self._peer = peer
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
