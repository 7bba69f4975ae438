"""A measured peak that a probe exceeds was too low: it is measured again, a stated one is not."""

from __future__ import annotations

import pytest

from layout_tuner.protocol.outcome import ProbeRequest
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_presets import model_preset
from layout_tuner.workers.launchers.group_launcher import GroupLauncher
from layout_tuner.workers.launchers.local import LocalNodes
from layout_tuner.workers.packing.request import Share
from tests.kit.local_ranks import make_cluster, make_probe, run_probe
from tests.workers.programs.programs import left_behind, make_request, python_trainer

pytestmark = pytest.mark.ranks

TOO_LOW = (1e-6, "measured matmul (fp32)")
"""In TFLOP/s: as where other processes had the cores while it was measured."""
PROGRAM = python_trainer("train(sleep_s=0.05)")
REQUESTS = {
    "the embedded trainer": make_probe(),
    "a program": make_request(layout=Layout()),
}
FASTER_THAN_A_CORE = make_request(layout=Layout(), model=model_preset("llama-7b"))


def never() -> bool:
    return False


def make_launcher(nodes: LocalNodes, **cluster: object) -> GroupLauncher:
    trainers = {PROGRAM.name: PROGRAM}
    return GroupLauncher(nodes, make_cluster(**cluster), allow_sharing=True, trainers=trainers)


@pytest.mark.parametrize("who", REQUESTS)
def test_a_measured_peak_that_is_exceeded_is_measured_again(nodes: LocalNodes, who: str) -> None:
    launcher = make_launcher(nodes)
    launcher.keep_measured_peak("fp32", *TOO_LOW)
    outcome = run_probe(launcher, REQUESTS[who])
    assert outcome.measurement is not None, outcome
    measured = outcome.measurement
    assert measured.hfu == measured.hardware_tflops_per_device / measured.peak_tflops_per_device
    assert measured.mfu <= measured.hfu <= 1
    better = (measured.peak_tflops_per_device, "measured matmul (fp32)")
    assert launcher.peak("fp32", never) == better, "later probes start from it"
    launcher.keep_measured_peak("fp32", *TOO_LOW)
    assert launcher.peak("fp32", never) == better, "the best of all counts"
    assert left_behind(nodes) == []


def test_a_peak_that_is_a_little_too_low_is_measured_again(nodes: LocalNodes) -> None:
    first = run_probe(make_launcher(nodes), REQUESTS["a program"]).measurement
    assert first is not None
    launcher = make_launcher(nodes)
    launcher.keep_measured_peak("fp32", 0.7 * first.hardware_tflops_per_device, TOO_LOW[1])
    outcome = run_probe(launcher, REQUESTS["a program"])
    assert outcome.measurement is not None, outcome
    assert outcome.measurement.hfu <= 1


@pytest.mark.parametrize("shares", [None, (Share(node=0, devices=(1,)),)])
def test_what_still_exceeds_the_peak_is_refused(
    nodes: LocalNodes, shares: tuple[Share, ...] | None
) -> None:
    launcher = make_launcher(nodes)
    launcher.keep_measured_peak("fp32", *TOO_LOW)
    outcome = run_probe(launcher, FASTER_THAN_A_CORE, shares=shares)
    peak, source = launcher.peak("fp32", never)
    assert peak > TOO_LOW[0]
    assert (outcome.state, outcome.reason) == ("failed", "implausible")
    assert f"of the peak ({peak:.4g} TFLOP/s, {source})" in outcome.message


@pytest.mark.parametrize("who", REQUESTS)
def test_a_stated_peak_is_not_measured_again(nodes: LocalNodes, who: str) -> None:
    request: ProbeRequest = REQUESTS[who]
    outcome = run_probe(make_launcher(nodes, peak_flops_per_s={"fp32": 1e6}), request)
    assert (outcome.state, outcome.reason) == ("failed", "implausible")
    assert "1e-06" in outcome.message
    assert "cluster description" in outcome.message


def test_a_probe_that_is_cancelled_meanwhile_is_cancelled(nodes: LocalNodes) -> None:
    launcher = make_launcher(nodes)
    launcher.keep_measured_peak("fp32", *TOO_LOW)
    told: list[object] = []

    def has_ended() -> bool:
        return len(told) > 1 and not any(nodes.ranks._scratch.glob("probe-*"))

    outcome = run_probe(launcher, FASTER_THAN_A_CORE, on_event=told.append, cancelled=has_ended)
    assert (outcome.state, outcome.reason) == ("cancelled", "cancelled")
