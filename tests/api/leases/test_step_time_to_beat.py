"""What a worker is told to beat when it leases a trial."""

from __future__ import annotations

import math
from typing import Any

import pytest

from search_spaces.belief.step_time_to_beat import stop_above_s
from search_spaces.campaigns.campaign import CampaignSpec
from search_spaces.campaigns.fidelity import Fidelity
from search_spaces.estimates.memory import peak_memory_bytes
from search_spaces.spec.layout import Layout
from search_spaces.spec.layout_columns import LayoutColumns
from search_spaces.statistics.run_spread import RunSpread
from tests.kit.api import CAMPAIGN, CLUSTER, Api

BEST = Layout(num_microbatches=8)
OTHER = Layout(tp=2, num_microbatches=8)
TOKENS = 8 * 128
"""Tokens a step: tiny has sequences of 128, and the batch is 8."""
TWO = ["tokens_per_s", "memory_headroom"]


@pytest.fixture(scope="module")
def api(module_api: Api) -> Api:
    return module_api


class Leased:
    """A campaign on a cluster of its own, with a worker."""

    def __init__(self, api: Api, name: str, **changes: Any) -> None:
        self.api, self.name = api, name
        cluster = {**CLUSTER, "name": name}
        self.id = api.submit(name=name, cluster=cluster, **changes)["id"]
        self.worker = api.register(cluster=name)

    def measure(self, layout: Layout, tokens_per_s: float = 1024.0, **changes: Any) -> int:
        changes["tokens_per_s"] = tokens_per_s
        return self.api.complete(self.worker, self.name, layout, **changes)

    def request(self, layout: Layout, fidelity: Fidelity | None = None) -> dict[str, Any]:
        """What the worker is asked to run of a new trial."""
        self.api.store.trials.add(self.id, layout, fidelity=fidelity)
        asked: dict[str, Any] = self.api.lease(self.worker)["request"]
        return asked

    def to_beat(self, layout: Layout = OTHER) -> float | None:
        seconds: float | None = self.request(layout)["stop_above_step_time_s"]
        return seconds


def test_the_first_probe_a_repeat_a_baseline_and_a_cheap_probe_have_no_step_time_to_beat(
    api: Api,
) -> None:
    assert Leased(api, "first").to_beat() is None
    leased = Leased(api, "compared", baseline=OTHER.to_mapping())
    leased.measure(BEST)
    assert leased.to_beat(OTHER) is None
    leased = Leased(api, "again")
    trial = leased.measure(OTHER, 10.0)
    leased.measure(BEST)
    api.store.trials.repeat(trial)
    assert api.lease(leased.worker)["request"]["stop_above_step_time_s"] is None

    leased = Leased(api, "cheap", strategy="guided", budget={"node_hours": 1.0})
    leased.measure(BEST)
    part = Fidelity(num_microbatches=4, dp=1, num_layers=2)
    request = leased.request(OTHER, part)
    assert request["stop_above_step_time_s"] is None
    assert request["layout"] == part.reduced(OTHER).to_mapping()
    assert request["model"]["num_layers"] == 2, "it trains the layers of its part"


@pytest.mark.parametrize(
    ("name", "campaign", "step_time_s"),
    [
        ("plain", {}, TOKENS / 1024.0),
        ("per-device", {"objective": "tokens_per_s_per_device"}, TOKENS / 2 / 1024.0),  # it has two
        ("not-early", {"stop": {"early": False}}, None),
        ("exhaustive", {"strategy": "exhaustive"}, None),
        ("few-iterations", {"probe": {"iterations": 3}}, None),  # too few to stop early
    ],
)
def test_a_probe_is_told_the_step_time_at_which_it_would_equal_the_best(
    api: Api, name: str, campaign: dict[str, Any], step_time_s: float | None
) -> None:
    leased = Leased(api, name, **campaign)
    leased.measure(BEST)
    # Nothing was repeated: the best may be as slow as the assumed spread of runs allows.
    slower = math.exp(RunSpread.prior().reach)
    expected = None if step_time_s is None else pytest.approx(step_time_s * slower)
    assert leased.to_beat() == expected


@pytest.mark.parametrize(
    ("name", "peak_bytes", "is_told"), [("surely-less", 9 << 20, True), ("more", 1 << 32, False)]
)
def test_with_two_objectives_a_probe_must_beat_a_layout_that_surely_needs_less_memory(
    api: Api, name: str, peak_bytes: int, is_told: bool
) -> None:
    leased = Leased(api, name, objective=TWO)
    leased.measure(OTHER, peak_memory_bytes=peak_bytes)
    # Two runs may differ by 3 %.
    expected = pytest.approx(TOKENS / (0.97 * 1024.0)) if is_told else None
    assert leased.to_beat(BEST) == expected


def test_a_probe_must_beat_the_fastest_layout_of_a_front_with_enough_headroom_in_every_rate() -> (
    None
):
    spec = CampaignSpec.from_mapping(CAMPAIGN | {"objective": TWO})
    peak = float(peak_memory_bytes(LayoutColumns.of_each([OTHER]), spec.model)[0])
    reachable = 1.0 - 0.8 * peak / spec.cluster.device_memory_bytes
    front = [
        (2000.0, reachable - 1e-6),  # the other layout may have more headroom
        (1500.0, reachable + 1e-6),
        (1000.0, 1.0),
        (None, 1.0),
    ]
    assert stop_above_s(front, spec, OTHER) == pytest.approx(TOKENS / (0.97 * 1500.0))
    assert stop_above_s(front[:1], spec, OTHER) is None
    assert stop_above_s([], spec, OTHER) is None
    rates = ["tokens_per_s", "tokens_per_s_per_device"]
    spec = CampaignSpec.from_mapping(CAMPAIGN | {"objective": rates})
    # The other layout has two devices: half of its rate a device.
    seconds = stop_above_s([(1024.0, 128.0)], spec, OTHER)
    assert seconds == pytest.approx(TOKENS / 2 / (0.97 * 128.0))


def test_the_best_is_taken_at_the_low_end_of_its_interval(api: Api) -> None:
    leased = Leased(api, "repeated")
    again = api.store.trials.repeat(leased.measure(BEST))
    api.report_measured(leased.worker, api.lease(leased.worker), again.layout, tokens_per_s=1000.0)
    seconds = leased.to_beat()
    assert seconds is not None
    assert seconds > 1.05 * TOKENS / 1000.0, "two runs say little about how far apart runs lie"
