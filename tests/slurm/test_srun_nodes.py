"""Groups in steps of a real allocation, and what is left when something of theirs is killed."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator

import pytest

from tests.slurm.allocations import allocation, step_settings, steps
from tests.slurm.site import SlurmSite, why_not
from tests.workers.process_checks import (
    RANK_PROGRAMS,
    marked,
    run_group,
    wait_until,
)
from workers.launchers.srun import SrunNodes

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def site() -> Iterator[SlurmSite]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with SlurmSite(num_nodes=4) as site:
        yield site


@pytest.fixture(scope="module")
def job(site: SlurmSite) -> Iterator[str]:
    with allocation(site, 4) as job_id:
        yield job_id


@pytest.fixture
def mark(site: SlurmSite, job: str) -> Iterator[str]:
    """Of every process of the test's steps; none of them may be left, nor any step."""
    mark = uuid.uuid4().hex
    yield mark
    wait_until("no process is left", lambda: not marked(mark))
    assert steps(site, job) == []


@pytest.fixture
def nodes(site: SlurmSite, job: str, mark: str) -> Iterator[SrunNodes]:
    settings = step_settings(site, job, site.node_names, mark, rank_entry=RANK_PROGRAMS)
    nodes = SrunNodes(settings)
    yield nodes
    nodes.close()


def test_nodes_tell_their_names_and_cores_before_the_first_group(nodes: SrunNodes) -> None:
    assert [node.name for node in nodes.nodes] == ["n1", "n2", "n3", "n4"]
    assert nodes.nodes[0].core_ids == tuple(sorted(os.sched_getaffinity(0)))
    assert not nodes.lost()


def test_ranks_of_several_nodes_meet_at_the_address_of_the_first(nodes: SrunNodes) -> None:
    end = run_group(nodes, "meet", num_ranks=8, num_nodes=4)
    assert end.failure is None, end
    where = {"address": "127.0.3.1", "port": 4321}
    assert [end.results[rank]["told"] for rank in range(8)] == [where] * 8
