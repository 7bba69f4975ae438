"""Constants and measurements of one campaign that are absurd, and the predictions of the others."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from fastapi.testclient import TestClient

from layout_tuner.predictions.belief.plausible_samples import LEAST_RATIO, MOST_TIMES
from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.tuner.driver.driver import Driver
from tests.kit.api import CAMPAIGN, CLUSTER, Api

CONSTANTS: dict[str, Any] = {
    "peak_flops_per_s": {"fp32": 1e12},
    "memory_bandwidth_bytes_per_s": 1e10,
    "intra_node_bandwidth_bytes_per_s": {"2": 4e9, "4": 2e9},
    "inter_node_bandwidth_bytes_per_s": 2e9,
}
pytestmark = pytest.mark.sqlite_is_enough

LAYOUTS = tuple(Layout(tp=tp, pp=pp, num_microbatches=8) for tp in (1, 2) for pp in (1, 2))


@pytest.fixture
def service(http: TestClient) -> Api:
    return Api(http)


def described(times: float = 1.0, **changes: Any) -> dict[str, Any]:
    """The cluster with constants that are `times` as fast."""

    def faster(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: each * times for key, each in value.items()}
        return value * times

    return {**CLUSTER, **{name: faster(value) for name, value in CONSTANTS.items()}, **changes}


CALCULATING = {**CAMPAIGN, "cluster": described(), "model": "gpt-125m"}
"""A campaign whose steps take as long as the devices calculate, not their hosts."""


def planned(api: Api, *, top: int = 10, **changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = api.post(f"/plans?top={top}", {**CALCULATING, **changes})
    return found


def step_times_s(plan: dict[str, Any]) -> dict[str, float]:
    return {each["layout_key"]: each["predicted"]["step_time_s"] for each in plan["layouts"]}


def ended(api: Api, name: str, steps_s: dict[Layout, float], **changes: Any) -> None:
    """A campaign that measured these step times and has ended."""
    api.submit(**{**CALCULATING, "name": name, **changes})
    worker = api.register(f"of-{name}")
    for layout, step_time_s in steps_s.items():
        api.complete(worker, name, layout, step_time_s=step_time_s, peak_memory_bytes=4 << 30)
    api.post(f"/campaigns/{name}/cancel")


@pytest.fixture
def true_s(service: Api) -> dict[Layout, float]:
    """What the machine takes: half as long again as its constants say."""
    cold = step_times_s(planned(service))
    return {layout: 1.5 * cold[layout.key] for layout in LAYOUTS}


@pytest.mark.parametrize("times", [1e5, 1e-5])
def test_absurd_constants_of_one_campaign_leave_the_predictions_of_others(
    service: Api, times: float
) -> None:
    sizes, modes = [1, 2, 4, 8], ["none", "full"]
    space = {**CAMPAIGN["space"], "micro_batch_size": sizes, "recompute": modes}
    before = step_times_s(planned(service, space=space, top=32))
    layouts = CampaignSpec.from_document({**CALCULATING, "space": space}).legal_set()
    # The machine takes what is predicted from its true constants.
    measured_s = {layouts.layout(row): before[layouts.layout(row).key] for row in range(32)}
    for name in ("first", "second"):
        ended(service, name, measured_s, space=space, cluster=described(times))
    plan = planned(service, space=space, top=32)
    assert plan["knowledge"]["num_step_times"] == 64
    assert step_times_s(plan) == pytest.approx(before, rel=0.03)


def test_measurements_of_a_campaign_with_absurd_constants_calibrate_by_those_of_the_next(
    service: Api, true_s: dict[Layout, float]
) -> None:
    ended(service, "absurd", true_s, cluster=described(1e-5))
    found = step_times_s(planned(service))
    cold = step_times_s(planned(service, knowledge="none"))
    for layout, seconds in true_s.items():
        assert cold[layout.key] < found[layout.key] <= 1.05 * seconds


@pytest.mark.parametrize(
    ("is_counted", "times"),
    [
        (False, 1e-9),
        (False, 0.9 * LEAST_RATIO),
        (True, 1.5 * LEAST_RATIO),
        (True, 0.5 * MOST_TIMES),
        (False, 1.1 * MOST_TIMES),
    ],
)
def test_step_times_beyond_reason_are_left_out_and_the_plan_says_so(
    service: Api, true_s: dict[Layout, float], is_counted: bool, times: float
) -> None:
    cold = step_times_s(planned(service))
    ended(service, "odd", {layout: times * cold[layout.key] for layout in LAYOUTS})
    plan = planned(service)
    used = plan["knowledge"]
    (*_, said) = [each for each in plan["warnings"] if "left out" in each] or [""]
    if is_counted:
        assert (used["num_step_times"], said) == (4, "")
    else:
        assert (used["num_measurements"], used["num_step_times"]) == (4, 0)
        assert said.startswith("4 of 4 measured step times are left out")
        assert step_times_s(plan) == pytest.approx(cold)


def test_the_driver_logs_what_a_campaign_leaves_out(
    service: Api, true_s: dict[Layout, float], caplog: pytest.LogCaptureFixture
) -> None:
    ended(service, "odd", {layout: 1e-4 * seconds for layout, seconds in true_s.items()})
    service.submit(**{**CALCULATING, "name": "next"})
    with caplog.at_level(logging.WARNING):
        Driver(service.store).step()
    (logged,) = (each for each in caplog.messages if "left out" in each)
    assert logged.startswith("campaign 'next': 4 of 4 measured step times are left out")


def test_a_campaign_with_absurd_constants_leaves_out_what_contradicts_them_and_is_warned(
    service: Api, true_s: dict[Layout, float]
) -> None:
    ended(service, "honest", true_s)
    plan = planned(service, cluster=described(1e-5))
    assert any("4 of 4 measured step times are left out" in each for each in plan["warnings"])
    assert any("peak_flops_per_s[fp32]=" in each for each in plan["warnings"])


@pytest.mark.parametrize(
    ("field", "value", "unit"),
    [
        # Gigabytes a second with three zeros missing, and bytes a second with nine too many.
        ("memory_bandwidth_bytes_per_s", 2039.0, "bytes/s"),
        ("inter_node_bandwidth_bytes_per_s", 2.5e14, "bytes/s"),
        ("intra_node_bandwidth_bytes_per_s", {"2": 4e3}, "bytes/s"),
        # Teraflops in units of megaflops.
        ("peak_flops_per_s", {"bf16": 312e6}, "FLOP/s"),
    ],
)
def test_a_submission_with_constants_in_a_wrong_unit_is_warned(
    service: Api, field: str, value: Any, unit: str
) -> None:
    device = {"device": "NVIDIA A100", **CONSTANTS, "peak_flops_per_s": {"bf16": 312e12}}
    bandwidths = {"memory_bandwidth_bytes_per_s": 2e12}
    cluster = {**CLUSTER, "name": "ours", **device, **bandwidths}
    space = {**CAMPAIGN["space"], "precision": "bf16"}
    right = service.submit(name="right", cluster=cluster, space=space)
    wrong = service.submit(name="wrong", cluster={**cluster, field: value}, space=space)
    (warning,) = (each for each in wrong["warnings"] if each not in right["warnings"])
    assert not any("units" in each for each in right["warnings"])
    assert field in warning
    assert unit in warning
    body = {key: each for key, each in {**cluster, field: value}.items() if key != "name"}
    stored = service.http.put("/v1/clusters/ours", json=body).json()
    assert field in stored["warning"]
