"""The knobs of the embedded trainer: each does what it says, and changes at most roundings."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from layout_tuner.protocol.outcome import ProbeRequest
from layout_tuner.search_spaces.clusters.cluster import detect_local_cpu
from layout_tuner.search_spaces.jobs.condition import Facts
from layout_tuner.search_spaces.layouts.job_settings import JobSettings
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.trainers.embedded import EMBEDDED
from layout_tuner.workers.trainer import open_training as opening
from layout_tuner.workers.trainer.errors import TrainerOptionInvalidError, TrainJobInvalidError
from layout_tuner.workers.trainer.job.job import TrainJob
from layout_tuner.workers.trainer.model import matrix_products, tensor_parallel
from layout_tuner.workers.trainer.open_training import TrainingSettings, open_training
from layout_tuner.workers.trainer.options_in_effect import options_in_effect
from layout_tuner.workers.trainer.parallel.flat_buffers import BUCKET_ELEMENTS
from layout_tuner.workers.trainer.probe.exception_reasons import classify
from layout_tuner.workers.trainer.product_layouts import Product, to_rows
from layout_tuner.workers.trainer.trainer_options import TrainerOptions
from layout_tuner.workers.trainer.training import Training
from tests.workers.trainer.cases import (
    ADAMW,
    DP,
    TP,
    ZERO,
    ZERO_2,
    ZERO_3,
    assert_bitwise_equal,
    assert_same_training,
    excess_of_steps,
    make_layout,
    make_shape,
    on_layout,
    train,
)
from tests.workers.trainer.parallel_layers import sent_in
from tests.workers.trainer.probes import make_request, probe
from tests.workers.trainer.ranks import RanksFailedError, make_context, run_ranks
from tests.workers.trainer.tolerances import training_tolerance

pytestmark = pytest.mark.ranks

STEPS = 3


def with_job(layout: Layout, **knobs: Any) -> Layout:
    return replace(layout, job=JobSettings(knobs))


def opened(
    layout: Layout,
    work: Callable[[Training], Any],
    shape: ModelShape | None = None,
    **context: Any,
) -> list[Any]:
    """What `work` returns on each rank, whose training is opened as that of a probe with knobs."""

    def run(rank: int, store: Any) -> Any:
        settings = TrainingSettings(
            model=shape or make_shape(),
            layout=layout,
            seed=0,
            optimizer=ADAMW,
            options=TrainerOptions.from_knobs(layout.job),
        )
        return work(
            open_training(settings, make_context(rank, layout.num_devices, store, **context))
        )

    return run_ranks(layout.num_devices, run, own_group=True)


def numbers_of(training: Training) -> tuple[list[float], list[float]]:
    stats = [training.step(training.batch(step)) for step in range(STEPS)]
    return [each.loss for each in stats], [each.grad_norm for each in stats]


@pytest.mark.parametrize("axes", [DP, ZERO], ids=str)
def test_smaller_buckets_are_sent_one_by_one_and_change_no_bit(axes: dict[str, Any]) -> None:
    """On two ranks; on more, a place in a bucket decides the order in which ranks are added."""
    plain = make_layout(**axes)
    small = with_job(plain, bucket_elements=3000)
    few, many = (
        on_layout(layout, lambda training: len(training.flat.plan.buckets))[0]
        for layout in (plain, small)
    )
    assert few == 1
    assert many > 3
    operation = "shared::reduce_scatter" if axes == ZERO else "shared::all_reduce"
    counts = [
        sent_in(layout, make_shape(), whole_step=True)[operation] for layout in (plain, small)
    ]
    assert counts[1] - counts[0] == many - few
    assert_bitwise_equal(
        train(make_shape(), small, steps=STEPS), train(make_shape(), plain, steps=STEPS)
    )


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"dp": 4}, {"dp": 4, "zero_stage": 1}], ids=str)
def test_smaller_buckets_on_more_ranks_change_roundings_alone(axes: dict[str, Any]) -> None:
    plain = make_layout(**axes)
    assert_same_training(
        train(make_shape(), with_job(plain, bucket_elements=3000)), train(make_shape(), plain)
    )


@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("axes", [DP, ZERO, ZERO_2], ids=str)
def test_without_overlap_a_bucket_is_awaited_where_it_is_sent(
    axes: dict[str, Any], overlaps: bool
) -> None:
    """Of each sent bucket: whether its sum was still on the way when the backward pass went on."""
    layout = with_job(make_layout(**axes), overlap_scatter=overlaps, bucket_elements=3000)

    def work(training: Training) -> list[bool]:
        reduction, on_the_way = training.reduction, []
        count = reduction._count

        def noting(bucket: int) -> None:
            count(bucket)
            sent = getattr(reduction, "_sent", ())
            works = [each.work for each in sent] or list(reduction._pending)
            on_the_way.append(any(work is not None for work in works))

        for slot in training.flat.slots:
            slot.parameter.when_final = lambda of=slot.bucket: noting(of)
        training.step(training.batch(0))
        return on_the_way

    for seen in on_layout(layout, work):
        assert any(seen) is overlaps


@pytest.mark.parametrize("overlaps", [True, False])
def test_without_overlap_input_gradients_are_summed_before_the_weight_gradient(
    overlaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = with_job(make_layout(**TP), overlap_all_reduce=overlaps)

    def work(training: Training) -> list[str]:
        order: list[str] = []
        start, finish = tensor_parallel.start_all_reduce, tensor_parallel.finish

        def starting(tensor: Any, group: Any) -> Any:
            work = start(tensor, group)
            order.append("start")
            return work

        def finishing(work: Any) -> None:
            if work is not None:
                order.append("finish")
            finish(work)

        monkeypatch.setattr(tensor_parallel, "start_all_reduce", starting)
        monkeypatch.setattr(tensor_parallel, "finish", finishing)
        for slot in training.flat.slots:
            add = slot.parameter.add_product

            def adding(*factors: Any, add: Any = add) -> None:
                order.append("weight gradient")
                add(*factors)

            slot.parameter.add_product = adding
        training.step(training.batch(0))
        return order

    for order in on_layout(layout, work):
        at = order.index("start")
        first, second = order[at + 1 : at + 3]
        assert {first, second} == {"finish", "weight gradient"}
        assert (first == "weight gradient") is overlaps


@pytest.mark.parametrize("overlaps", [True, False])
def test_without_overlap_no_layer_is_gathered_before_it_is_used(overlaps: bool) -> None:
    layout = with_job(make_layout(**ZERO_3), overlap_gather=overlaps)

    def work(training: Training) -> bool:
        gathered, ahead = training.gathered, []
        finish = gathered._finish

        def noting(layer: int) -> None:
            finish(layer)
            ahead.append(bool(gathered._works))

        gathered._finish = noting
        use = gathered.use

        def using(layer: int, *others: Any) -> None:
            use(layer, *others)
            ahead.append(bool(gathered._works))

        for number, layer in enumerate(training.model.layers):
            layer[0].register_forward_pre_hook(lambda *_, number=number: using(number))
        training.step(training.batch(0))
        return any(ahead)

    assert on_layout(layout, work) == [overlaps] * 2


class Operators(TorchDispatchMode):
    """Notes the names of operators that a training runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """With True torch would import its compiler."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


FLASH = "_scaled_dot_product_flash_attention_for_cpu"
KERNELS = {"own": {FLASH}, "fused": {FLASH, f"{FLASH}_backward"}, "math": {"_softmax"}}
"""Operators by which a kernel shows; of math either kind of softmax."""


def kernel_in(training: Training) -> tuple[str, Any]:
    with Operators() as seen:
        training.step(training.batch(0))
    names = {name.replace("_safe_softmax", "_softmax") for name in seen.names}
    of_attention = {FLASH, f"{FLASH}_backward"} & names or {"_softmax"} & names
    [kernel] = [name for name, shown in KERNELS.items() if shown == of_attention]
    return kernel, options_in_effect(training)["attention"]


@pytest.mark.parametrize("num_kv_heads", [4, 2])
@pytest.mark.parametrize("asked", ["auto", "own", "fused", "math"])
def test_the_kernel_of_attention_that_is_asked_for_is_the_one_that_runs(
    asked: str, num_kv_heads: int
) -> None:
    shape = make_shape(num_kv_heads=num_kv_heads)
    job = {} if asked == "auto" else {"attention": asked}
    by_itself = "own" if num_kv_heads == 4 else "fused"
    expected = by_itself if asked == "auto" else asked
    assert opened(with_job(make_layout(), **job), kernel_in, shape) == [(expected, expected)]


@pytest.mark.parametrize("beside", [{}, {"recompute": "selective"}, {"precision": "bf16"}], ids=str)
@pytest.mark.parametrize("kernel", ["own", "fused", "math"])
def test_kernels_of_attention_change_roundings_alone(kernel: str, beside: dict[str, str]) -> None:
    shape, plain = make_shape(), make_layout(**beside)
    found = train(shape, with_job(plain, attention=kernel))
    assert_same_training(found, train(shape, make_layout()))


def test_windows_have_the_kernels_of_torch() -> None:
    shape = make_shape("moe")
    for kernel in ("fused", "math"):
        layout = with_job(make_layout(), attention=kernel)
        assert opened(layout, kernel_in, shape) == [(kernel, kernel)]
        assert_same_training(train(shape, layout), train(shape, make_layout()))


def test_a_rank_has_the_threads_that_its_job_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is as if the machine had two cores more than it has."""
    cores = frozenset({*os.sched_getaffinity(0), 4094, 4095})
    monkeypatch.setattr(opening.os, "sched_getaffinity", lambda _: cores)
    monkeypatch.setattr(opening, "usable_cores", lambda: len(cores))

    def work(training: Training) -> Any:
        return torch.get_num_threads(), numbers_of(training)

    shape = make_shape()
    [(threads, found)] = opened(with_job(make_layout(), threads=2), work, shape)
    [(one, expected)] = opened(make_layout(), work, shape)
    assert (one, threads) == (1, 2)
    allowed = training_tolerance(shape, ADAMW, steps=STEPS)
    assert excess_of_steps(found, expected, allowed) <= 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_more_threads_than_cores_are_refused(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks that may run on the same four cores have two each."""
    monkeypatch.setattr(opening.os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(opening, "usable_cores", lambda: 4)
    layout = with_job(make_layout(dp=ranks), threads=3 if ranks == 2 else 5)
    said = (
        "threads=3 of each of 2 ranks are 6 threads on a host where they have 4 cores; use at most 2"
        if ranks == 2
        else "threads=5 of each of 1 ranks are 5 threads on a host where they have 4 cores; use at"
        " most 4"
    )
    with pytest.raises(RanksFailedError, match=said):
        opened(layout, numbers_of)


def test_measured_products_can_be_left_as_they_are() -> None:
    measured = {Product("output", "fp32", 16, 32, 8): "NN"}
    job, rows = with_job(make_layout(), products="own"), to_rows(measured)

    def work(_: Training) -> Any:
        return dict(matrix_products._layouts)

    assert opened(make_layout(), work, product_layouts=rows) == [measured]
    assert opened(job, work, product_layouts=rows) == [{}]
    with pytest.raises(RanksFailedError, match="products own changes nothing in this layout"):
        opened(job, numbers_of)


def in_effect(layout: Layout, shape: ModelShape | None = None) -> dict[str, Any]:
    return opened(layout, options_in_effect, shape)[0]


def test_what_changes_nothing_is_not_in_effect() -> None:
    always = {"attention": "fused", "threads": 1}
    assert in_effect(make_layout()) == always | {"compile": False}
    assert in_effect(make_layout(), make_shape("gpt")) == always | {"attention": "own"}
    assert in_effect(make_layout(**TP)) == always | {"compile": False, "overlap_all_reduce": True}
    scatter = always | {"compile": False, "overlap_scatter": False}
    small = {"bucket_elements": 3000, "overlap_scatter": False}
    assert in_effect(with_job(make_layout(**DP), **small)) == scatter | small
    ring = make_layout(cp=2, cp_comm_type="p2p")
    assert "attention" not in in_effect(ring)
    assert in_effect(with_job(make_layout(**ZERO_3), overlap_gather=False)) == (
        scatter | {"overlap_scatter": True, "overlap_gather": False}
    )


@pytest.mark.parametrize(
    "axes",
    [
        {},
        DP,
        ZERO,
        ZERO_3,
        TP,
        {"tp_columns": 2},
        {"cp": 2, "cp_comm_type": "p2p"},
        {"cp": 2, "cp_comm_type": "a2a", "zero_stage": 2},
        {"dp": 2, "zero_stage": 3, "zero_replicas": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_the_conditions_of_the_catalogue_say_what_has_an_effect(
    family: str, axes: dict[str, Any]
) -> None:
    shape, layout, knobs = make_shape(family), make_layout(**axes), EMBEDDED.job_knobs
    stated = TrainerOptions(bucket_elements=3000)
    [found, *_] = on_layout(layout, options_in_effect, shape, options=stated)
    columns, cluster = LayoutColumns.of_each([layout]), detect_local_cpu()
    held = {
        name
        for name, knob in knobs.items()
        if knob.when is None or np.all(knob.when.holds(Facts(columns, shape, cluster, {})))
    }
    assert found.keys() == held - {"products"}  # nothing is calibrated


def test_the_catalogue_has_the_options_of_the_trainer_and_their_defaults() -> None:
    knobs, options = EMBEDDED.job_knobs, asdict(TrainerOptions())
    assert knobs.keys() == options.keys()
    defaults = {name: knob.default for name, knob in knobs.items()}
    assert defaults == options | {"bucket_elements": BUCKET_ELEMENTS}
    for name, knob in knobs.items():
        for value in knob.values:
            assert getattr(TrainerOptions.from_knobs({name: value}), name) == value


@pytest.mark.parametrize(
    ("family", "axes", "job", "said"),
    [
        ("llama", {}, {"overlap_scatter": False}, "overlap_scatter false changes nothing"),
        ("llama", ZERO_2, {"bucket_elements": 3000}, "bucket_elements 3000 changes nothing"),
        ("moe", {}, {"attention": "own"}, "attention='own' is not obeyed here: 'fused' would run"),
    ],
)
def test_a_probe_whose_knob_would_not_run_is_refused(
    family: str, axes: dict[str, Any], job: dict[str, Any], said: str
) -> None:
    request = make_request(model=make_shape(family), layout=with_job(make_layout(**axes), **job))
    with pytest.raises(RanksFailedError, match=said):
        probe(request)


def test_a_kernel_that_torch_is_not_to_use_is_refused() -> None:
    layout = with_job(make_layout(), attention="fused")
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        with pytest.raises(RanksFailedError, match="attention='fused' is not obeyed here: 'math'"):
            opened(layout, numbers_of)
    finally:
        torch.backends.cuda.enable_flash_sdp(True)


def test_a_probe_runs_with_the_knobs_of_its_layout(capfd: pytest.CaptureFixture[str]) -> None:
    layout = with_job(make_layout(**DP), overlap_scatter=False, attention="math")
    request = ProbeRequest.from_mapping(make_request(layout=layout).to_mapping())
    assert request.layout == layout
    assert probe(request)[0][0] is not None
    said = "trains with attention math, compile false, overlap_scatter false, threads 1"
    assert capfd.readouterr().err.count(said) == 1


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"cuda_graphs": "none"}, "the embedded trainer has no knob 'cuda_graphs'; its knobs are"),
        ({"attention": "flash"}, "attention='flash' is not one of auto, own, fused, math"),
        ({"overlap_gather": 1}, "overlap_gather=1 is not a switch, which overlap_gather is"),
        ({"threads": 0}, "threads=0 is not from 1 to 1024"),
        ({"bucket_elements": True}, "bucket_elements=True is not a count"),
    ],
)
def test_a_wrong_knob_says_what_there_is(knobs: dict[str, Any], said: str) -> None:
    with pytest.raises(TrainerOptionInvalidError, match=said) as raised:
        TrainerOptions.from_knobs(knobs)
    assert classify(raised.value) == "unsupported"


def test_the_switch_compile_and_the_knob_do_not_contradict_each_other() -> None:
    assert TrainerOptions.from_knobs({}, compiled=True).compile
    assert TrainerOptions.from_knobs({"compile": True}).compile
    assert TrainerOptions.from_knobs({"compile": True}, compiled=True).compile
    with pytest.raises(TrainerOptionInvalidError, match="contradicts the knob compile=false"):
        TrainerOptions.from_knobs({"compile": False}, compiled=True)


def test_a_training_job_reads_its_knobs_from_its_layout() -> None:
    job = TrainJob(model=make_shape(), layout=with_job(make_layout(), attention="math", threads=2))
    assert TrainJob.from_mapping(job.to_mapping()).options == TrainerOptions(
        attention="math", threads=2
    )
    document = job.to_mapping()
    document["layout"]["job"] = {"attention": "flash"}
    with pytest.raises(TrainJobInvalidError, match="attention='flash' is not one of"):
        TrainJob.from_mapping(document)
