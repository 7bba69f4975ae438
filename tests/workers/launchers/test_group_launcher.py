"""What goes wrong before a probe starts is not the probe's failure."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from search_spaces.protocol.outcome import Outcome, ProbeRequest
from search_spaces.spec.cluster import Cluster
from search_spaces.spec.layout import Layout, Precision
from search_spaces.spec.presets.models import model_preset
from tests.workers.process_checks import RANK_PROGRAMS
from workers.launchers.group_launcher import GroupLauncher
from workers.launchers.local import LocalNodes

pytestmark = pytest.mark.ranks

ONE_CORE = Cluster(
    name="one-core",
    device="CPU core",
    num_nodes=1,
    devices_per_node=1,
    device_memory_bytes=1 << 30,
)


@pytest.fixture(scope="module")
def launcher() -> Iterator[GroupLauncher]:
    nodes = LocalNodes(num_devices=1, rank_entry=RANK_PROGRAMS)
    with GroupLauncher(nodes, ONE_CORE, allow_sharing=True) as launcher:
        yield launcher


def run(launcher: GroupLauncher, precision: Precision) -> Outcome:
    request = ProbeRequest(model=model_preset("tiny"), layout=Layout(precision=precision))
    return launcher.run(request, on_event=lambda _: None, cancelled=lambda: False)


def test_a_peak_that_could_not_be_measured_does_not_pose_as_the_probe(
    launcher: GroupLauncher,
) -> None:
    outcome = run(launcher, "fp32")
    assert (outcome.state, outcome.reason) == ("failed", "crashed")
    assert outcome.message == (
        "while the matmul peak was measured: rank 0: ValueError: this rank was told to fail"
    )
    assert outcome.log_tail.endswith("this rank was told to fail")


def test_a_peak_without_memory_makes_no_layout_infeasible(launcher: GroupLauncher) -> None:
    outcome = run(launcher, "bf16")
    assert (outcome.state, outcome.reason) == ("failed", "crashed")
    assert "can't allocate memory" in outcome.message


def test_a_training_job_says_it_too(launcher: GroupLauncher) -> None:
    job = {"layout": Layout().to_mapping()}
    end = launcher.train(job, on_event=lambda _: None, cancelled=lambda: False)
    assert end.failure is not None
    assert end.failure.message.startswith("while the matmul peak was measured: rank 0: ValueError")
