"""Probes of several nodes in a tree of switches of a real Slurm.

Debian's version (22.05) has topology/tree and `--switches`. It lacks topology/block and `--segment`
(23.11): tests/workers/slurm has their formats and flags, by Slurm's documentation and source.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing
from itertools import combinations
from pathlib import Path
from queue import SimpleQueue

import pytest

from layout_tuner.search_spaces.clusters.site import Site
from layout_tuner.workers.launchers.slurm_step.srun import SrunNodes
from layout_tuner.workers.packing.packer import Packer
from layout_tuner.workers.packing.request import PackRequest
from layout_tuner.workers.slurm.batch_script import render
from layout_tuner.workers.slurm.topology import topology_of
from layout_tuner.workers.worker.events import WorkerEvent
from layout_tuner.workers.worker.roster import NodeRoster
from tests.slurm.allocations import allocation, step_settings
from tests.slurm.site import SlurmSite, why_not
from tests.workers.slurm.requests import make_cluster, make_request

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

TREE = """\
SwitchName=leaf1 Nodes=n1,n4
SwitchName=leaf2 Nodes=n2,n6,n8
SwitchName=leaf3 Nodes=n3
SwitchName=leaf4 Nodes=n[5,7]
SwitchName=spine1 Switches=leaf[1,3]
SwitchName=spine2 Switches=leaf[2,4]
SwitchName=top Switches=spine[1-2]
"""

LEVELS = Site(levels=("leaf", "spine"))

Place = tuple[str, str]
"""The leaf and the spine of a node."""


@pytest.fixture(scope="module")
def site() -> Iterator[SlurmSite]:
    if reason := why_not():
        pytest.skip(reason)
    with closing(SlurmSite(num_nodes=8, switches=TREE)) as site:
        yield site


@pytest.fixture
def job(site: SlurmSite) -> Iterator[str]:
    with allocation(site, 8) as job_id:
        yield job_id


def environment_of(site: SlurmSite, job: str) -> dict[str, str]:
    return {**site.environment, "SLURM_JOB_ID": job, "SLURM_JOB_PARTITION": "batch"}


def spans(places: Iterable[Place]) -> tuple[int, int]:
    """The spines and the leaves of some nodes."""
    leaves, spines = zip(*places, strict=True)
    return len(set(spines)), len(set(leaves))


def fewest(free: set[str], count: int, where: Mapping[str, Place]) -> tuple[int, int]:
    """The spines and leaves that the free nodes force."""
    return min(spans(where[node] for node in each) for each in combinations(sorted(free), count))


class Probes:
    """Probes in steps of an allocation, one after the other as the packer finds nodes for them."""

    def __init__(self, site: SlurmSite, job: str) -> None:
        self.site, self.job = site, job
        self.packer = Packer(share_nodes=False)
        self.nodes = SrunNodes(step_settings(site, job, site.node_names, "probes"))
        topology = topology_of(LEVELS, make_cluster(num_nodes=8), environment_of(site, job))
        events: SimpleQueue[WorkerEvent] = SimpleQueue()
        self.roster = NodeRoster(self.nodes, self.packer, events, topology=topology)
        self.roster.look(0.0)

    def step(self, names: list[str], pause_s: float) -> dict[str, Place]:
        """Runs a step on some nodes; returns what each is told of its place, for `pause_s`."""
        told = f"echo $SLURM_TOPOLOGY_ADDR; sleep {pause_s}"
        words = ["srun", f"--jobid={self.job}", "--overlap", f"--nodes={len(names)}"]
        words += ["--ntasks-per-node=1", f"--nodelist={','.join(names)}", "sh", "-c", told]
        lines = [line.split(".") for line in self.site.run(*words).stdout.split()]
        return {node: (leaf, spine) for _, spine, leaf, node in lines}


def test_no_probe_spans_more_switches_than_the_free_nodes_force(site: SlurmSite, job: str) -> None:
    rng = random.Random(48)
    probes = Probes(site, job)
    where = probes.step(site.node_names, 0.0)
    free = set(where)
    running: dict[Future[dict[str, Place]], tuple[int, tuple[int, int]]] = {}
    too_many, forced, in_order = [], 0, 0
    with closing(probes.nodes), ThreadPoolExecutor(8) as threads:
        for key in range(50):
            count = rng.randint(2, 4)
            probes.packer.submit(
                PackRequest(key=key, num_nodes=count, num_devices=2 * count, at_most_s=60.0)
            )
            while not (placed := probes.packer.place(0.0, None)):
                for ended in wait(running, return_when=FIRST_COMPLETED).done:
                    number, least = running.pop(ended)
                    probes.packer.release(number)
                    free |= set(ended.result())
                    if spans(ended.result().values()) != least:
                        too_many.append((number, ended.result(), least))
            ((_, placement),) = placed
            names = [probes.roster.name(share.node) for share in placement]
            least = fewest(free, count, where)
            forced += least != (1, 1)
            in_order += spans(where[name] for name in sorted(free)[:count]) != least
            free -= set(names)
            step = threads.submit(probes.step, names, rng.choice([0.0, 0.3, 0.9]))
            running[step] = (key, least)
        for ended, (number, least) in running.items():
            if spans(ended.result().values()) != least:
                too_many.append((number, ended.result(), least))
    assert not too_many
    assert forced, "some probes had to span several switches"
    assert in_order, "the first free nodes would have spanned more"


def test_a_site_without_an_answer_reads_the_nodes_own_addresses(site: SlurmSite, job: str) -> None:
    topology = topology_of(LEVELS, make_cluster(num_nodes=8), {"SLURM_JOB_ID": job, "PATH": ""})
    with closing(SrunNodes(step_settings(site, job, site.node_names, "probes"))) as nodes:
        found = [topology.groups(node.name, node.labels, node.switches) for node in nodes.nodes]
    assert not topology.known
    assert found[0] == found[3] == ("leaf1", "spine1")
    assert found[7] == ("leaf2", "spine2")


def test_a_job_of_one_switch_gets_nodes_of_one(site: SlurmSite, tmp_path: Path) -> None:
    script = tmp_path / "script.sh"
    cluster = make_cluster(num_nodes=8)
    script.write_text(render(make_request(cluster=cluster, num_nodes=3, switches="1")))
    found = site.wait_for_end(site.submit(str(script)))
    assert (found["NodeList"], found["Switches"].partition("@")[0]) == ("n[2,6,8]", "1")


def test_a_switch_with_nodes_that_are_not_there_is_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    if reason := why_not():
        pytest.skip(reason)
    caplog.set_level(logging.WARNING)
    with closing(SlurmSite(num_nodes=2, switches="SwitchName=leaf1 Nodes=n[1-2],n99\n")) as site:
        topology = topology_of(Site(levels=("leaf",)), make_cluster(), environment_of(site, "1"))
    assert not topology.known
    words = "probes are placed as without a topology: leaf1 names n99, not a node of Slurm's"
    assert [record.getMessage() for record in caplog.records] == [words]
