"""The pretended allocation counts what its probes really had."""

from __future__ import annotations

from random import Random

import pytest

from benchmarks.bench_packing import section
from benchmarks.workers.packing_simulation import (
    NUM_DEVICES,
    SimulatedProbe,
    Simulation,
    one_batch,
    probes,
    steady_state,
)


def make_probe(key: int, devices: int, duration_s: float) -> SimulatedProbe:
    return SimulatedProbe(key=key, devices=devices, duration_s=duration_s, at_most_s=duration_s)


def test_a_probe_uses_its_devices_and_holds_its_nodes() -> None:
    simulation = Simulation()
    simulation.submit([make_probe(0, 9, 10.0), make_probe(1, 2, 4.0)])
    while simulation.num_running:
        simulation.end_next()
    assert simulation.used == pytest.approx(9 * 10 + 2 * 4)
    assert simulation.held == pytest.approx(16 * 10 + 2 * 4)


def test_a_batch_as_large_as_the_machine_takes_no_longer_than_it_must() -> None:
    batch = one_batch(lambda key: make_probe(key, 512, 100.0), at_once=2 * NUM_DEVICES // 512)
    assert batch.makespan_s == batch.least_s == 200.0
    assert batch.use_while_any_waits == 1.0


def test_most_of_the_device_time_is_used_when_many_wait() -> None:
    draw = probes(Random(1), powers_of_two=False, at_most_s=lambda _: 600.0)
    steady = steady_state(draw, at_once=300, ended=300)
    assert 0.9 < steady.use < steady.held <= 1.0
    assert len(steady.waits) >= 100


@pytest.mark.slow
def test_the_section_has_every_case() -> None:
    text = section(ended=20, batches=1)
    assert text.count("600 s for all") == 4
