"""What the tests of the database build by the dozen."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from threading import Barrier
from typing import Any, TypeVar

from sqlalchemy import select, update

from layout_tuner.predictions.statistics.step_times import quartiles
from layout_tuner.protocol.measurement import Breakdown, Environment, Iteration, Measurement
from layout_tuner.protocol.outcome import Outcome
from layout_tuner.protocol.worker_messages import (
    AllocationBody,
    BeatBody,
    HeartbeatBody,
    HeartbeatReply,
    LeaseRequest,
    OutcomeReply,
    OutcomeReport,
    StatusBody,
    WorkerCreate,
)
from layout_tuner.results_db.allocations.leases import LeaseAsk
from layout_tuner.results_db.allocations.workers import Beat
from layout_tuner.results_db.database.store_base import Clock
from layout_tuner.results_db.errors import ResultsDbError
from layout_tuner.results_db.models.tables import Attempt
from layout_tuner.results_db.records import LeaseRecord, TrialRecord, WorkerRecord
from layout_tuner.results_db.store import Store
from layout_tuner.results_db.trials.outcomes import Outcomes
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_presets import model_preset
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.search_spaces.throughput import Throughput
from layout_tuner.trainers.embedded import EMBEDDED_TRAINER
from tests.kit.layouts import EVERY_KNOB

Answer = TypeVar("Answer")

JOB_KNOBS = {
    name: {"kind": kind, "search": values, "values": values, "default": default}
    for name, kind, values, default in (
        ("compile", "switch", [False, True], False),
        ("bucket", "count", [4, 8], 8),
        ("attention", "word", ["own", "fused", "math"], "own"),
    )
}
"""The job knobs of a stored campaign's space; their words are not in the order of the alphabet."""

START = datetime(2026, 1, 1, 12, 0, tzinfo=UTC)


class TurnableClock:
    """A clock that stands until it is turned forward."""

    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> datetime:
        return self.now

    def forward(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)


class TimelyOutcomes(Outcomes):
    """Outcomes whose attempts began as long ago as their probes took."""

    def post_all(self, reports: Sequence[OutcomeReport]) -> list[OutcomeReply | ResultsDbError]:
        with self._db.write() as session:
            for report in reports:
                began = self._clock() - timedelta(seconds=report.outcome.duration_s)
                which = (Attempt.trial_id == report.trial_id) & (Attempt.attempt == report.attempt)
                is_open = Attempt.ending.is_distinct_from("reported")
                late = update(Attempt).where(which, is_open, Attempt.started_at > began)
                session.execute(late.values(started_at=began))
        return super().post_all(reports)


class TimelyStore(Store):
    """A store in which attempts began as long ago as their probes took, when outcomes come."""

    def __init__(self, url: str, *, clock: Clock | None = None) -> None:
        super().__init__(url, clock=clock)
        self.outcomes = TimelyOutcomes(self._db, self._clock, self.leaderboard.write_to_beat)


def make_spec(name: str = "first", *, cluster: str = "local-cpu", **changes: Any) -> dict[str, Any]:
    """A campaign's description as far as the store looks into it."""
    return {
        "name": name,
        "model": {"name": "tiny"},
        "cluster": {"name": cluster, "num_nodes": 1, "devices_per_node": 8},
        "objective": "tokens_per_s_per_device",
        "strategy": "random",
        "budget": {"trials": 10, "node_hours": None, "wall_time_s": None},
        **changes,
    }


def make_campaign(store: Store, name: str = "first", **changes: Any) -> int:
    return store.campaigns.create(make_spec(name, **changes), num_legal_layouts=100).id


def make_worker(
    store: Store,
    name: str = "w1",
    *,
    shares_nodes: bool = False,
    launcher: str = "",
    **changes: Any,
) -> WorkerRecord:
    """Registers a worker of one node with eight devices, with `changes` of what it says."""
    told: dict[str, Any] = {
        "host": "node-1",
        "cluster": "local-cpu",
        "num_nodes": 1,
        "devices_per_node": 8,
        "device": "CPU core",
        "versions": {"python": "3.11"},
        "allocation": AllocationBody(shares_nodes=shares_nodes, launcher=launcher),
    }
    return store.workers.register(WorkerCreate(name=name, **told | changes))


def make_breakdown(step_time_s: float) -> Breakdown:
    """Half of the time is compute."""
    return Breakdown(
        compute_s=0.5 * step_time_s,
        tp_s=0.2 * step_time_s,
        pp_s=0.1 * step_time_s,
        dp_s=0.1 * step_time_s,
        optimizer_s=0.0625 * step_time_s,
        unexplained_s=0.0375 * step_time_s,
    )


TINY = model_preset("tiny")

ODD = EVERY_KNOB
"""Differs from the plain layout in every knob."""


def make_iterations(
    step_time_s: float, *, timed: int = 10, warmup: int = 2, loss_off: float = 0.0
) -> tuple[Iteration, ...]:
    return tuple(
        Iteration(
            index=index,
            kind="warmup" if index < warmup else "timed",
            step_time_s=step_time_s,
            loss=6.0 - index / 10 + loss_off,
            grad_norm=1.5,
        )
        for index in range(warmup + timed)
    )


def make_measurement(
    layout: Layout | None = None,
    *,
    tokens_per_s: float = 1000.0,
    timed: int | None = None,
    model: ModelShape = TINY,
    loss_off: float = 0.0,
    **changes: Any,
) -> Measurement:
    """Figures that follow from each other, the layout and the model, unless `changes` has them."""
    is_short = changes.get("shortened", False)
    layout = layout or Layout()
    tokens = changes.get("tokens_per_step", layout.global_batch_size * model.seq_length)
    step_time_s = changes.get("step_time_s", tokens / tokens_per_s)
    iterations = changes.get("iterations") or make_iterations(
        step_time_s, timed=timed or (3 if is_short else 10), loss_off=loss_off
    )
    timed_s = [each.step_time_s for each in iterations if each.kind == "timed"]
    q25_s, median_s, q75_s = quartiles(timed_s)
    rate = tokens / median_s
    speed = Throughput(
        model=model,
        layout=layout,
        tokens_per_s=tokens_per_s if math.isclose(rate, tokens_per_s) else rate,
        peak_tflops_per_device=1.0,
    )
    peak_tflops = changes.get("peak_tflops_per_device", 8 * speed.hardware_tflops_per_device)
    if "mfu" in changes:
        peak_tflops = speed.model_tflops_per_device / changes.pop("mfu")
    speed = replace(speed, peak_tflops_per_device=peak_tflops)
    peak_bytes = changes.get("peak_memory_bytes", 5 << 30)
    rates = ("tokens_per_s", "tokens_per_s_per_device", "model_tflops_per_device")
    rates += ("hardware_tflops_per_device", "peak_tflops_per_device", "mfu", "hfu")
    values: dict[str, Any] = {
        "step_time_s": median_s,
        "step_time_q25_s": q25_s,
        "step_time_q75_s": q75_s,
        "tokens_per_step": tokens,
        **{name: getattr(speed, name) for name in rates},
        "peak_source": "measured matmul (fp32)",
        "peak_memory_bytes": peak_bytes,
        "peak_memory_bytes_by_stage": tuple(peak_bytes - stage for stage in range(layout.pp)),
        "memory_kind": "logical",
        "oversubscribed": False,
        "iterations": iterations,
        "iterations_asked": 10 if is_short else len(timed_s),
        "breakdown": make_breakdown(median_s),
        "warmup_settled": True,
        "skipped_steps": sum(each.grad_norm is None for each in iterations)
        * (changes.get("trainer", EMBEDDED_TRAINER) == EMBEDDED_TRAINER),
    }
    if changes.get("iterations_asked", 0) is None:
        del changes["iterations_asked"]
    return Measurement(**{**values, **changes})


def make_environment() -> Environment:
    return Environment(
        host="node-1",
        device="CPU core",
        backend="gloo",
        python_version="3.11.9",
        torch_version="2.13.0",
        numpy_version="2.4",
        git_revision="abc",
    )


def completed(
    layout: Layout | None = None, *, duration_s: float | None = None, **changes: Any
) -> Outcome:
    """By default it takes 4 s, or as long as its iterations."""
    measured = make_measurement(layout, **changes)
    iterations_s = sum(each.step_time_s for each in measured.iterations)
    return Outcome(
        state="completed",
        duration_s=max(4.0, iterations_s) if duration_s is None else duration_s,
        log_tail="the last line\n",
        measurement=measured,
        environment=make_environment(),
    )


def failed(reason: str = "crashed", *, duration_s: float = 4.0, **changes: str) -> Outcome:
    state = {"out_of_memory": "infeasible", "cancelled": "cancelled"}.get(reason, "failed")
    return Outcome(
        state=state,  # type: ignore[arg-type]
        reason=reason,  # type: ignore[arg-type]
        duration_s=duration_s,
        **{"message": f"rank 1 of 2: {reason}", "node": "node-1", "log_tail": "Traceback ..."}
        | changes,
    )


def take_leases(store: Store, worker_id: str, max_trials: int, **asked: Any) -> list[LeaseRecord]:
    """Leases trials to one worker, with the fields of `LeaseRequest`; raises a refusal."""
    request = LeaseRequest(max_trials=max_trials, **asked)
    return _only(store.leases.lease_many([LeaseAsk(worker_id=worker_id, request=request)]))


def send_beats(
    store: Store, worker_id: str, beats: Sequence[BeatBody], *, status: StatusBody | None = None
) -> HeartbeatReply:
    """Takes the heartbeat of one worker; raises a refusal."""
    heartbeat = HeartbeatBody(trials=list(beats), status=status)
    return _only(store.leases.take_beats([Beat(worker_id=worker_id, heartbeat=heartbeat)]))


def post_outcome(
    store: Store, trial_id: int, attempt: int, outcome: Outcome, **said: Any
) -> OutcomeReply:
    """Posts the outcome of one attempt in the name of its session; raises a refusal."""
    leased_by = select(Attempt.worker_id).where(
        Attempt.trial_id == trial_id, Attempt.attempt == attempt
    )
    with store._db.read() as session:
        sender = session.scalar(leased_by) or "nobody"
    report = OutcomeReport(
        trial_id=trial_id, worker_id=sender, attempt=attempt, outcome=outcome, **said
    )
    return _only(store.outcomes.post_all([report]))


def _only(answers: Sequence[Answer | ResultsDbError]) -> Answer:
    (answer,) = answers
    if isinstance(answer, ResultsDbError):
        raise answer
    return answer


def front(store: Store, campaign: int) -> frozenset[int]:
    """The trials whose layouts are on the campaign's Pareto front."""
    return frozenset(store.leaderboard.page_of_layouts(campaign, limit=0).front)


def lease_one(store: Store, worker_id: str) -> LeaseRecord:
    (lease,) = take_leases(store, worker_id, 1)
    return lease


def run_trial(
    store: Store,
    campaign: int,
    layout: Layout | None = None,
    outcome: Outcome | None = None,
    *,
    worker: str | None = None,
    **changes: Any,
) -> int:
    """Runs a new trial of a layout, a repeat where it was tried before; returns its id.

    Args:
        store: the store.
        campaign: the campaign.
        layout: None: the plain one.
        outcome: None: it completes, with `changes` of the measurement.
        worker: the session that runs it; None: the newest live one, or a new one.
    """
    layout = layout or Layout()
    earlier = [trial for trial in store.trials.find(campaign) if trial.layout == layout]
    trial = store.trials.repeat(earlier[0].id) if earlier else store.trials.add(campaign, layout)
    lease = lease_one(store, worker or (store.workers.find() or [make_worker(store)])[0].id)
    assert lease.trial_id == trial.id
    post_outcome(store, trial.id, lease.attempt, outcome or completed(layout, **changes))
    return trial.id


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """Makes the calls at the same moment, each in a thread of its own; their results in order."""
    barrier = Barrier(len(calls))

    def make(call: Callable[[], Any]) -> Any:
        barrier.wait(10)
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(make, calls))


def ranked_trials(store: Store, campaign: int, objective: str, **how: Any) -> list[TrialRecord]:
    """The first trial of each layout, in the order of the leaderboard."""
    return [each.trial for each in store.leaderboard.ranked_layouts(campaign, objective, **how)]
