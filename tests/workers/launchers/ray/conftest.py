"""The node of a Ray that the launcher starts itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from layout_tuner.workers.launchers.ray.launcher import RayNodes
from tests.workers.process_checks import RANK_PROGRAMS, wait_until_gone


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    nodes = RayNodes(num_devices=2, rank_entry=RANK_PROGRAMS)
    yield nodes
    pids = [pid for on_node in nodes.pids for pid in on_node.values()]
    nodes.close()
    wait_until_gone(pids)
