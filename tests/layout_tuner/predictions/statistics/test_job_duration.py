"""The time of a training job against Daly's published figures, and by hand."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from layout_tuner.errors import TrainingJobInvalidError
from layout_tuner.predictions.statistics.job_duration import (
    StepInterval,
    TrainingJob,
    checkpoint_interval_s,
    expected_slowdown,
    read_tokens,
)

STEP = StepInterval(expected_s=2.0, low_s=1.5, high_s=3.0)


def test_the_interval_between_checkpoints_is_the_shortest_job_s_that_daly_publishes() -> None:
    # Figures 3 to 5 of the paper: checkpoints of 5 min, failures every 24 h, 6 h and 15 min.
    for mtbf_min, optimum_min in ((24 * 60, 117), (6 * 60, 57), (15, 9.1)):
        interval_s = checkpoint_interval_s(mtbf_min * 60.0, 300.0)
        assert interval_s / 60 == pytest.approx(optimum_min, rel=0.006)
    mtbf_s, checkpoint_s, restart_s = 4 * 3600.0, 120.0, 600.0
    best_s = checkpoint_interval_s(mtbf_s, checkpoint_s)
    best, shorter, longer = (
        expected_slowdown(times * best_s, mtbf_s, checkpoint_s, restart_s)
        for times in (1.0, 0.8, 1.25)
    )
    assert best < min(shorter, longer)


def test_the_slowdown_is_that_of_a_job_whose_nodes_fail_at_random() -> None:
    mtbf_s, checkpoint_s, restart_s, interval_s = 1000.0, 20.0, 50.0, 180.0
    rng = random.Random(0)
    passed, spent_s = 0, 0.0
    while passed < 20_000:
        failed_after_s = rng.expovariate(1 / mtbf_s)
        if failed_after_s >= interval_s + checkpoint_s:
            passed += 1
            spent_s += interval_s + checkpoint_s
            continue
        spent_s += failed_after_s
        while (again_after_s := rng.expovariate(1 / mtbf_s)) < restart_s:
            spent_s += again_after_s
        spent_s += restart_s
    simulated = spent_s / (passed * interval_s)

    assert expected_slowdown(interval_s, mtbf_s, checkpoint_s, restart_s) == pytest.approx(
        simulated, rel=0.01
    )


def test_a_job_by_hand() -> None:
    job = TrainingJob(tokens=10**9, mtbf_hours=800.0, checkpoint_s=50.0, restart_s=100.0)
    duration = job.duration(STEP, tokens_per_step=10**6, num_nodes=8)

    # 1000 steps of 2 s, a failure every 100 h: sqrt(2 * 50 * 360000) = 6000 s between checkpoints,
    # less the checkpoint, and Daly's terms (1/3 * sqrt(50 / 720000) + 1/9 * 50 / 720000) * 6000.
    assert duration.num_steps == 1000
    assert duration.mtbf_hours == 100.0
    assert duration.checkpoint_interval_s == pytest.approx(6000 - 50 + 16.667 + 0.0463, abs=1e-3)
    # To first order: a checkpoint an interval, and half an interval and a restart a failure.
    lost = 50 / 5966.7 + (5966.7 / 2 + 50 + 100) / 360_000
    assert duration.lost_share == pytest.approx(lost / (1 + lost), rel=0.02)
    assert duration.days == pytest.approx(2000 / (1 - duration.lost_share) / 86400)
    assert duration.days_low / duration.days == pytest.approx(0.75)
    assert duration.days_high / duration.days == pytest.approx(1.5)
    assert duration.node_hours == pytest.approx(duration.days * 24 * 8)


def test_a_job_that_never_fails_takes_its_steps_alone() -> None:
    safe = TrainingJob(tokens=1001, mtbf_hours=1e12, checkpoint_s=1e-3)
    duration = safe.duration(STEP, tokens_per_step=10, num_nodes=1)
    assert duration.num_steps == 101, "the last step is not full"
    assert duration.days * 86400 == pytest.approx(202, rel=1e-6), "only the steps count"


def test_a_job_that_cannot_restart_between_failures_says_so() -> None:
    job = TrainingJob(tokens=10**9, mtbf_hours=1.0, restart_s=600.0)
    with pytest.raises(TrainingJobInvalidError, match=r"1024 nodes .* every 3\.52 s together"):
        job.duration(STEP, tokens_per_step=10**6, num_nodes=1024)


def test_tokens_are_read_with_their_unit() -> None:
    texts = {"1.4T": 14 * 10**11, "300b": 300 * 10**9, "2e9": 2 * 10**9, " 7 k ": 7000}
    assert {text: read_tokens(text) for text in texts} == texts
    for text in ("", "many", "-3B", "1.4 TB", "nan", "inf", "1e9999"):
        with pytest.raises(TrainingJobInvalidError, match=r"tokens: .* such as 1\.4T"):
            read_tokens(text)


def test_impossible_jobs_are_refused_by_field() -> None:
    jobs: list[tuple[str, Any]] = [("tokens", 0), ("num_nodes", 0), ("mtbf_hours", math.inf)]
    for name, value in [*jobs, ("checkpoint_s", 0.0), ("restart_s", -1.0)]:
        with pytest.raises(TrainingJobInvalidError) as refused:
            TrainingJob(**{"tokens": 10**9, name: value})
        assert refused.value.field == name.removeprefix("num_")
    assert TrainingJob.read(tokens=None) is None
    with pytest.raises(TrainingJobInvalidError, match="nodes describe a training job"):
        TrainingJob.read(tokens=None, nodes=4)
