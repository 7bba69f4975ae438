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
from tests.kit.api import CAMPAIGN, Api
from tests.kit.store import completed

BEST = Layout(num_microbatches=8)
OTHER = Layout(tp=2, num_microbatches=8)


def to_beat(api: Api, **campaign: Any) -> float | None:
    """What the second trial of a campaign is told, after the best one took half a second."""
    created = api.submit(**campaign)
    worker = api.register()
    api.complete(worker, "first", BEST, tokens_per_s=1024.0)
    api.store.trials.add(created["id"], OTHER)
    seconds: float | None = api.lease(worker)["request"]["stop_above_step_time_s"]
    return seconds


def test_the_first_probe_and_a_repeat_have_no_step_time_to_beat(api: Api) -> None:
    created = api.submit()
    worker = api.register()
    api.store.trials.add(created["id"], OTHER)
    lease = api.lease(worker)
    assert lease["request"]["stop_above_step_time_s"] is None
    api.report_measured(worker, lease, OTHER, tokens_per_s=10.0)
    api.complete(worker, "first", BEST, tokens_per_s=1024.0)
    api.store.trials.repeat(lease["trial_id"])
    assert api.lease(worker)["request"]["stop_above_step_time_s"] is None


@pytest.mark.parametrize(
    ("campaign", "step_time_s"),
    [
        # tiny has sequences of 128 tokens, and the batch is 8: 1,024 tokens a step.
        ({}, 8 * 128 / 1024.0),
        ({"objective": "tokens_per_s_per_device"}, 8 * 128 / 2 / 1024.0),  # it has two devices
        ({"stop": {"early": False}}, None),
        ({"strategy": "exhaustive"}, None),
        ({"probe": {"iterations": 3}}, None),  # too few to stop early
    ],
    ids=str,
)
def test_a_probe_is_told_the_step_time_at_which_it_would_equal_the_best(
    api: Api, campaign: dict[str, Any], step_time_s: float | None
) -> None:
    told = to_beat(api, **campaign)
    # Nothing was repeated: the best may be as slow as the assumed spread of runs allows.
    slower = math.exp(RunSpread.prior().reach)
    assert told == (None if step_time_s is None else pytest.approx(step_time_s * slower))


TWO = ["tokens_per_s", "memory_headroom"]


@pytest.mark.parametrize(
    ("peak_bytes", "is_told"),
    [(9 << 20, True), (1 << 32, False)],
    ids=["less memory than the other can need", "more memory"],
)
def test_with_two_objectives_a_probe_must_beat_a_layout_that_surely_needs_less_memory(
    api: Api, peak_bytes: int, is_told: bool
) -> None:
    created = api.submit(objective=TWO)
    worker = api.register()
    api.store.trials.add(created["id"], OTHER)
    outcome = completed(OTHER, tokens_per_s=1024.0, peak_memory_bytes=peak_bytes)
    api.report(worker, api.lease(worker), outcome)
    api.store.trials.add(created["id"], BEST)
    seconds = api.lease(worker)["request"]["stop_above_step_time_s"]
    # Two runs may differ by 3 %.
    assert seconds == (pytest.approx(8 * 128 / (0.97 * 1024.0)) if is_told else None)


def test_of_a_front_the_fastest_layout_with_enough_headroom_is_to_be_beaten_in_every_rate() -> None:
    spec = CampaignSpec.from_mapping(CAMPAIGN | {"objective": TWO})
    peak = float(peak_memory_bytes(LayoutColumns.of_each([OTHER]), spec.model)[0])
    reachable = 1.0 - 0.8 * peak / spec.cluster.device_memory_bytes
    front = [
        (2000.0, reachable - 1e-6),  # the other layout may have more headroom
        (1500.0, reachable + 1e-6),
        (1000.0, 1.0),
        (None, 1.0),
    ]
    assert stop_above_s(front, spec, OTHER) == pytest.approx(8 * 128 / (0.97 * 1500.0))
    assert stop_above_s(front[:1], spec, OTHER) is None
    assert stop_above_s([], spec, OTHER) is None
    spec = CampaignSpec.from_mapping(
        CAMPAIGN | {"objective": ["tokens_per_s", "tokens_per_s_per_device"]}
    )
    # The other layout has two devices: half of its rate a device.
    seconds = stop_above_s([(1024.0, 128.0)], spec, OTHER)
    assert seconds == pytest.approx(8 * 128 / 2 / (0.97 * 128.0))


def test_a_cheap_probe_is_never_stopped_and_trains_the_layers_of_its_part(api: Api) -> None:
    created = api.submit(strategy="guided", budget={"node_hours": 1.0})
    worker = api.register()
    api.complete(worker, "first", BEST, tokens_per_s=1024.0)
    part = Fidelity(num_microbatches=4, dp=1, num_layers=2)
    api.store.trials.add(created["id"], OTHER, fidelity=part)
    request = api.lease(worker)["request"]
    assert request["stop_above_step_time_s"] is None
    assert request["layout"] == part.reduced(OTHER).to_mapping()
    assert request["model"]["num_layers"] == 2


def test_the_best_is_taken_at_the_low_end_of_its_interval(api: Api) -> None:
    created = api.submit()
    worker = api.register()
    first = api.complete(worker, "first", BEST, tokens_per_s=1024.0)
    again = api.store.trials.repeat(first)
    api.report(worker, api.lease(worker), completed(again.layout, tokens_per_s=1000.0))
    api.store.trials.add(created["id"], OTHER)
    seconds = api.lease(worker)["request"]["stop_above_step_time_s"]
    assert seconds > 1.05 * 8 * 128 / 1000.0, "two runs say little about how far apart runs lie"
