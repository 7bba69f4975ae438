"""Probes on forked ranks, for the tests of what they measure and of how they end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from layout_tuner.protocol.outcome import ProbeRequest
from layout_tuner.workers.trainer.probe.probe import RankResult, run_probe
from layout_tuner.workers.trainer.training import Training
from tests.workers.trainer.cases import make_layout, make_shape
from tests.workers.trainer.ranks import make_context, run_ranks


def probe(
    request: ProbeRequest, *, world_size: int | None = None, **context: Any
) -> list[tuple[RankResult | None, list[dict[str, Any]]]]:
    """What each rank returned, and what it reported."""
    num_ranks = world_size or request.layout.num_devices

    def work(rank: int, store: Any) -> Any:
        events: list[dict[str, Any]] = []
        told = make_context(rank, num_ranks, store, **context)
        return run_probe(request, told, events.append), events

    return run_ranks(num_ranks, work, own_group=True)


class FakeClock:
    """The clock of timed steps: seven seconds a step, and what a test adds to it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        clock = SimpleNamespace(perf_counter=lambda: self.now_s)
        monkeypatch.setattr("layout_tuner.workers.trainer.probe.timing.time", clock)
        step = Training.step

        def seven_seconds(training: Training, *args: Any, **options: Any) -> Any:
            self.now_s += 7.0
            return step(training, *args, **options)

        monkeypatch.setattr(Training, "step", seven_seconds)


def make_request(**changes: Any) -> ProbeRequest:
    fields = {"model": make_shape(), "layout": make_layout(), "iterations": 3}
    return ProbeRequest(**{**fields, **changes})


def measured(request: ProbeRequest, **context: Any) -> Any:
    """The measurement of a probe."""
    return probe(request, **context)[0][0].measurement
