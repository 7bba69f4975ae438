"""Whatever probes arrive and whenever they end, the packer keeps its promises."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from layout_tuner.workers.packing.packer import Packer
from layout_tuner.workers.packing.request import PackRequest, Placement

Scenario = tuple[int, int, bool, list["Arrival"]]
"""Number of nodes, devices of each, whether nodes are shared, and the arrivals."""


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A probe, when it arrives after the one before, and how long it takes."""

    after_s: float
    request: PackRequest
    takes_s: float


@dataclass(frozen=True, kw_only=True)
class Started:
    """A probe that has started."""

    request: PackRequest
    placement: Placement
    at_s: float
    ends_s: float
    promised_s: float
    """When it would have started at the latest had nobody come after it, as seen whenever it was
    the oldest that waited."""


@dataclass(kw_only=True)
class Run:
    """What came of some arrivals: every probe ends when it is said to, within its time."""

    num_nodes: int
    per_node: int
    share_nodes: bool
    ends_at_s: float | None = None
    now_s: float = 0.0
    waiting: dict[int, PackRequest] = field(default_factory=dict)
    ends: list[tuple[float, int]] = field(default_factory=list)
    started: list[Started] = field(default_factory=list)
    takes: dict[int, float] = field(default_factory=dict)
    promised: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.packer = Packer(share_nodes=self.share_nodes)
        for _ in range(self.num_nodes):
            self.packer.add_node(self.per_node)

    def play(self, arrivals: Sequence[Arrival]) -> list[Started]:
        for arrival in arrivals:
            arrives_s = self.now_s + arrival.after_s
            self.end_until(arrives_s)
            self.now_s = arrives_s
            key = arrival.request.key
            self.takes[key] = arrival.takes_s
            self.waiting[key] = arrival.request
            self.packer.submit(arrival.request)
            self.place()
        self.end_until(float("inf"))
        return self.started

    def end_until(self, until_s: float) -> None:
        while self.ends and self.ends[0][0] <= until_s:
            self.now_s, key = heapq.heappop(self.ends)
            self.packer.release(key)
            self.place()

    def place(self) -> None:
        for key, placement in self.packer.place(self.now_s, self.ends_at_s):
            request = self.waiting.pop(key)
            ends_s = self.now_s + self.takes[key]
            heapq.heappush(self.ends, (ends_s, key))
            self.started.append(
                Started(
                    request=request,
                    placement=placement,
                    at_s=self.now_s,
                    ends_s=ends_s,
                    promised_s=self.promised.get(key, float("inf")),
                )
            )
        if self.waiting:
            oldest = next(iter(self.waiting))
            promised_s = self.promised.get(oldest, float("inf"))
            self.promised[oldest] = min(promised_s, self.latest_start_s(self.waiting[oldest]))

    def latest_start_s(self, request: PackRequest) -> float:
        """When a probe would start if all that run took all of their time and no other came."""
        # Of two that end at the same time, the second still runs for the packer after the first.
        running = {key for _, key in self.ends}
        latest_s = {
            it: it.at_s + it.request.at_most_s for it in self.started if it.request.key in running
        }
        times_s = sorted({self.now_s, *latest_s.values()})
        return next(
            at_s
            for at_s in times_s
            if self.would_fit(request, [one for one, ends_s in latest_s.items() if ends_s > at_s])
        )

    def would_fit(self, request: PackRequest, beside: Sequence[Started]) -> bool:
        taken = [set[int]() for _ in range(self.num_nodes)]
        for one in beside:
            for share in one.placement:
                whole = not self.share_nodes or one.request.num_nodes > 1
                taken[share.node] |= set(range(self.per_node)) if whole else set(share.devices)
        if request.num_nodes > 1 or not self.share_nodes:
            return sum(not devices for devices in taken) >= request.num_nodes
        return any(
            not devices & set(range(first, first + request.num_devices))
            for devices in taken
            for first in range(self.per_node - request.num_devices + 1)
        )


@st.composite
def requests(draw: st.DrawFn, key: int, *, num_nodes: int, per_node: int) -> PackRequest:
    nodes = draw(st.integers(1, num_nodes))
    least = 1 if nodes == 1 else nodes * per_node
    at_most_s = draw(st.integers(1, 50))
    return PackRequest(
        key=key,
        num_nodes=nodes,
        num_devices=draw(st.integers(least, nodes * per_node)),
        at_most_s=float(at_most_s),
        expected_s=draw(st.sampled_from([None, at_most_s / 2])),
    )


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    num_nodes, per_node = draw(st.integers(1, 5)), draw(st.sampled_from([1, 2, 3, 8]))
    arrivals = []
    for key in range(draw(st.integers(1, 25))):
        asked = draw(requests(key, num_nodes=num_nodes, per_node=per_node))
        share = draw(st.sampled_from([0.1, 0.5, 1.0]))
        after_s = float(draw(st.sampled_from([0, 0, 1, 10])))
        arrivals.append(Arrival(after_s=after_s, request=asked, takes_s=share * asked.at_most_s))
    return num_nodes, per_node, draw(st.booleans()), arrivals


def run(scenario: Scenario, *, ends_at_s: float | None = None) -> list[Started]:
    num_nodes, per_node, share_nodes, arrivals = scenario
    size = {"num_nodes": num_nodes, "per_node": per_node, "share_nodes": share_nodes}
    return Run(**size, ends_at_s=ends_at_s).play(arrivals)


def pairs_at_once(started: Sequence[Started]) -> Iterator[tuple[Started, Started]]:
    for index, one in enumerate(started):
        for other in started[index + 1 :]:
            if one.at_s < other.ends_s and other.at_s < one.ends_s:
                yield one, other


def devices_of(one: Started) -> set[tuple[int, int]]:
    return {(share.node, device) for share in one.placement for device in share.devices}


def nodes_of(one: Started) -> set[int]:
    return {share.node for share in one.placement}


@given(scenarios(), st.none() | st.integers(0, 200))
@settings(max_examples=150)
def test_a_probe_gets_what_it_asked_for_in_time(scenario: Scenario, ends_at_s: int | None) -> None:
    num_nodes, per_node, share_nodes, arrivals = scenario
    started = run(scenario, ends_at_s=ends_at_s)
    for one in started:
        assert len(devices_of(one)) == one.request.num_devices
        assert len(nodes_of(one)) == len(one.placement) == one.request.num_nodes
        assert nodes_of(one) <= set(range(num_nodes))
        assert all(share.devices[-1] < per_node for share in one.placement)
        if ends_at_s is None:
            assert one.at_s <= one.promised_s, "later than it could when it became the oldest"
        else:
            assert one.at_s + one.request.at_most_s <= ends_at_s
    assert ends_at_s is not None or len(started) == len(arrivals)
    for one, other in pairs_at_once(started):
        assert not devices_of(one) & devices_of(other)
        if not share_nodes or one.request.num_nodes > 1 or other.request.num_nodes > 1:
            assert not nodes_of(one) & nodes_of(other)
