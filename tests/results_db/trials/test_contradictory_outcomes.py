"""A true outcome is taken; with one figure changed that another one contradicts, it is refused.

The rule that decides what contradicts a figure is stated here, not taken from the checks.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layout_tuner.errors import OutcomeInvalidError
from layout_tuner.predictions.estimates.peak_memory import stage_memory
from layout_tuner.predictions.statistics.step_times import quartiles
from layout_tuner.protocol.measurement import Breakdown, Measurement
from layout_tuner.protocol.outcome import Outcome
from layout_tuner.results_db.errors import MeasurementInvalidError
from layout_tuner.results_db.records import LeaseRecord
from layout_tuner.results_db.store import Store
from layout_tuner.results_db.trials.outcome_checks import CLOCK_MARGIN_S
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_presets import model_preset
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.trainers.embedded import EMBEDDED_TRAINER
from tests.kit.store import (
    TurnableClock,
    completed,
    lease_one,
    make_iterations,
    make_worker,
    post_outcome,
)
from tests.tuner.factories import make_spec

THEIRS: Final = "theirs"
MODELS: Final = ("tiny", "tiny-llama", "small", "gpt-125m", "llama-1b")
PROCESS_BYTES: Final = 4 << 30
"""What programs hold at most besides the memory of a device."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """An outcome that a probe reported, and what the service knows of the probe."""

    model: ModelShape
    layout: Layout
    trainer: str
    asked: int
    device_bytes: int
    passed_s: float
    nodes_held: float
    iterations_s: float
    outcome: dict[str, Any]

    @property
    def measured(self) -> dict[str, Any]:
        return self.outcome["measurement"]

    @property
    def is_embedded(self) -> bool:
        return self.trainer == EMBEDDED_TRAINER

    @property
    def times_s(self) -> list[float]:
        return [each["step_time_s"] for each in self.measured["iterations"]]

    def too_much(self, peak_bytes: float) -> bool:
        beyond = 0 if self.is_embedded else PROCESS_BYTES
        return peak_bytes > 1.3 * self.device_bytes + beyond

    def too_little(self, peak_bytes: float) -> bool:
        """Less than weights, gradients and states, or of another trainer than a byte a parameter.

        Of what ZeRO shards a rank holds its share, and with ZeRO-2 and 3 one whole layer.
        """
        if self.is_embedded:
            layout, model = self.layout, self.model
            weight, states = (4, 8) if layout.precision == "fp32" else (2, 12)
            held = 0.0
            for size, stage, is_gathered in ((states, 1, 0), (4, 2, 1), (weight, 3, 1)):
                shares = layout.dp if layout.zero_stage >= stage else 1
                held += size * model.num_parameters / (layout.tp * layout.pp * shares)
                if shares > 1 and is_gathered:
                    held += size * model.num_layer_parameters / layout.tp
            return peak_bytes < held
        is_sampled = self.measured["memory_kind"] == "sampled"
        least = self.model.num_layer_parameters / self.layout.num_devices
        return peak_bytes < least and not is_sampled


@st.composite
def probes(draw: st.DrawFn) -> Probe:
    model = model_preset(draw(st.sampled_from(MODELS)))
    trainer = draw(st.sampled_from([EMBEDDED_TRAINER, THEIRS]))
    is_embedded = trainer == EMBEDDED_TRAINER
    sizes = st.sampled_from([1, 2, 4])
    layout = Layout(
        tp=draw(sizes),
        pp=draw(sizes),
        dp=draw(sizes),
        micro_batch_size=draw(sizes),
        num_microbatches=draw(st.integers(1, 8)),
        zero_stage=draw(st.sampled_from([0, 1, 2, 3])),
        recompute=draw(st.sampled_from(["none", "selective", "full"])),
        precision=draw(st.sampled_from(["fp32", "bf16"])),
    )
    layout = replace(layout, num_nodes=draw(st.sampled_from([1, min(2, layout.num_devices)])))
    asked = draw(st.integers(1, 12))
    skips = draw(st.integers(0, 2))
    seconds = st.floats(1e-3, 30.0).map(lambda value: round(value, 6))
    iterations = tuple(
        replace(
            each,
            step_time_s=draw(seconds),
            loss=5.0 if is_embedded else None,
            grad_norm=1.0 if is_embedded and each.index >= skips else None,
        )
        for each in make_iterations(1.0, timed=asked)
    )
    by_stage = tuple(math.ceil(each.total_bytes) for each in stage_memory(layout, model))
    shown = by_stage if is_embedded or draw(st.booleans()) else ()
    theirs: dict[str, Any] = {
        "trainer": trainer,
        "trainer_version": "1",
        "breakdown": None,
        "tokens": draw(st.sampled_from(["counted", "assumed"])),
        "memory_kind": draw(st.sampled_from(["reported", "sampled"])),
    }
    total_s = sum(each.step_time_s for each in iterations)
    duration_s = total_s + draw(st.floats(0.5, 100.0))
    outcome = completed(
        layout,
        model=model,
        iterations=iterations,
        peak_memory_bytes=max(by_stage),
        peak_memory_bytes_by_stage=shown,
        peak_reserved_bytes_by_stage=tuple(each + each // 8 for each in shown),
        duration_s=duration_s,
        **({} if is_embedded else theirs),
    )
    return Probe(
        model=model,
        layout=layout,
        trainer=trainer,
        asked=asked,
        device_bytes=draw(st.integers(9, 20)) * max(by_stage) // 8,
        passed_s=duration_s + draw(st.floats(0.0, 5.0)),
        nodes_held=float(layout.num_nodes),
        iterations_s=total_s,
        outcome=outcome.to_mapping(),
    )


Change = Callable[[Probe, float], Probe | None]
"""Changes a figure by a factor; None where nothing contradicts it then."""


def _figures(probe: Probe, **changed: Any) -> Probe:
    measured = {**copy.deepcopy(probe.measured), **changed}
    return replace(probe, outcome={**probe.outcome, "measurement": measured})


def _times(value: Any, factor: float) -> Any:
    return value * factor if isinstance(value, float) else max(round(value * factor), 1)


def _figure(name: str) -> Change:
    """A figure of the measurement that others determine."""
    return lambda probe, factor: _figures(probe, **{name: _times(probe.measured[name], factor)})


def _part(name: str) -> Change:
    def change(probe: Probe, factor: float) -> Probe | None:
        parts = probe.measured["breakdown"]
        return parts and _figures(probe, breakdown={**parts, name: parts[name] * factor})

    return change


def _of_iterations(name: str, only: int | None = None) -> Change:
    """A figure of all iterations, or of the one at this place."""

    def change(probe: Probe, factor: float) -> Probe:
        changed = copy.deepcopy(probe.measured["iterations"])
        for each in changed if only is None else [changed[only]]:
            each[name] = _times(each[name], factor)
        return _figures(probe, iterations=changed)

    return change


def _one_time(only: int) -> Change:
    def change(probe: Probe, factor: float) -> Probe | None:
        changed = _of_iterations("step_time_s", only)(probe, factor)
        total_s, warmup = sum(changed.times_s), len(changed.times_s) - probe.asked
        of_both = (quartiles(each.times_s[warmup:]) for each in (probe, changed))
        moved = zip(*of_both, strict=True)
        is_contradicted = (
            any(not math.isclose(*each, rel_tol=1e-3) for each in moved)
            or (probe.is_embedded and total_s > 1.001 * probe.iterations_s)
            or total_s > 2 * probe.outcome["duration_s"]
        )
        return changed if is_contradicted else None

    return change


def _peak(probe: Probe, factor: float) -> Probe | None:
    changed = _figure("peak_memory_bytes")(probe, factor)
    peak = changed.measured["peak_memory_bytes"]
    is_told_by_stage = bool(probe.measured["peak_memory_bytes_by_stage"])
    is_contradicted = is_told_by_stage or probe.too_much(peak) or probe.too_little(peak)
    return changed if is_contradicted else None


def _memory(probe: Probe, factor: float) -> Probe | None:
    """All figures of memory, each in proportion."""
    changed = _figure("peak_memory_bytes")(probe, factor).measured
    for name in ("peak_memory_bytes_by_stage", "peak_reserved_bytes_by_stage"):
        changed[name] = [_times(each, factor) for each in changed[name]]
    peak = changed["peak_memory_bytes"]
    is_contradicted = probe.too_much(peak) or probe.too_little(peak)
    return _figures(probe, **changed) if is_contradicted else None


def _stage(name: str) -> Change:
    """The figure of the first stage."""

    def change(probe: Probe, factor: float) -> Probe | None:
        if not probe.measured[name]:
            return None
        first, *rest = probe.measured[name]
        changed = _figures(probe, **{name: [_times(first, factor), *rest]})
        peaks = changed.measured["peak_memory_bytes_by_stage"]
        reserved = changed.measured["peak_reserved_bytes_by_stage"]
        is_contradicted = (
            reserved[0] < peaks[0]
            or probe.too_much(reserved[0])
            or max(peaks) != probe.measured["peak_memory_bytes"]
        )
        return changed if is_contradicted else None

    return change


def _skips(probe: Probe, factor: float) -> Probe | None:
    skipped = probe.measured["skipped_steps"]
    return _figures(probe, skipped_steps=round(skipped * factor)) if skipped else None


def _duration(probe: Probe, factor: float) -> Probe | None:
    duration_s = min(probe.outcome["duration_s"] * factor, 1e9)
    is_short = duration_s < 0.999 * probe.iterations_s
    is_long = duration_s > probe.passed_s + CLOCK_MARGIN_S
    changed = replace(probe, outcome={**probe.outcome, "duration_s": duration_s})
    return changed if is_short or is_long else None


def _iterations_s(probe: Probe, factor: float) -> Probe | None:
    iterations_s = probe.iterations_s * factor
    is_short = factor < 1 and probe.is_embedded
    is_contradicted = is_short or iterations_s > 1.001 * probe.outcome["duration_s"]
    return replace(probe, iterations_s=iterations_s) if is_contradicted else None


def _nodes(probe: Probe, factor: float) -> Probe | None:
    is_contradicted = factor > 1 or probe.layout.num_nodes > 1
    return replace(probe, nodes_held=probe.nodes_held * factor) if is_contradicted else None


def _timed(probe: Probe, factor: float) -> Probe | None:
    """Fewer timed iterations than were asked for, all figures made from those that are left."""
    timed = round(probe.asked * min(factor, 1 / factor))
    of = Outcome.from_mapping(probe.outcome).measurement
    if timed < 1 or of is None or not probe.is_embedded:
        return None
    fewer = completed(
        probe.layout,
        model=probe.model,
        iterations=of.iterations[: 2 + timed],
        peak_memory_bytes=of.peak_memory_bytes,
        duration_s=probe.outcome["duration_s"],
    )
    return replace(probe, outcome=fewer.to_mapping())


EXACT: Final = (
    *("step_time_s", "step_time_q25_s", "step_time_q75_s", "tokens_per_step", "tokens_per_s"),
    *("tokens_per_s_per_device", "model_tflops_per_device", "hardware_tflops_per_device"),
    *("peak_tflops_per_device", "mfu", "hfu", "iterations_asked"),
)
CHANGES: Final[dict[str, Change]] = {
    **{name: _figure(name) for name in EXACT},
    **{f"breakdown.{part.name}": _part(part.name) for part in fields(Breakdown)},
    "iterations.index": _of_iterations("index", -1),
    "iterations.step_time_s": _of_iterations("step_time_s"),
    "iterations.step_time_s, the first": _one_time(0),
    "iterations.step_time_s, the last": _one_time(-1),
    "iterations, fewer": _timed,
    "peak_memory_bytes": _peak,
    "peak_memory_bytes, with those by stage": _memory,
    "peak_memory_bytes_by_stage": _stage("peak_memory_bytes_by_stage"),
    "peak_reserved_bytes_by_stage": _stage("peak_reserved_bytes_by_stage"),
    "skipped_steps": _skips,
    "shortened": lambda probe, _factor: _figures(probe, shortened=True),
    "duration_s": _duration,
    "iterations_s": _iterations_s,
    "nodes_held": _nodes,
}
"""By what is changed: a field, and which of its figures."""

UNCONTRADICTED: Final[dict[str, str]] = {
    "breakdown": "another trainer tells none",
    "iterations, fewer": "tried with the embedded trainer; half of one iteration is none",
    "iterations.step_time_s": "one that moves no quartile, unless the embedded trainer's sum grows",
    "iterations.loss": "compared with other layouts' once it is taken: the trial may have diverged",
    "iterations.grad_norm": "follows from nothing that is reported",
    "peak_memory_bytes": "anything from what is certainly held to what the device has",
    "peak_memory_bytes_by_stage": "less, of a stage that is not the fullest; may be left out",
    "peak_reserved_bytes_by_stage": "more, up to what the device has; may be left out",
    "skipped_steps": "0 stays 0; another trainer need not tell norms",
    "duration_s": "up to the margin of the clock, which is not charged; down to the iterations",
    "iterations_s": "more, up to the duration; less of programs, which time themselves",
    "nodes_held": "less than one node: it may be shared",
    "trainer": "a text, compared with the campaign's (test_trainers)",
    **dict.fromkeys(("trainer_version", "tokens", "peak_source", "memory_kind"), "a text"),
    **dict.fromkeys(
        ("oversubscribed", "warmup_settled", "losses_comparable", "others_share", "throttled"),
        "seen by the worker alone",
    ),
    "own_share": "a part of others_share (tests/layout_tuner/protocol/test_outcome_documents.py)",
    "balanced_routing": "models with experts (tests/layout_tuner/protocol/test_outcome_documents.py)",
    "expert_load": "models with experts; the router's choice is seen by the worker alone",
}
"""What nothing contradicts, always or in some outcomes, and why."""
FACTORS: Final = (
    st.floats(2.0, 1e9) | st.floats(2.0, 20.0) | st.floats(1e-9, 0.5) | st.floats(0.05, 0.5)
)


def test_every_figure_is_changed_or_named_with_a_reason() -> None:
    named = {name.replace(",", ".").split(".")[0] for name in (*CHANGES, *UNCONTRADICTED)}
    reported = {"duration_s", "iterations_s", "nodes_held"}
    assert {each.name for each in fields(Measurement)} | reported <= named


class Service:
    """A store with one worker, which runs one probe after another."""

    def __init__(self, store: Store, clock: TurnableClock) -> None:
        self._store, self._clock = store, clock
        size = {"num_nodes": 2, "devices_per_node": 64}
        self._worker = make_worker(store, trainers={THEIRS: "1"}, **size).id
        self._number = 0

    def lease(self, probe: Probe) -> LeaseRecord:
        """Of a campaign that asks for the probe, as long ago as has passed."""
        self._number += 1
        spec = make_spec(f"c{self._number}", probe={"iterations": probe.asked}).to_mapping()
        spec["model"] = asdict(probe.model)
        spec["probe"]["trainer"] = probe.trainer
        spec["cluster"] |= {"num_nodes": 2, "device_memory_bytes": probe.device_bytes}
        campaign = self._store.campaigns.create(spec, num_legal_layouts=1)
        self._store.trials.add(campaign.id, probe.layout)
        lease = lease_one(self._store, self._worker)
        assert lease.campaign_id == campaign.id
        self._clock.forward(probe.passed_s)
        return lease

    def takes(self, lease: LeaseRecord, probe: Probe) -> bool:
        try:
            reply = post_outcome(
                self._store,
                lease.trial_id,
                lease.attempt,
                Outcome.from_mapping(probe.outcome),
                nodes_held=probe.nodes_held,
                iterations_s=probe.iterations_s,
            )
        except (OutcomeInvalidError, MeasurementInvalidError):
            return False
        return reply.accepted

    def forget(self, lease: LeaseRecord) -> None:
        self._store.campaigns.cancel(lease.campaign_id)


@pytest.fixture
def service(sqlite_url: str, clock: TurnableClock) -> Iterator[Service]:
    with closing(Store(sqlite_url, clock=clock)) as store:
        yield Service(store, clock)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("number", [40, pytest.param(3000, marks=pytest.mark.nightly)])
def test_an_outcome_that_contradicts_itself_is_refused(service: Service, number: int) -> None:
    @settings(max_examples=number)
    @given(probe=probes(), factor=FACTORS)
    def only_the_truth_is_taken(probe: Probe, factor: float) -> None:
        lease = service.lease(probe)
        try:
            taken = []
            for name, change in CHANGES.items():
                changed = change(probe, factor)
                if changed is None:
                    named = {name, name.split(",")[0], name.split(".")[0]}
                    assert named & UNCONTRADICTED.keys(), name
                elif changed != probe and service.takes(lease, changed):
                    taken.append(name)
            assert taken == []
            assert not probe.too_little(probe.measured["peak_memory_bytes"])
            assert service.takes(lease, probe), "the truth"
        finally:
            service.forget(lease)

    only_the_truth_is_taken()
