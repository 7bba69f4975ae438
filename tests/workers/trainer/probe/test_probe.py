"""The probe: what it reports, what it measures, and how it ends badly."""

from __future__ import annotations

import dataclasses
import math
import resource
import subprocess
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from layout_tuner.predictions.statistics.step_times import (
    MAX_EXTRA_WARMUP,
    MIN_WARMUP,
    has_settled,
    is_warm,
    quartiles,
)
from layout_tuner.protocol.measurement import Measurement
from layout_tuner.protocol.measurement_checks import refuse_contradictions
from layout_tuner.protocol.outcome import ProbeRequest
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.workers.trainer.batches import Batch
from layout_tuner.workers.trainer.probe.exception_reasons import classify
from layout_tuner.workers.trainer.probe.probe import RankResult, run_probe
from layout_tuner.workers.trainer.probe.timing import TimedStep, timed_step
from layout_tuner.workers.trainer.revision import GIT_REVISION, git_revision
from layout_tuner.workers.trainer.training import StepStats, Training
from tests.kit.python_process import printed_by
from tests.workers.trainer.cases import (
    CUT,
    PP,
    TP,
    ZERO_3,
    in_turn,
    make_layout,
    make_shape,
    make_training,
    on_layout,
    over_axes,
    train,
)
from tests.workers.trainer.probes import FakeClock, make_request, measured, probe
from tests.workers.trainer.ranks import RanksFailedError, make_context, run_ranks

pytestmark = pytest.mark.ranks


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProbedLayout:
    """A probe of some layout, by rank what its processes returned."""

    request: ProbeRequest
    results: list[tuple[RankResult | None, list[dict[str, Any]]]]

    @property
    def measurement(self) -> Measurement:
        return self.results[0][0].measurement

    @property
    def warmups(self) -> int:
        return len(self.measurement.iterations) - 3


@pytest.fixture(scope="module")
def probe_of() -> Callable[[tuple[tuple[str, int], ...]], ProbedLayout]:
    """Probes each layout once."""

    @cache
    def probe_it(axes: tuple[tuple[str, int], ...]) -> ProbedLayout:
        request = make_request(layout=make_layout(**dict(axes)))
        return ProbedLayout(request=request, results=probe(request))

    return probe_it


@pytest.fixture
def probed(axes: dict[str, int], probe_of: Callable[..., ProbedLayout]) -> ProbedLayout:
    return probe_of(tuple(axes.items()))


def over_layouts(test: Any) -> Any:
    return pytest.mark.sampled(2)(over_axes({}, PP, TP | PP, ZERO_3)(test))


@over_layouts
def test_rank_0_alone_reports_a_probe(axes: dict[str, int], probed: ProbedLayout) -> None:
    (_, events), *others = probed.results
    assert others == [(None, [])] * len(others)
    iterations = [dataclasses.asdict(each) for each in probed.measurement.iterations]
    assert events == [{"event": "iteration", **each} for each in iterations]


@over_layouts
def test_a_probe_warms_up_and_times_three_steps(axes: dict[str, int], probed: ProbedLayout) -> None:
    iterations, warmups = probed.measurement.iterations, probed.warmups
    assert MIN_WARMUP <= warmups <= MIN_WARMUP + MAX_EXTRA_WARMUP
    assert [i.index for i in iterations] == list(range(warmups + 3))
    assert [i.kind for i in iterations] == ["warmup"] * warmups + ["timed"] * 3
    settled = has_settled([i.step_time_s for i in iterations[:warmups]])
    assert probed.measurement.warmup_settled == settled


@over_layouts
def test_a_probe_measures_what_the_same_training_does(
    axes: dict[str, int], probed: ProbedLayout
) -> None:
    request, iterations = probed.request, probed.measurement.iterations
    run = train(request.model, request.layout, steps=probed.warmups + 3)
    assert [i.loss for i in iterations] == run.losses
    assert [i.grad_norm for i in iterations] == run.grad_norms


@over_layouts
def test_the_step_time_of_a_probe_is_the_median(axes: dict[str, int], probed: ProbedLayout) -> None:
    m = probed.measurement
    timed = sorted(i.step_time_s for i in m.iterations if i.kind == "timed")
    assert m.step_time_s == timed[1]
    assert m.step_time_q25_s == pytest.approx((timed[0] + timed[1]) / 2)
    assert m.step_time_q75_s == pytest.approx((timed[1] + timed[2]) / 2)


@over_layouts
def test_the_rates_of_a_probe_follow_from_its_step_time(
    axes: dict[str, int], probed: ProbedLayout
) -> None:
    m, model = probed.measurement, probed.request.model
    devices = probed.request.layout.num_devices
    assert m.tokens_per_step == 8 * model.seq_length
    assert m.tokens_per_s == pytest.approx(m.tokens_per_step / m.step_time_s)
    assert m.tokens_per_s_per_device == pytest.approx(m.tokens_per_s / devices)
    flops = m.tokens_per_s * model.model_flops_per_token / devices
    assert m.model_tflops_per_device == pytest.approx(flops / 1e12)
    assert m.mfu == pytest.approx(m.model_tflops_per_device / 0.1)
    assert m.peak_source == "a test's"


@over_layouts
def test_the_peak_of_a_probe_is_that_of_its_fullest_stage(
    axes: dict[str, int], probed: ProbedLayout
) -> None:
    m = probed.measurement
    assert m.memory_kind == "logical"
    assert len(m.peak_memory_bytes_by_stage) == probed.request.layout.pp
    assert m.peak_memory_bytes == max(m.peak_memory_bytes_by_stage) > 0
    assert m.peak_reserved_bytes_by_stage == ()


@over_layouts
def test_a_probe_names_its_software(axes: dict[str, int], probed: ProbedLayout) -> None:
    environment = probed.results[0][0].environment
    assert (environment.backend, environment.torch_version) == ("gloo", torch.__version__)


@pytest.mark.parametrize(
    ("step_times_s", "settled"),
    [
        *(([1.0, 1.0], True), ([1.0, 1.09], True), ([1.09, 1.0], True)),
        *(([9.0, 2.0, 1.0, 1.05], True), ([], False), ([1.0], False), ([1.0, 1.11], False)),
        *(([1.11, 1.0], False), ([9.0, 2.0], False), ([1.0, 1.0, 2.0], False)),
    ],
    ids=str,
)
def test_steps_have_settled_when_two_in_a_row_take_the_same_time(
    step_times_s: list[float], settled: bool
) -> None:
    assert has_settled(step_times_s) is settled


def test_warm_up_lasts_as_long_as_it_was_asked_for_and_until_it_settles() -> None:
    assert not is_warm([1.0, 1.0], at_least=3)
    assert is_warm([1.0, 1.0, 1.0], at_least=3)
    doubling = [2.0**step for step in range(3 + MAX_EXTRA_WARMUP)]
    assert not is_warm(doubling[:-1], at_least=3)
    assert is_warm(doubling, at_least=3), "it ends, settled or not"


def test_warm_up_goes_on_while_step_times_have_not_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    def halving(training: Training, index: int) -> TimedStep:
        return dataclasses.replace(timed_step(training, index), step_time_s=max(0.5**index, 0.01))

    monkeypatch.setattr("layout_tuner.workers.trainer.probe.probe.timed_step", halving)
    request = make_request(layout=make_layout(dp=2), iterations=2)
    m = measured(request)
    assert [i.step_time_s for i in m.iterations][5:] == [0.5**5, 0.5**6, 0.01, 0.01, 0.01, 0.01]
    assert [i.kind for i in m.iterations] == ["warmup"] * 9 + ["timed"] * 2
    assert m.step_time_s == 0.01
    run = train(request.model, request.layout, steps=11)
    assert [i.loss for i in m.iterations] == run.losses, "extra iterations are the same training"


def test_full_recomputation_counts_as_hardware_work_only() -> None:
    m = measured(make_request(layout=make_layout(recompute="full")))
    assert m.hardware_tflops_per_device > 1.2 * m.model_tflops_per_device
    assert m.hfu == pytest.approx(m.mfu * m.hardware_tflops_per_device / m.model_tflops_per_device)
    plain = measured(make_request())
    assert plain.hardware_tflops_per_device == plain.model_tflops_per_device
    assert plain.expert_load is None
    assert not plain.oversubscribed


def test_a_context_without_a_peak_has_it_measured_and_an_oversubscribed_one_is_marked() -> None:
    context = {"peak_tflops_per_device": None, "peak_source": "", "oversubscribed": True}
    m = measured(make_request(), **context)
    assert m.peak_source == "measured matmul (fp32)"
    assert 0 < m.mfu < 1, "the whole training is slower than its products alone"
    assert m.oversubscribed


@pytest.mark.parametrize("values", [[3.0], [1.0, 2.0], [5.0, 1.0, 2.0], [4.0, 1.0, 3.0, 2.0, 9.0]])
def test_quartiles_are_numpys(values: list[float]) -> None:
    assert quartiles(values) == pytest.approx(np.quantile(values, (0.25, 0.5, 0.75)))


def test_a_model_over_the_limit_is_refused_before_it_is_built() -> None:
    model = make_shape(hidden_size=4096, ffn_hidden_size=16384, num_layers=64)
    why = r"MemoryLimitExceededError: rank 0 needs at least \d+ GiB for weights, gradients and optimizer"
    with pytest.raises(RanksFailedError, match=why):
        probe(make_request(model=model, memory_limit_bytes=1 << 30))


def test_a_jump_far_over_the_limit_is_refused_by_the_allocator() -> None:
    """One operator that asks for more than limit and slack: the machine never has to give it."""
    request = make_request(
        model=make_shape(vocab_size=1 << 16, seq_length=256),
        layout=Layout(micro_batch_size=64, num_microbatches=1),
        memory_limit_bytes=256 << 20,
    )

    def work(rank: int, store: Any) -> tuple[str, str, int]:
        with pytest.raises(RuntimeError) as refused:
            run_probe(request, make_context(rank, 1, store), lambda event: None)
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return classify(refused.value), str(refused.value), used

    reason, message, used_bytes = run_ranks(1, work, own_group=True)[0]
    assert reason == "out_of_memory"
    assert "DefaultCPUAllocator" in message
    logits_bytes = 64 * 256 * (1 << 16) * 4
    assert used_bytes < logits_bytes / 2


def test_what_the_ranks_cannot_run_says_why() -> None:
    unsupported = make_request(layout=make_layout(pp=3, sequence_parallel=True))
    with pytest.raises(RanksFailedError, match=r"LayoutUnsupportedError: num_layers=2 .*pp=3"):
        probe(unsupported)
    with pytest.raises(RanksFailedError, match="1 ranks were started for a layout of tp=2"):
        probe(make_request(layout=make_layout(tp=2)), world_size=1)


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="there is a device")
def test_a_rank_for_a_device_that_is_not_there_says_so() -> None:
    sentence = r"RankContextInvalidError: rank 0 is to run on cuda and torch .* sees no device here"
    with pytest.raises(RanksFailedError, match=sentence):
        probe(make_request(), device="cuda")


def test_a_loss_that_is_not_finite_ends_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Training.step

    def poisoned(self: Training, batch: Any, **kwargs: Any) -> Any:
        stats = step(self, batch, **kwargs)
        if not kwargs and stats.loss < 4.15:  # the rehearsal passes a learning rate
            self.flat.weights.fill_(math.nan)
        return stats

    monkeypatch.setattr(Training, "step", poisoned)
    with pytest.raises(RanksFailedError, match="LossDivergedError: loss is nan at iteration 2"):
        probe(make_request())


@pytest.mark.sampled(3)
@over_axes(PP, CUT, {"dp": 2, "ep": 2, "recompute": "full"})
def test_a_probe_of_experts_balances_them_or_measures_how_uneven_they_are(
    axes: dict[str, Any],
) -> None:
    shape = make_shape("moe", num_dense_layers=1)  # with pp=2 the first stage has no experts
    found = {
        balanced: measured(
            make_request(model=shape, layout=make_layout(**axes), balanced_routing=balanced)
        )
        for balanced in (True, False)
    }
    assert found[True].balanced_routing is True
    assert found[True].expert_load == 1.0
    assert found[False].balanced_routing is False
    assert 1.05 < found[False].expert_load < 2.0
    assert found[True].iterations[0].loss != found[False].iterations[0].loss


@over_axes({"dp": 2, "etp": 2}, {"dp": 2, "ep": 2, "zero_stage": 3})
def test_a_measurement_of_divided_experts_contradicts_no_bound(axes: dict[str, Any]) -> None:
    """Nearly all that a rank holds is experts: with few tokens, less than their share of ranks."""
    shape = make_shape("moe", num_experts=16, moe_ffn_hidden_size=256, ffn_hidden_size=256)
    layout = make_layout(**axes | {"micro_batch_size": 1, "num_microbatches": 1})
    request = make_request(model=shape, layout=layout, balanced_routing=True)
    refuse_contradictions(
        measured(request), request, device_memory_bytes=1 << 30, may_be_shortened=False
    )


@in_turn(
    ("recompute", "family"),
    ["none", "full", "full 1", "core_attention+mlp 1"],
    ["gpt", "llama", "moe"],
)
def test_the_formulas_count_the_operations_of_the_model(recompute: str, family: str) -> None:
    mode, _, layers = recompute.partition(" ")
    layout = make_layout(recompute=mode, recompute_layers=layers or "all")
    # torch's operator of attention with a window computes what the window hides, too.
    whole = {"attention_window": None, "full_attention_every": None, "num_dense_layers": 1}
    shape = make_shape(family, **whole if family == "moe" else {})
    aten = torch.ops.aten
    # torch's counter counts attention on GPUs only, and omits oneDNN's products and in-place
    # products.
    custom = {
        aten.addmm_: lambda _, a, b, **__: 2 * a[0] * a[1] * b[1],
        aten.baddbmm_: lambda _, a, b, **__: 2 * math.prod(a) * b[2],
        torch.ops.mkldnn._linear_pointwise: lambda x, w, *_, **__: 2 * math.prod(x) * w[0],
        aten._grouped_mm: lambda x, w, *_, **__: 2 * math.prod(x) * w[-1],
        aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(
            q, repeated(q, k), repeated(q, v)
        ),
        aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda g, q, k, v, *_, **__: (
            sdpa_backward_flop_count(g, q, repeated(q, k), repeated(q, v))
        ),
    }

    def work(rank: int) -> int:
        training = make_training(shape, layout)
        batch = training.batch(0)
        with FlopCounterMode(display=False, custom_mapping=custom) as counter:
            training.step(batch)
        return counter.get_total_flops()

    tokens = 8 * shape.seq_length
    again = layout.recomputing_layers(shape.num_layers)
    formula = shape.hardware_flops_per_token(mode, again) * tokens
    if "mlp" in mode:  # this trainer does not repeat the product whose output no gradient needs
        formula -= 2 * shape.hidden_size * shape.ffn_hidden_size * tokens
    # Flash attention's backward pass computes its scores again: 5 products instead of 4.
    attention = 2 * shape.num_layers * shape.seq_length * shape.query_size * tokens
    assert run_ranks(1, work)[0] == pytest.approx(formula + attention, rel=0.01)


def repeated(q: tuple[int, ...], kv: tuple[int, ...]) -> tuple[int, ...]:
    return (kv[0], q[1], *kv[2:])


PROBE_ALONE = """
import os, sys, torch
from torch.distributed import HashStore
import layout_tuner.workers.rank_jobs.rank, layout_tuner.workers.trainer.train, layout_tuner.workers.trainer.probe.exception_reasons
import layout_tuner.workers.trainer.probe.probe as probe
from layout_tuner.protocol.outcome import ProbeRequest
from tests.workers.trainer.cases import make_layout, make_shape
from tests.workers.trainer.ranks import make_context
assert len(os.listdir("/proc/self/task")) == 1, "a thread was started"
assert "torch.distributed.checkpoint" not in sys.modules, "nothing is saved"
torch.set_num_threads(1)
request = ProbeRequest(model=make_shape(), layout=make_layout(recompute="full"), iterations=1)
context = make_context(0, 1, HashStore(), peak_tflops_per_device=None, peak_source="")
before = set(sys.modules)
assert probe.run_probe(request, context, lambda event: None) is not None
sys.stdout.write(str(len(set(sys.modules) - before)))
sys.stdout.flush()
os._exit(0)
"""


def test_a_zygote_has_no_thread_and_all_that_a_probe_imports() -> None:
    """A zygote forks ranks: a thread would be lost, with the locks it holds.

    A module that torch loads lazily would be loaded by every rank: sympy 0.3 s, dynamo 2 s.
    """
    environment = {"OMP_NUM_THREADS": "4", "OPENBLAS_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    assert int(printed_by(PROBE_ALONE, **environment)) < 5


def test_making_tokens_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, batch = FakeClock(monkeypatch), Training.batch

    def slow(self: Training, index: int) -> Batch:
        clock.now_s += 1000.0
        return batch(self, index)

    monkeypatch.setattr(Training, "batch", slow)
    assert {i.step_time_s for i in measured(make_request()).iterations} == {7.0}


def test_the_revision_is_that_of_the_checkout_and_known_before_a_rank_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 starts no process while its peers wait for it."""
    assert git_revision(tmp_path) == "unknown"
    git = ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@localhost"]
    subprocess.run([*git, "init", "-q"], check=True)
    assert git_revision(tmp_path) == "unknown"
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "first"], check=True)
    told = subprocess.run([*git, "log", "--format=%H"], check=True, capture_output=True, text=True)
    assert git_revision(tmp_path) == told.stdout.strip()

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    result = probe(make_request())[0][0]
    assert result.environment.git_revision == GIT_REVISION


def test_a_step_lasts_until_the_slowest_rank_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank is late in every step; every rank's figure says so, and it is the same one."""
    step = Training.step

    def late(self: Training, batch: Batch) -> StepStats:
        time.sleep(0.05 * self.mesh.rank)
        return step(self, batch)

    def work(training: Training) -> list[float]:
        return [timed_step(training, i).step_time_s for i in range(5)]

    monkeypatch.setattr(Training, "step", late)
    first, second = on_layout(make_layout(dp=2), work)
    assert min(first) > 0.05
    assert first == second
