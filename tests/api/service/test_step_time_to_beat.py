"""What a worker is told to beat when it leases a trial."""

from __future__ import annotations

from typing import Any

import pytest

from search_spaces.spec.fidelity import Fidelity
from search_spaces.spec.layout import Layout
from tests.api.local_api import Api
from tests.results_db.factories import completed

BEST = Layout(num_microbatches=8)
OTHER = Layout(tp=2, num_microbatches=8)


def to_beat(api: Api, **campaign: Any) -> float | None:
    """What the second trial of a campaign is told, after the best one took half a second."""
    created = api.submit(**campaign)
    worker = api.register()
    api.complete(worker, "first", BEST, tokens_per_s=1024.0)
    api.store.add_trial(created["id"], OTHER)
    seconds: float | None = api.lease(worker)["request"]["stop_above_step_time_s"]
    return seconds


def test_the_first_probe_has_nothing_to_beat(api: Api) -> None:
    created = api.submit()
    api.store.add_trial(created["id"], BEST)
    assert api.lease(api.register())["request"]["stop_above_step_time_s"] is None


def test_a_probe_is_told_the_step_time_at_which_it_would_equal_the_best(api: Api) -> None:
    # tiny has sequences of 128 tokens, and the batch is 8: 1,024 tokens a step.
    assert to_beat(api) == pytest.approx(8 * 128 / 1024.0)


def test_a_layout_on_more_devices_has_more_to_beat_a_device(api: Api) -> None:
    seconds = to_beat(api, objective="tokens_per_s_per_device")
    assert seconds == pytest.approx(8 * 128 / 2 / 1024.0)


@pytest.mark.parametrize(
    "campaign",
    [
        {"stop": {"early": False}},
        {"strategy": "exhaustive"},
        {"objective": ["tokens_per_s", "memory_headroom"]},
        {"probe": {"iterations": 3}},
    ],
    ids=["told not to", "exhaustive", "several objectives", "too few iterations"],
)
def test_some_campaigns_stop_no_probe(api: Api, campaign: dict[str, Any]) -> None:
    assert to_beat(api, **campaign) is None


def test_a_cheap_probe_is_never_stopped_and_trains_the_layers_of_its_part(api: Api) -> None:
    created = api.submit(strategy="guided", budget={"node_hours": 1.0})
    worker = api.register()
    api.complete(worker, "first", BEST, tokens_per_s=1024.0)
    part = Fidelity(num_microbatches=4, dp=1, num_layers=2)
    api.store.add_trial(created["id"], OTHER, fidelity=part)
    request = api.lease(worker)["request"]
    assert request["stop_above_step_time_s"] is None
    assert request["layout"] == part.reduced(OTHER).to_mapping()
    assert request["model"]["num_layers"] == 2


def test_a_repeat_is_never_stopped(api: Api) -> None:
    api.submit()
    worker = api.register()
    slow = api.complete(worker, "first", OTHER, tokens_per_s=10.0)
    api.complete(worker, "first", BEST, tokens_per_s=1024.0)
    api.store.repeat_trial(slow)
    assert api.lease(worker)["request"]["stop_above_step_time_s"] is None


def test_the_best_is_taken_at_the_low_end_of_its_interval(api: Api) -> None:
    created = api.submit()
    worker = api.register()
    first = api.complete(worker, "first", BEST, tokens_per_s=1024.0)
    again = api.store.repeat_trial(first)
    api.report(worker, api.lease(worker), completed(again.layout, tokens_per_s=1000.0))
    api.store.add_trial(created["id"], OTHER)
    seconds = api.lease(worker)["request"]["stop_above_step_time_s"]
    assert seconds > 1.05 * 8 * 128 / 1000.0, "two runs say little about how far apart runs lie"
