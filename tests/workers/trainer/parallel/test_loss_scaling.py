"""fp16: the scale of the loss, and steps that are skipped because gradients overflowed."""

from __future__ import annotations

import io
import math
from functools import partial
from typing import Any

import pytest
import torch

from layout_tuner.workers.trainer.errors import LossDivergedError
from layout_tuner.workers.trainer.job.progress import print_event
from layout_tuner.workers.trainer.parallel import optimizer
from layout_tuner.workers.trainer.parallel.loss_scaling import LossScaler
from layout_tuner.workers.trainer.probe.measured_memory import rehearse
from layout_tuner.workers.trainer.training import Training
from tests.workers.trainer.cases import (
    CUT,
    DP,
    PP,
    REPLICAS,
    TP,
    ZERO,
    ZERO_2,
    ZERO_3,
    make_layout,
    make_shape,
    make_training,
    on_layout,
    over_axes,
)
from tests.workers.trainer.probes import make_request, measured, probe
from tests.workers.trainer.ranks import RanksFailedError

pytestmark = pytest.mark.ranks

TOO_LARGE = 2.0**60


def test_an_overflow_halves_the_scale_until_it_is_a_divergence() -> None:
    scaler = LossScaler(scale=6.0, good_steps=7)
    assert scaler.update(math.inf)
    assert (scaler.scale, scaler.good_steps) == (3.0, 0)
    assert scaler.update(math.nan)
    assert scaler.scale == 1.5
    assert not scaler.update(3.0)
    assert (scaler.scale, scaler.good_steps) == (1.5, 1)
    assert scaler.update(math.inf)
    assert scaler.scale == 1.0
    with pytest.raises(LossDivergedError, match="inf at loss scale 1, the smallest"):
        scaler.update(math.inf)


def test_good_steps_in_a_row_double_the_scale() -> None:
    scaler = LossScaler(scale=8.0, growth_interval=3)
    scales = []
    for norm in (1.0, 1.0, math.inf, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0):
        scaler.update(norm)
        scales.append(scaler.scale)
    assert scales == [8.0, 8.0, 4.0, 4.0, 4.0, 8.0, 8.0, 8.0, 16.0]


def state(training: Training) -> list[torch.Tensor]:
    return [t.clone() for t in (training.flat.weights, *training.optimizer.state_tensors)]


@over_axes({}, TP, PP, DP, ZERO, ZERO_3, CUT, slow=[REPLICAS, TP | PP | ZERO, PP | ZERO_2])
def test_an_overflow_on_one_rank_changes_nothing_but_the_scale_on_any(axes: dict[str, Any]) -> None:
    layout = make_layout(precision="fp16", **axes)

    def work(skipping: Training) -> Any:
        fresh, run = make_training(make_shape(), mesh=skipping.mesh), skipping.pipeline.run
        scaler = skipping.optimizer.scaler
        for training in (skipping, fresh):
            training.step(training.batch(0))
        before = state(skipping)
        if skipping.mesh.rank == layout.num_devices - 1:
            skipping.pipeline.run = lambda batch, **_: run(batch, gradient_scale=TOO_LARGE)
        stats = skipping.step(skipping.batch(1))
        assert not math.isfinite(stats.grad_norm)
        assert stats.is_skipped
        assert (stats.loss_scale, scaler.scale) == (2.0**16, 2.0**15)
        assert all(torch.equal(a, b) for a, b in zip(before, state(skipping), strict=True))
        skipping.pipeline.run, scaler.scale = run, 2.0**16
        assert skipping.step(skipping.batch(2)) == fresh.step(fresh.batch(2))
        assert all(torch.equal(a, b) for a, b in zip(state(skipping), state(fresh), strict=True))
        return stats.loss

    assert len(set(on_layout(layout, work))) == 1


def test_a_rehearsal_leaves_no_trace_in_the_scale() -> None:
    def work(training: Training) -> Any:
        rehearse(training, limit_bytes=None)
        assert training.optimizer.scaler == LossScaler()
        training.optimizer.scaler.scale = TOO_LARGE  # so that the rehearsal overflows
        rehearse(training, limit_bytes=None)
        return training.optimizer.scaler

    assert on_layout(make_layout(precision="fp16"), work) == [LossScaler()]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_only_fp16_scales_the_loss(precision: str) -> None:
    training = make_training(make_shape(), make_layout(precision=precision))
    assert training.optimizer.scaler is None
    stats = training.step(training.batch(0))
    assert (stats.loss_scale, stats.is_skipped) == (1.0, False)


def test_a_probe_counts_the_steps_that_were_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer, "LossScaler", partial(LossScaler, scale=2.0**25))
    layout = make_layout(precision="fp16", dp=2, zero_stage=1)
    found = measured(make_request(layout=layout, iterations=12))
    norms = [iteration.grad_norm for iteration in found.iterations]
    skipped = [norm is None for norm in norms]
    assert found.skipped_steps == sum(skipped) > 1
    assert skipped == sorted(skipped, reverse=True), "the scale settles"
    assert all(math.isfinite(iteration.loss) for iteration in found.iterations)


def test_a_probe_that_skipped_all_timed_steps_diverged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer, "LossScaler", partial(LossScaler, scale=TOO_LARGE))
    sentence = "LossDivergedError: the gradients of all 3 timed steps overflowed in fp16"
    with pytest.raises(RanksFailedError, match=sentence):
        probe(make_request(layout=make_layout(precision="fp16")))


def test_the_log_of_a_job_says_that_a_step_was_skipped() -> None:
    event = {"event": "step", "index": 3, "loss": 4.0, "tokens_per_s": 100.0, "mfu": 0.1}
    stream = io.StringIO()
    print_event({**event, "grad_norm": None, "loss_scale": 65536.0}, stream=stream)
    assert "loss 4.0000  skipped: gradients overflowed at loss scale 65536  " in stream.getvalue()
