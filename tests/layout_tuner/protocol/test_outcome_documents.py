from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from typing import Any

import pytest

from layout_tuner.errors import CampaignInvalidError, OutcomeInvalidError, SearchSpaceError
from layout_tuner.protocol.measurement import (
    Breakdown,
    Environment,
    Iteration,
    Measurement,
    routing_words,
)
from layout_tuner.protocol.measurement_checks import (
    least_memory_bytes,
    refuse_contradictions,
)
from layout_tuner.protocol.metrics import METRICS
from layout_tuner.protocol.outcome import Outcome, ProbeRequest
from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_presets import model_preset
from layout_tuner.search_spaces.objectives import OBJECTIVES
from tests.kit.campaigns import spec_of


def make_measurement(**changes: Any) -> Measurement:
    values: dict[str, Any] = {
        "step_time_s": 0.5,
        "step_time_q25_s": 0.5,
        "step_time_q75_s": 0.5,
        "tokens_per_step": 1024,
        "tokens_per_s": 2048.0,
        "tokens_per_s_per_device": 1024.0,
        "model_tflops_per_device": 0.1,
        "hardware_tflops_per_device": 0.1,
        "peak_tflops_per_device": 0.2,
        "peak_source": "measured matmul (fp32)",
        "mfu": 0.5,
        "hfu": 0.5,
        "peak_memory_bytes": 1 << 20,
        "peak_memory_bytes_by_stage": (1 << 20, 1 << 19),
        "memory_kind": "logical",
        "oversubscribed": False,
        "iterations": (
            Iteration(index=0, kind="warmup", step_time_s=0.7, loss=7.0, grad_norm=1.0),
            Iteration(index=1, kind="timed", step_time_s=0.5, loss=6.9, grad_norm=1.1),
        ),
        "iterations_asked": 1,
        "warmup_settled": True,
    }
    return Measurement(**{**values, **changes})


BREAKDOWN = Breakdown(
    compute_s=0.3, tp_s=0.05, pp_s=0.06, dp_s=0.04, optimizer_s=0.03, unexplained_s=0.02
)
"""Of the half second that `make_measurement` took."""


ENVIRONMENT = Environment(**{field.name: f"a {field.name}" for field in fields(Environment)})


def make_outcome() -> Outcome:
    return Outcome(
        state="completed", duration_s=9.5, measurement=make_measurement(), environment=ENVIRONMENT
    )


TIMED = Iteration(index=2, kind="timed", step_time_s=0.5, loss=6.9, grad_norm=None)
EVERYTHING = make_measurement(
    iterations=(*make_measurement().iterations, TIMED),
    breakdown=BREAKDOWN,
    peak_reserved_bytes_by_stage=(1 << 21, 1 << 20),
    skipped_steps=1,
    shortened=True,
    iterations_asked=10,
    others_share=0.4,
    own_share=0.1,
    throttled=False,
)


@pytest.mark.parametrize(
    "outcome",
    [
        make_outcome(),
        Outcome(state="completed", duration_s=9.5, measurement=EVERYTHING),
        Outcome(state="failed", reason="implausible", message="hfu is 1.2"),
        Outcome(state="infeasible", reason="out_of_memory", message="rank 3", node="node1"),
        Outcome(state="failed", reason="timeout", log_tail="a\nb", environment=ENVIRONMENT),
        Outcome(state="cancelled", reason="cancelled"),
    ],
    ids=lambda outcome: outcome.state,
)
def test_an_outcome_survives_the_round_trip_through_json(outcome: Outcome) -> None:
    document = json.loads(json.dumps(outcome.to_mapping(), allow_nan=False))
    assert Outcome.from_mapping(document) == outcome
    if outcome == make_outcome():  # of a trainer that tells no breakdown
        for name in ("breakdown", "peak_reserved_bytes_by_stage", "skipped_steps", "shortened"):
            del document["measurement"][name]
        assert Outcome.from_mapping(document) == outcome


def test_the_shares_of_a_breakdown_are_of_the_whole_and_its_parts_not_negative() -> None:
    parts = Breakdown(
        compute_s=0.3, tp_s=0.1, pp_s=0.0, dp_s=0.05, optimizer_s=0.05, unexplained_s=0.0
    )
    expected = {"compute": 0.6, "tp": 0.2, "pp": 0, "dp": 0.1, "optimizer": 0.1, "unexplained": 0}
    assert parts.shares == pytest.approx(expected)
    for part in ("compute_s", "tp_s", "pp_s", "dp_s", "optimizer_s"):
        with pytest.raises(OutcomeInvalidError, match=rf"{part}: -0\.1 is not a finite number of"):
            replace(BREAKDOWN, **{part: -0.1})
    assert replace(BREAKDOWN, unexplained_s=-0.01).unexplained_s == -0.01
    with pytest.raises(OutcomeInvalidError, match="unexplained_s: nan is not a finite number"):
        replace(BREAKDOWN, unexplained_s=float("nan"))


def test_a_probe_request_survives_the_round_trip_through_json() -> None:
    request = ProbeRequest(
        model=model_preset("tiny"),
        layout=Layout(tp=2),
        seed=4,
        memory_limit_bytes=1 << 30,
        stop_above_step_time_s=0.25,
    )
    document = json.loads(json.dumps(request.to_mapping(), allow_nan=False))
    assert ProbeRequest.from_mapping(document) == request


def changed(path: str, value: Any) -> dict[str, Any]:
    """The document of an outcome with another value in a place, or, for `...`, without it."""
    document: dict[str, Any] = json.loads(json.dumps(make_outcome().to_mapping()))
    *steps, last = (int(step) if step.isdecimal() else step for step in path.split("."))
    place: Any = document
    for step in steps:
        place = place[step]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return document


M, FIRST, SECOND = "measurement", "measurement.iterations.0", "measurement.iterations.1"
BY_STAGE = "measurement.peak_memory_bytes_by_stage"
RESERVED = "measurement.peak_reserved_bytes_by_stage"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("state", ..., "state: an outcome lacks the field"),
        ("state", "done", "state: 'done' is unknown"),
        ("reason", "bored", "reason: 'bored' is unknown"),
        ("duration_s", "9", "duration_s: '9' is not a finite number"),
        ("duration_s", 1e308, "duration_s: 1e+308 s are more than 1000000000"),
        ("message", "a \udc80 b", "message: 'a \\udc80 b' holds a lone surrogate"),
        ("environment.host", 3, "environment.host: 3 is not a string"),
        (f"{M}.mfu", ..., "measurement.mfu: a measurement lacks the field"),
        (f"{M}.speed", 3, "measurement: unknown field 'speed'"),
        (f"{M}.step_time_s", -1.0, "measurement.step_time_s: -1.0 is not a finite numb"),
        (f"{M}.step_time_q25_s", 0.0, "step_time_q25_s: 0.0 is not a finite number over"),
        (f"{M}.peak_tflops_per_device", 0.0, "peak_tflops_per_device: 0.0 is not a"),
        (f"{M}.tokens_per_step", 1.5, "measurement.tokens_per_step: 1.5 is not a whole"),
        (f"{M}.tokens_per_step", 0, "tokens_per_step: 0 is not a whole number of at le"),
        (f"{M}.tokens_per_step", 1 << 52, "tokens_per_step: 4503599627370496 is more"),
        (f"{M}.oversubscribed", 0, "measurement.oversubscribed: 0 is not true or false"),
        (f"{M}.others_share", 1.01, "measurement.others_share: 1.01 is more than 1"),
        (f"{M}.others_share", -0.1, "others_share: -0.1 is not a finite number of at least 0"),
        (f"{M}.own_share", 0.5, "measurement.own_share: 0.5 is more than others_share, of which"),
        (f"{M}.own_share", -0.1, "own_share: -0.1 is not a finite number of at least 0"),
        (f"{M}.throttled", 1, "throttled: 1 is not true, false or null"),
        (f"{M}.peak_memory_bytes", 0, "peak_memory_bytes: 0 is not a whole number"),
        (BY_STAGE, 3, "by_stage: 3 is not a list"),
        (BY_STAGE, [1] * 65_537, "by_stage: 65537 entries are more than 65536"),
        (f"{BY_STAGE}.1", "3", "by_stage.1: '3' is not a whole"),
        (RESERVED, 3, "reserved_bytes_by_stage: 3 is not a"),
        (RESERVED, [1 << 19, 1 << 20], "stage.0: 512 KiB less was reserved than the 1 MiB that"),
        (f"{M}.breakdown", 3, "measurement.breakdown: a breakdown is 3, not a mapping"),
        (f"{M}.breakdown", {"tp_s": 1}, "breakdown.compute_s: a breakdown lacks"),
        (f"{M}.iterations", [], "iterations: there is no timed iteration"),
        (f"{M}.iterations", [{}] * 20_101, "iterations: 20101 entries are more than 20100"),
        (f"{FIRST}.loss", None, "iterations.0.loss: None is not a finite"),
        (f"{FIRST}.grad_norm", "1", "grad_norm: '1' is not a finite numb"),
        (f"{SECOND}.kind", "cold", "measurement.iterations.1.kind: 'cold'"),
        (f"{SECOND}.kind", "warmup", "there is no timed iteration"),
        (f"{SECOND}.step_time_s", 0.0, "iterations.1.step_time_s: 0.0 is"),
        # Parts that contradict each other.
        (M, None, "a completed one has a measurement"),
        ("reason", "crashed", "a completed one has a measurement"),
        ("state", "failed", "a completed one has a measurement"),
    ],
)
def test_a_malformed_outcome_is_refused_with_the_field(path: str, value: Any, message: str) -> None:
    with pytest.raises(OutcomeInvalidError, match=re.escape(message)):
        Outcome.from_mapping(changed(path, value))


def test_an_invalid_measurement_is_refused_at_construction() -> None:
    for figure in (float("nan"), float("inf"), -1.0):
        with pytest.raises(OutcomeInvalidError, match="tokens_per_s"):
            make_measurement(tokens_per_s=figure)
        with pytest.raises(OutcomeInvalidError, match="duration_s"):
            Outcome(state="failed", reason="crashed", duration_s=figure)
        iteration = Iteration(index=0, kind="timed", step_time_s=1.0, loss=figure, grad_norm=1.0)
        with pytest.raises(OutcomeInvalidError, match=r"iterations\.0\.loss"):
            make_measurement(iterations=(iteration,))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hfu": 1.2}, "hfu: 1.2 of the peak (0.2 TFLOP/s, measured matmul (fp32))"),
        ({"mfu": 1.1}, "mfu: 1.1 of the peak"),
        (
            {"breakdown": replace(BREAKDOWN, unexplained_s=0.03)},
            "breakdown: the parts add up to 0.51",
        ),
        ({"peak_reserved_bytes_by_stage": (5,)}, "by_stage: there are figures of 1 stages, "),
        ({"skipped_steps": 3}, "skipped_steps: 3 is more than 2"),
        ({"skipped_steps": None}, "skipped_steps: None is not a whole number"),
        *(
            (
                {"shortened": True, "iterations_asked": asked},
                f"_asked: {asked} is not a whole number",
            )
            for asked in (1, None)
        ),
        (
            {"shortened": False, "iterations_asked": 4},
            "iterations_asked: 4 iterations were asked for and 1 timed",
        ),
    ],
)
def test_a_measurement_that_contradicts_itself_is_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(OutcomeInvalidError, match=re.escape(message)):
        make_measurement(**changes)
    assert make_measurement(peak_tflops_per_device=0.1, mfu=1.0, hfu=1.0).hfu == 1.0


def test_a_state_goes_with_its_own_reasons_alone() -> None:
    pairs: list[tuple[Any, Any, str]] = [
        *(("cancelled", reason, "does not go with") for reason in ("crashed", "out_of_memory")),
        *((state, "cancelled", "does not go with") for state in ("failed", "infeasible")),
        ("failed", "out_of_memory", "infeasible is out_of_memory"),
        ("infeasible", "crashed", "infeasible is out_of_memory"),
    ]
    for state, reason, message in pairs:
        with pytest.raises(OutcomeInvalidError, match=message):
            Outcome(state=state, reason=reason)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("warmup", 1, "warmup: 1 is not a whole number of at least 2"),
        ("compile", 1, "compile: 1 is not true or false"),
        ("iterations", 0, "iterations: 0 is not a whole number of at least 1"),
        ("seed", "a", "seed: 'a' is not a whole number"),
        ("stop_above_step_time_s", 0, "stop_above_step_time_s: 0 is not a number over 0"),
        ("deadline_s", float("inf"), "deadline_s: inf is not a number over 0"),
        ("deadline_s", 1e10, "deadline_s: 10000000000.0 is not a number over 0, at most 1000000"),
        ("memory_limit_bytes", 0, "memory_limit_bytes: 0 is not a whole number"),
        ("layout", {"tp": 0}, "layout: tp=0 is not a whole number"),
        ("model", "tiny", "model: the model is 'tiny', not a mapping"),
    ],
)
def test_a_malformed_probe_request_is_refused_with_the_field(
    field: str, value: Any, message: str
) -> None:
    request = ProbeRequest(model=model_preset("tiny"), layout=Layout()).to_mapping()
    with pytest.raises(SearchSpaceError, match=re.escape(message)):
        ProbeRequest.from_mapping({**request, field: value})


def test_a_metric_is_measured_or_follows_from_what_was_measured() -> None:
    measured = {field.name for field in fields(Measurement)}
    assert {name for name, metric in METRICS.items() if metric.is_measured} <= measured
    derived = [name for name, metric in METRICS.items() if not metric.is_measured]
    assert derived == ["tokens_per_node_hour"]
    assert set(OBJECTIVES) < set(METRICS), "every objective that ranks is a metric"
    assert METRICS["peak_memory_bytes"].is_whole
    assert not METRICS["tokens_per_s"].is_whole


def read(model: str = "tiny-moe", **probe: Any) -> CampaignSpec:
    space = {"global_batch_size": 8}
    return spec_of(model=model, cluster="local-cpu", space=space, probe=probe)


def test_a_campaign_passes_its_routing_to_each_probe_and_by_default_states_none() -> None:
    spec = read(balanced_routing=False)
    assert spec.to_mapping()["probe"]["balanced_routing"] is False
    assert CampaignSpec.from_mapping(spec.to_mapping()) == spec
    request = spec.probe_request(Layout())
    assert not request.balanced_routing
    assert ProbeRequest.from_mapping(request.to_mapping()) == request
    plain = read()
    assert plain.probe_request(Layout()).balanced_routing
    for document in (plain.to_mapping()["probe"], plain.probe_request(Layout()).to_mapping()):
        assert "balanced_routing" not in document
    assert "balanced_routing" not in make_measurement().to_mapping()


def test_dense_models_have_no_routing_to_measure() -> None:
    with pytest.raises(CampaignInvalidError, match="balanced_routing: false measures how unevenly"):
        read("tiny", balanced_routing=False)
    with pytest.raises(CampaignInvalidError, match="is not true or false"):
        read(balanced_routing="no")
    with pytest.raises(SearchSpaceError, match="the model tiny has none; leave it out"):
        ProbeRequest(model=model_preset("tiny"), layout=Layout(), balanced_routing=False)


def test_a_measurement_of_other_routing_than_asked_for_is_refused() -> None:
    """The losses of a campaign are compared: all of its probes route in the same way."""
    request = ProbeRequest(model=model_preset("tiny-moe"), layout=Layout(), iterations=1)
    for routing in (None, False):
        load = None if routing is None else 1.5
        measured = make_measurement(balanced_routing=routing, expert_load=load)
        with pytest.raises(OutcomeInvalidError, match=r"is not what the probe was to do, true"):
            refuse(measured, request)
    dense = ProbeRequest(model=model_preset("tiny"), layout=Layout(), iterations=1)
    with pytest.raises(OutcomeInvalidError, match=r"is not what the probe was to do, none"):
        refuse(make_measurement(balanced_routing=True, expert_load=1.0), dense)


def test_the_embedded_trainer_holds_weights_gradients_and_optimizer_states() -> None:
    model = model_preset("tiny")
    request = ProbeRequest(model=model, layout=Layout(), iterations=1)
    assert least_memory_bytes(request) == (4 + 4 + 8) * model.num_parameters


def test_a_rank_holds_the_largest_of_several_kinds_of_layers() -> None:
    """A layer of experts of Nemotron-3 Nano: the experts, the shared one, the router and a norm."""
    request = ProbeRequest(
        model=model_preset("nemotron-3-nano-30b-a3b"),
        layout=Layout(dp=4),
        iterations=1,
        trainer="megatron-lm",
    )
    layer = 2 * 2688 * (128 * 1856 + 3712) + 128 * 2688 + 2688
    assert least_memory_bytes(request) == layer / 4
    assert least_memory_bytes(request, is_sampled=True) == 0.0


def refuse(measured: Measurement, request: ProbeRequest) -> None:
    warmup, timed = measured.iterations
    steps = [
        warmup,
        *(
            replace(each, index=at, step_time_s=0.5, loss=7.0)
            for at, each in ((1, warmup), (2, timed))
        ),
    ]
    whole = make_measurement(
        iterations=tuple(steps),
        tokens_per_step=128,
        tokens_per_s=256.0,
        tokens_per_s_per_device=256.0,
        peak_memory_bytes_by_stage=(1 << 20,),
        balanced_routing=measured.balanced_routing,
        expert_load=measured.expert_load,
    )
    asked = replace(request, warmup=2)
    refuse_contradictions(whole, asked, device_memory_bytes=1 << 30, may_be_shortened=False)


def test_impossible_loads_are_refused_and_others_told_in_words() -> None:
    for routing, load, says in (
        (True, None, "state both, or neither"),
        (None, 1.0, "state both, or neither"),
        (False, 0.5, "the fullest expert has the mean"),
        (False, float("nan"), "expert_load"),
    ):
        with pytest.raises(OutcomeInvalidError, match=says):
            make_measurement(balanced_routing=routing, expert_load=load)
    assert routing_words(None, None) == ""
    assert routing_words(True, 1.0).startswith("balanced by force, not by the router")
    assert routing_words(False, 1.4) == "by the router; the fullest expert has 1.40 times the mean"
    stored = make_measurement(balanced_routing=False, expert_load=1.25)
    assert Measurement.from_mapping(stored.to_mapping()) == stored
