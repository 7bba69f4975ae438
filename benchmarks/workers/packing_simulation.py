"""A pretended allocation with a clock of its own: probes start where the packer says, and end."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Final

from layout_tuner.workers.packing.packer import Packer
from layout_tuner.workers.packing.request import PackRequest

NUM_NODES: Final = 1024
DEVICES_PER_NODE: Final = 8
NUM_DEVICES: Final = NUM_NODES * DEVICES_PER_NODE


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedProbe:
    """A probe whose duration nobody knows before it ends."""

    key: int
    devices: int
    duration_s: float
    at_most_s: float
    """The deadline that the packer is given."""

    @property
    def device_seconds(self) -> float:
        """The work that it offers."""
        return self.devices * self.duration_s

    @property
    def request(self) -> PackRequest:
        """What the packer is asked for."""
        return PackRequest(
            key=self.key,
            num_nodes=-(-self.devices // DEVICES_PER_NODE),
            num_devices=self.devices,
            at_most_s=self.at_most_s,
        )


Draw = Callable[[int], PackedProbe]
"""Makes a probe of a key."""


def probes(dice: Random, *, powers_of_two: bool, at_most_s: Callable[[float], float]) -> Draw:
    """Probes of log-uniform sizes from 2 to 512 devices, of 10 to 300 s each."""

    def draw(key: int) -> PackedProbe:
        exact = math.exp(dice.uniform(math.log(2), math.log(512)))
        duration_s = dice.uniform(10.0, 300.0)
        return PackedProbe(
            key=key,
            devices=2 ** dice.randint(1, 9) if powers_of_two else round(exact),
            duration_s=duration_s,
            at_most_s=at_most_s(duration_s),
        )

    return draw


def _packer() -> Packer:
    packer = Packer(share_nodes=True)
    for _ in range(NUM_NODES):
        packer.add_node(DEVICES_PER_NODE)
    return packer


@dataclass(kw_only=True)
class Simulation:
    """What happened so far."""

    packer: Packer = field(default_factory=_packer)
    now_s: float = 0.0
    packing_s: float = 0.0
    """Seconds of this machine that the packer took."""
    started: int = 0
    used: float = 0.0
    """Device-seconds that probes asked for, while they ran."""
    held: float = 0.0
    """Device-seconds that nobody else could use: whole nodes count whole."""
    waits: list[tuple[PackedProbe, float]] = field(default_factory=list)
    """Seconds from submission to start, of each that started."""
    _running: list[tuple[float, int]] = field(default_factory=list)
    _known: dict[int, tuple[PackedProbe, float]] = field(default_factory=dict)
    _devices: int = 0
    _held: int = 0

    def submit(self, offered: Iterable[PackedProbe]) -> None:
        """Probes arrive, and the packer starts what fits."""
        requests = []
        for probe in offered:
            self._known[probe.key] = (probe, self.now_s)
            requests.append(probe.request)
        before = time.perf_counter()
        for request in requests:
            self.packer.submit(request)
        placed = self.packer.place(self.now_s, None)
        self.packing_s += time.perf_counter() - before
        for key, placement in placed:
            assert isinstance(key, int)
            probe, arrived_s = self._known[key]
            self.waits.append((probe, self.now_s - arrived_s))
            heapq.heappush(self._running, (self.now_s + probe.duration_s, key))
            self.started += 1
            self._devices += sum(len(share.devices) for share in placement)
            self._held += _held(probe)

    def end_next(self) -> PackedProbe:
        """Goes on to the next end of a probe, whose devices are free then."""
        ends_s, key = heapq.heappop(self._running)
        self.used += self._devices * (ends_s - self.now_s)
        self.held += self._held * (ends_s - self.now_s)
        self.now_s = ends_s
        before = time.perf_counter()
        self.packer.release(key)
        self.packing_s += time.perf_counter() - before
        probe, _ = self._known.pop(key)
        self._devices -= probe.devices
        self._held -= _held(probe)
        return probe

    @property
    def num_running(self) -> int:
        """Probes that run."""
        return len(self._running)

    def forget(self) -> None:
        """What is counted begins now."""
        self.started, self.packing_s, self.used, self.held = 0, 0.0, 0.0, 0.0
        self.waits.clear()


def _held(probe: PackedProbe) -> int:
    if probe.devices < DEVICES_PER_NODE:
        return probe.devices
    return -(-probe.devices // DEVICES_PER_NODE) * DEVICES_PER_NODE


@dataclass(frozen=True, kw_only=True, slots=True)
class Steady:
    """The steady state of an allocation at which a number of probes wait or run at any time."""

    use: float
    """Of all device time, the share that probes asked for and had."""
    held: float
    """Of all device time, the share that probes held: the rest of their last node included."""
    decisions_per_s: float
    """Probes started by second of the packer's own time."""
    waits: list[tuple[PackedProbe, float]]
    """Seconds that each probe waited."""


def steady_state(draw: Draw, *, at_once: int, ended: int) -> Steady:
    """Each probe that ends is followed by another; counted once all of the first have started."""
    simulation = Simulation()
    simulation.submit(draw(key) for key in range(at_once))
    for key in range(at_once, 2 * at_once):
        simulation.end_next()
        simulation.submit([draw(key)])
    simulation.forget()
    began_s = simulation.now_s
    for key in range(2 * at_once, 2 * at_once + ended):
        simulation.end_next()
        simulation.submit([draw(key)])
    device_s = NUM_DEVICES * (simulation.now_s - began_s)
    return Steady(
        use=simulation.used / device_s,
        held=simulation.held / device_s,
        decisions_per_s=simulation.started / simulation.packing_s,
        waits=list(simulation.waits),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeBatch:
    """Probes that all arrive at once, until the last has ended."""

    makespan_s: float
    least_s: float
    """No schedule is shorter: all work on all devices, or the longest probe."""
    use_while_any_waits: float
    """Of all device time until the last probe starts, the share that probes asked for and had."""


def one_batch(draw: Draw, *, at_once: int) -> ProbeBatch:
    """Runs a batch to its end."""
    simulation = Simulation()
    offered = [draw(key) for key in range(at_once)]
    simulation.submit(offered)
    use = 1.0
    while simulation.num_running:
        waiting = simulation.started < at_once
        simulation.end_next()
        if waiting:
            use = simulation.used / (NUM_DEVICES * simulation.now_s)
        simulation.submit([])
    work_s = sum(probe.device_seconds for probe in offered) / NUM_DEVICES
    return ProbeBatch(
        makespan_s=simulation.now_s,
        least_s=max(work_s, max(probe.duration_s for probe in offered)),
        use_while_any_waits=use,
    )
