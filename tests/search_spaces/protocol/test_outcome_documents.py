from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from search_spaces.errors import OutcomeInvalidError, SearchSpaceError
from search_spaces.protocol.outcome import (
    Breakdown,
    Environment,
    Iteration,
    Measurement,
    Outcome,
    ProbeRequest,
)
from search_spaces.spec.layout import Layout
from search_spaces.spec.presets.models import model_preset


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

SKIPPED = Iteration(index=2, kind="timed", step_time_s=0.5, loss=6.9, grad_norm=None)

ENVIRONMENT = Environment(
    host="node1",
    device="CPU core",
    backend="gloo",
    python_version="3.11",
    torch_version="2.13",
    numpy_version="2.4",
    git_revision="unknown",
)


def make_outcome() -> Outcome:
    return Outcome(
        state="completed", duration_s=9.5, measurement=make_measurement(), environment=ENVIRONMENT
    )


@pytest.mark.parametrize(
    "outcome",
    [
        make_outcome(),
        Outcome(
            state="completed",
            duration_s=9.5,
            measurement=make_measurement(
                iterations=(*make_measurement().iterations, SKIPPED),
                breakdown=BREAKDOWN,
                peak_reserved_bytes_by_stage=(1 << 21, 1 << 20),
                warmup_settled=True,
                skipped_steps=1,
                shortened=True,
                iterations_asked=10,
            ),
        ),
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


def test_an_outcome_of_a_trainer_that_tells_no_breakdown_is_read() -> None:
    document = make_outcome().to_mapping()
    for name in (
        "breakdown",
        "peak_reserved_bytes_by_stage",
        "skipped_steps",
        "shortened",
    ):
        del document["measurement"][name]
    assert Outcome.from_mapping(document) == make_outcome()


def test_the_shares_of_a_breakdown_are_of_the_whole_by_name() -> None:
    parts = Breakdown(
        compute_s=0.3, tp_s=0.1, pp_s=0.0, dp_s=0.05, optimizer_s=0.05, unexplained_s=0.0
    )
    expected = {"compute": 0.6, "tp": 0.2, "pp": 0, "dp": 0.1, "optimizer": 0.1, "unexplained": 0}
    assert parts.shares == pytest.approx(expected)


def test_a_breakdown_adds_up_to_the_whole() -> None:
    assert BREAKDOWN.total_s == pytest.approx(0.5)


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


def changed(path: list[str | int], value: Any) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(json.dumps(make_outcome().to_mapping()))
    place: Any = document
    for step in path[:-1]:
        place = place[step]
    if value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return document


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["state"], ..., "state: an outcome lacks the field"),
        (["state"], "done", "state: 'done' is unknown"),
        (["reason"], "bored", "reason: 'bored' is unknown"),
        (["duration_s"], "9", "duration_s: '9' is not a finite number"),
        (["measurement", "mfu"], float("nan"), "measurement.mfu: nan is not a finite number"),
        (["measurement", "mfu"], ..., "measurement.mfu: a measurement lacks the field"),
        (["measurement", "speed"], 3, "measurement: unknown field 'speed'"),
        (
            ["measurement", "tokens_per_step"],
            1.5,
            "measurement.tokens_per_step: 1.5 is not a whole",
        ),
        (
            ["measurement", "oversubscribed"],
            0,
            "measurement.oversubscribed: 0 is not true or false",
        ),
        (["measurement", "peak_memory_bytes_by_stage"], 3, "by_stage: 3 is not a list"),
        (["measurement", "peak_memory_bytes_by_stage", 1], "3", "by_stage.1: '3' is not a whole"),
        (["measurement", "iterations", 1, "kind"], "cold", "measurement.iterations.1.kind: 'cold'"),
        (["measurement", "iterations", 0, "loss"], None, "iterations.0.loss: None is not a finite"),
        (["measurement", "iterations", 0, "grad_norm"], "1", "grad_norm: '1' is not a finite numb"),
        (["measurement", "breakdown"], 3, "measurement.breakdown: a breakdown is 3, not a mapping"),
        (["measurement", "breakdown"], {"tp_s": 1}, "breakdown.compute_s: a breakdown lacks"),
        (["measurement", "warmup_settled"], 1, "warmup_settled: 1 is not true or false"),
        (["measurement", "peak_reserved_bytes_by_stage"], 3, "reserved_bytes_by_stage: 3 is not a"),
        (
            ["measurement", "iterations"],
            [{}] * 20_101,
            "measurement.iterations: 20101 entries are more than 20100",
        ),
        (
            ["measurement", "peak_memory_bytes_by_stage"],
            [1] * 65_537,
            "peak_memory_bytes_by_stage: 65537 entries are more than 65536",
        ),
        (["environment", "host"], 3, "environment.host: 3 is not a string"),
        (["environment", "host"], "\ud800", "environment.host: '\\ud800' holds a lone surrogate"),
        (["message"], "a \udc80 b", "message: 'a \\udc80 b' holds a lone surrogate"),
        (
            ["measurement", "peak_source"],
            "\udfff",
            "measurement.peak_source: '\\udfff' holds a lone",
        ),
    ],
)
def test_a_malformed_outcome_is_refused_with_the_field(
    path: list[str | int], value: Any, message: str
) -> None:
    with pytest.raises(OutcomeInvalidError) as caught:
        Outcome.from_mapping(changed(path, value))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("path", "value"),
    [(["measurement"], None), (["reason"], "crashed"), (["state"], "failed")],
)
def test_an_outcome_whose_parts_contradict_each_other_is_refused(
    path: list[str | int], value: Any
) -> None:
    with pytest.raises(OutcomeInvalidError, match="a completed one has a measurement"):
        Outcome.from_mapping(changed(path, value))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["duration_s"], -0.5, "duration_s: -0.5 is not a finite number of at least 0"),
        (["duration_s"], 1e308, "duration_s: 1e+308 s are more than 1000000000"),
        (
            ["measurement", "step_time_s"],
            -1.0,
            "measurement.step_time_s: -1.0 is not a finite numb",
        ),
        (
            ["measurement", "step_time_q25_s"],
            0.0,
            "step_time_q25_s: 0.0 is not a finite number over",
        ),
        (["measurement", "tokens_per_s"], -5.0, "tokens_per_s: -5.0 is not a finite number over 0"),
        (["measurement", "peak_tflops_per_device"], 0.0, "peak_tflops_per_device: 0.0 is not a"),
        (["measurement", "mfu"], -0.1, "mfu: -0.1 is not a finite number of at least 0"),
        (
            ["measurement", "tokens_per_step"],
            0,
            "tokens_per_step: 0 is not a whole number of at le",
        ),
        (["measurement", "tokens_per_step"], 1 << 52, "tokens_per_step: 4503599627370496 is more"),
        (["measurement", "peak_memory_bytes"], 0, "peak_memory_bytes: 0 is not a whole number"),
        (["measurement", "peak_memory_bytes_by_stage", 1], -1, "by_stage.1: -1 is not a whole"),
        (["measurement", "iterations"], [], "iterations: there is no timed iteration"),
        (["measurement", "iterations", 1, "kind"], "warmup", "there is no timed iteration"),
        (["measurement", "iterations", 1, "step_time_s"], 0.0, "iterations.1.step_time_s: 0.0 is"),
        (["measurement", "iterations", 0, "grad_norm"], -1.0, "iterations.0.grad_norm: -1.0 is"),
    ],
)
def test_an_invalid_measurement_is_refused_with_the_field(
    path: list[str | int], value: Any, message: str
) -> None:
    with pytest.raises(OutcomeInvalidError) as caught:
        Outcome.from_mapping(changed(path, value))
    assert message in str(caught.value)


@pytest.mark.parametrize("figure", [float("nan"), float("inf"), -1.0])
def test_an_invalid_measurement_is_refused_at_construction(figure: float) -> None:
    with pytest.raises(OutcomeInvalidError, match="tokens_per_s"):
        make_measurement(tokens_per_s=figure)
    with pytest.raises(OutcomeInvalidError, match="duration_s"):
        Outcome(state="failed", reason="crashed", duration_s=figure)
    iteration = Iteration(index=0, kind="timed", step_time_s=1.0, loss=figure, grad_norm=1.0)
    with pytest.raises(OutcomeInvalidError, match=r"iterations\.0\.loss"):
        make_measurement(iterations=(iteration,))


def test_more_than_the_peak_of_the_device_is_refused_with_the_peak() -> None:
    assert make_measurement(peak_tflops_per_device=0.1, mfu=1.0, hfu=1.0).hfu == 1.0
    with pytest.raises(
        OutcomeInvalidError,
        match=r"hfu: 1\.2 of the peak \(0\.2 TFLOP/s, measured matmul \(fp32\)\)",
    ):
        make_measurement(hfu=1.2)
    with pytest.raises(OutcomeInvalidError, match=r"mfu: 1\.1 of the peak"):
        make_measurement(mfu=1.1)


def test_a_breakdown_of_another_time_is_refused() -> None:
    with pytest.raises(OutcomeInvalidError, match=r"breakdown: the parts add up to 0\.51"):
        make_measurement(breakdown=replace(BREAKDOWN, unexplained_s=0.03))


@pytest.mark.parametrize("part", ["compute_s", "tp_s", "pp_s", "dp_s", "optimizer_s"])
def test_no_part_of_an_iteration_is_negative_but_what_is_left_may_be(part: str) -> None:
    with pytest.raises(OutcomeInvalidError, match=rf"{part}: -0\.1 is not a finite number of at"):
        replace(BREAKDOWN, **{part: -0.1})
    assert replace(BREAKDOWN, unexplained_s=-0.01).unexplained_s == -0.01
    with pytest.raises(OutcomeInvalidError, match="unexplained_s: nan is not a finite number"):
        replace(BREAKDOWN, unexplained_s=float("nan"))


def test_reserved_memory_is_of_every_stage_or_of_none() -> None:
    with pytest.raises(
        OutcomeInvalidError, match=r"by_stage: there are figures of 1 stages, .* of 2"
    ):
        make_measurement(peak_reserved_bytes_by_stage=(5,))


def test_no_more_steps_are_skipped_than_were_taken() -> None:
    with pytest.raises(OutcomeInvalidError, match="skipped_steps: 3 is more than 2"):
        make_measurement(skipped_steps=3)


@pytest.mark.parametrize(
    ("shortened", "asked", "message"),
    [
        (True, 1, "iterations_asked: 1 is not a whole number of at least 2"),
        (True, None, "iterations_asked: None is not a whole number of at least 2"),
        (False, 4, "iterations_asked: 4 iterations were asked for and 1 timed"),
    ],
)
def test_a_shortened_measurement_has_fewer_iterations_than_were_asked_for(
    shortened: bool, asked: int | None, message: str
) -> None:
    with pytest.raises(OutcomeInvalidError, match=message):
        make_measurement(shortened=shortened, iterations_asked=asked)


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ("cancelled", "crashed"),
        ("cancelled", "out_of_memory"),
        ("cancelled", "node_lost"),
        ("failed", "cancelled"),
        ("infeasible", "cancelled"),
    ],
)
def test_cancelled_has_a_reason_that_no_other_state_has(state: Any, reason: Any) -> None:
    with pytest.raises(OutcomeInvalidError, match="does not go with"):
        Outcome(state=state, reason=reason)


def test_a_state_that_there_is_not_is_refused_at_construction() -> None:
    impossible: Any = "done"
    with pytest.raises(OutcomeInvalidError, match="state: 'done' is unknown"):
        Outcome(state=impossible, reason="crashed")


@pytest.mark.parametrize("state", ["failed", "infeasible"])
def test_infeasible_means_out_of_memory_and_nothing_else(state: Any) -> None:
    reason: Any = "out_of_memory" if state == "failed" else "crashed"
    with pytest.raises(OutcomeInvalidError, match="infeasible is out_of_memory"):
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
        (
            "deadline_s",
            1e10,
            "deadline_s: 10000000000.0 is not a number over 0, at most 1000000000",
        ),
        ("memory_limit_bytes", 0, "memory_limit_bytes: 0 is not a whole number"),
        ("layout", {"tp": 0}, "layout: tp=0 is not a whole number"),
        ("model", "tiny", "model: the model is 'tiny', not a mapping"),
    ],
)
def test_a_malformed_probe_request_is_refused_with_the_field(
    field: str, value: Any, message: str
) -> None:
    request = ProbeRequest(model=model_preset("tiny"), layout=Layout()).to_mapping()
    with pytest.raises(SearchSpaceError) as caught:
        ProbeRequest.from_mapping({**request, field: value})
    assert message in str(caught.value)
