"""What the tests of the database build by the dozen."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from results_db.records import LeaseRecord, TrialRecord, WorkerRecord
from results_db.store import Store
from search_spaces.protocol.outcome import Breakdown, Environment, Iteration, Measurement, Outcome
from search_spaces.protocol.worker_messages import AllocationBody, WorkerCreate
from search_spaces.spec.layout import Layout

START = datetime(2026, 1, 1, 12, 0, tzinfo=UTC)


class TurnableClock:
    """A clock that stands until it is turned forward."""

    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> datetime:
        return self.now

    def forward(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)


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


def make_campaign(store: Store, name: str = "first", *, cluster: str = "local-cpu") -> int:
    return store.create_campaign(make_spec(name, cluster=cluster), num_legal_layouts=100).id


def make_worker(
    store: Store,
    name: str = "w1",
    *,
    cluster: str = "local-cpu",
    num_nodes: int = 1,
    devices_per_node: int = 8,
    shares_nodes: bool = False,
) -> WorkerRecord:
    return store.register_worker(
        WorkerCreate(
            name=name,
            host="node-1",
            cluster=cluster,
            num_nodes=num_nodes,
            devices_per_node=devices_per_node,
            device="CPU core",
            versions={"python": "3.11"},
            allocation=AllocationBody(shares_nodes=shares_nodes),
        )
    )


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


def make_measurement(
    layout: Layout | None = None, *, tokens_per_s: float = 1000.0, **changes: Any
) -> Measurement:
    layout = layout or Layout()
    step_time_s = 512 / tokens_per_s
    values: dict[str, Any] = {
        "step_time_s": step_time_s,
        "step_time_q25_s": 0.8 * step_time_s,
        "step_time_q75_s": 1.2 * step_time_s,
        "tokens_per_step": 512,
        "tokens_per_s": tokens_per_s,
        "tokens_per_s_per_device": tokens_per_s / layout.num_devices,
        "model_tflops_per_device": tokens_per_s / 1000,
        "hardware_tflops_per_device": tokens_per_s / 900,
        "peak_tflops_per_device": 10.0,
        "peak_source": "measured matmul (fp32)",
        "mfu": 0.1,
        "hfu": 0.12,
        "peak_memory_bytes": 5 << 30,
        "peak_memory_bytes_by_stage": tuple((5 << 30) - stage for stage in range(layout.pp)),
        "memory_kind": "logical",
        "oversubscribed": False,
        "iterations": tuple(
            Iteration(
                index=index,
                kind="warmup" if index < 2 else "timed",
                step_time_s=step_time_s,
                loss=6.0 - index / 10,
                grad_norm=1.5,
            )
            for index in range(5)
        ),
        "breakdown": make_breakdown(changes.get("step_time_s", step_time_s)),
        "warmup_settled": True,
    }
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


def completed(layout: Layout | None = None, *, duration_s: float = 4.0, **changes: Any) -> Outcome:
    return Outcome(
        state="completed",
        duration_s=duration_s,
        log_tail="the last line\n",
        measurement=make_measurement(layout, **changes),
        environment=make_environment(),
    )


def failed(reason: str = "crashed", *, duration_s: float = 4.0) -> Outcome:
    state = {"out_of_memory": "infeasible", "cancelled": "cancelled"}.get(reason, "failed")
    return Outcome(
        state=state,  # type: ignore[arg-type]
        reason=reason,  # type: ignore[arg-type]
        message=f"rank 1 of 2: {reason}",
        node="node-1",
        log_tail="Traceback ...",
        duration_s=duration_s,
    )


def lease_one(store: Store, worker_id: str) -> LeaseRecord:
    (lease,) = store.lease(worker_id, 1)
    return lease


def ranked_trials(store: Store, campaign: int, objective: str, **how: Any) -> list[TrialRecord]:
    """The first trial of each layout, in the order of the leaderboard."""
    return [each.trial for each in store.ranked_layouts(campaign, objective, **how)]
