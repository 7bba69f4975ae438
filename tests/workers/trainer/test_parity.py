"""Every layout trains the same model: against an independent reference, and against each other.

How far two runs may be apart follows from the arithmetic: see `tolerances.py`. Bitwise equality is
asked for where the same operators see the same shapes and add up in the same order alone.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from search_spaces.schedules import Schedule
from search_spaces.spec.layout import Layout, PipelineSplit
from search_spaces.spec.model_shape import ModelShape
from tests.workers.trainer.cases import (
    ADAMW,
    CUT,
    DP,
    FEW_STEPS,
    PP,
    REPLICAS,
    STEPS,
    TP,
    VPP,
    ZERO,
    ZERO_2,
    ZERO_3,
    Run,
    assert_bitwise_equal,
    assert_same_training,
    initial_weights,
    make_layout,
    make_shape,
    movement,
    on_layout,
    over_axes,
    relative_l2,
    train,
)
from tests.workers.trainer.ranks import run_ranks
from tests.workers.trainer.reference import train_reference
from tests.workers.trainer.tolerances import parameter_error
from workers.trainer.batches import SyntheticTokens, cut_batch
from workers.trainer.parallel.optimizer import OptimizerSettings
from workers.trainer.training import Training

pytestmark = pytest.mark.ranks

SGD = OptimizerSettings(kind="sgd", learning_rate=0.1)
CLIPPED = OptimizerSettings(clip_grad_norm=0.5)

GRID = [
    pytest.param(
        {"tp": tp, "pp": pp, "dp": dp, "zero_stage": zero},
        # Eight ranks take long; ZeRO over one replica is the plain optimizer, wherever it is.
        marks=[pytest.mark.slow] if tp * pp * dp > 4 or (zero and dp == 1) else [],
        id=f"tp{tp}-pp{pp}-dp{dp}-zero{zero}",
    )
    for tp, pp, dp, zero in itertools.product((1, 2), (1, 2), (1, 2), (0, 1, 2, 3))
    if dp > 1 or not zero or tp == pp == 1
]
UNEVEN = {"pipeline_split": "embedding"}
FAMILIES = pytest.mark.parametrize("family", ["gpt", "llama", "moe"])
BF16, FP16 = {"precision": "bf16"}, {"precision": "fp16"}
ONE_PASS = {"micro_batch_size": 4, "num_microbatches": 1}


def make_optimizer(settings: OptimizerSettings, parameters: Any) -> torch.optim.Optimizer:
    """torch's own."""
    if settings.kind == "sgd":
        return torch.optim.SGD(parameters, lr=settings.learning_rate)
    return torch.optim.AdamW(
        parameters,
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
    )


def global_batches(shape: ModelShape) -> list[tuple[Tensor, Tensor]]:
    """Ids and targets of every step, a sequence a row."""
    batches, source = [], SyntheticTokens(shape=shape, seed=0)
    for step in range(STEPS):
        batch = cut_batch(source, make_layout(), step=step, dp_rank=0)
        size = (-1, shape.seq_length)
        batches.append((batch.ids_MT.reshape(size), batch.targets_MT.reshape(size)))
    return batches


@functools.cache
def reference(shape: ModelShape, settings: OptimizerSettings) -> Run:
    """The independent model on the same global batches; in a forked rank, as the trainer runs."""

    def work(rank: int) -> Any:
        losses, norms, weights = train_reference(
            shape,
            initial_weights(shape),
            global_batches(shape),
            functools.partial(make_optimizer, settings),
            clip_grad_norm=settings.clip_grad_norm,
        )
        return losses, norms, {name: value.numpy() for name, value in weights.items()}

    losses, norms, arrays = run_ranks(1, work)[0]
    weights = {name: torch.from_numpy(array) for name, array in arrays.items()}
    told = {"losses": losses, "grad_norms": norms, "weights": weights}
    return Run(shape=shape, settings=settings, precision="fp32", **told)


@pytest.mark.sampled(5)
@FAMILIES
@pytest.mark.parametrize("axes", GRID)
def test_ten_adamw_steps_follow_the_reference(family: str, axes: dict[str, int]) -> None:
    shape = make_shape(family)
    assert_same_training(train(shape, make_layout(**axes)), reference(shape, ADAMW))


def test_another_rotary_base_reaches_every_layer() -> None:
    shape = make_shape("llama", rotary_base=500.0)
    found = train(shape, make_layout())
    assert_same_training(found, reference(shape, ADAMW))
    assert found.losses != train(make_shape("llama"), make_layout()).losses


@pytest.mark.sampled(3)
@pytest.mark.parametrize("axes", GRID)
def test_ten_sgd_steps_move_the_weights_as_the_reference_does(axes: dict[str, int]) -> None:
    """A gradient of the wrong scale, which AdamW forgives, shows in how far the weights moved."""
    shape = make_shape("gpt")
    assert_same_training(train(shape, make_layout(**axes), SGD), reference(shape, SGD))


@pytest.mark.sampled(5)
@FAMILIES
@pytest.mark.parametrize(
    ("change", "axes"),
    [
        *((PP, axes) for axes in ({}, TP, DP, ZERO, CUT)),
        ({"pp": 4}, {}),
        *(({"recompute": "full"}, axes) for axes in ({}, TP | PP, ZERO, CUT)),
        *(({"recompute": "selective"}, axes) for axes in ({}, TP | PP, ZERO, CUT, BF16)),
        *(({"zero_stage": 1}, DP | axes) for axes in (CUT, BF16)),
        # One micro-batch, and two ranks: gradients are added in the same order.
        *(({"zero_stage": zero}, ZERO | ONE_PASS | axes) for zero in (2, 3) for axes in ({}, TP)),
        *(({"zero_stage": 3}, ZERO_2 | axes) for axes in (PP, CUT, BF16, {"recompute": "full"})),
        (PP, ZERO_3),
    ],
    ids=str,
)
def test_a_pipeline_recomputation_and_shards_are_bitwise_equal_to_none(
    family: str, change: dict[str, Any], axes: dict[str, Any]
) -> None:
    shape = make_shape(family, num_layers=4 if change == {"pp": 4} else 2)
    changed, plain = make_layout(**axes | change), make_layout(**axes)
    found, expected = (train(shape, each, steps=FEW_STEPS) for each in (changed, plain))
    assert_bitwise_equal(found, expected)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("split", "num_layers", "axes"),
    [
        *(("embedding", 3, axes) for axes in (PP, PP | TP, PP | DP, PP | ZERO, PP | BF16)),
        *(("head", 3, axes) for axes in (PP, PP | CUT, PP | DP, PP | {"recompute": "full"})),
        *(("embedding_and_head", 4, axes) for axes in (PP, PP | TP, PP | ZERO)),
        ("embedding", 3, {"pp": 4}),  # its first stage has no layer
        ("head", 3, {"pp": 4}),
        ("embedding_and_head", 2, {"pp": 4}),
        ("embedding_and_head", 6, {"pp": 4}),
        *((split, 3, VPP) for split in ("embedding", "head")),
        ("embedding_and_head", 2, VPP),
        ("embedding_and_head", 6, VPP),
        ("embedding", 7, VPP | DP),
        ("head", 7, VPP | TP | {"recompute": "selective"}),
        ("embedding_and_head", 6, {"pp": 4, "vpp": 2}),
    ],
    ids=str,
)
@FAMILIES
def test_an_uneven_pipeline_is_bitwise_equal_to_none(
    family: str, split: PipelineSplit, num_layers: int, axes: dict[str, Any]
) -> None:
    shape = make_shape(family, num_layers=num_layers, tied_embeddings=family == "gpt")
    plain = make_layout(**{name: value for name, value in axes.items() if name not in VPP})
    found = train(shape, make_layout(pipeline_split=split, **axes), steps=FEW_STEPS)
    expected = train(shape, plain, steps=FEW_STEPS)
    if shape.tied_embeddings:
        assert_same_training(found, expected)  # their gradients are summed over pp
    else:
        assert_bitwise_equal(found, expected)


@pytest.mark.sampled(5)
@FAMILIES
# With micro-batches of one, sequences are cut within, not between.
@over_axes({}, PP, DP, ZERO, {"micro_batch_size": 1, "num_microbatches": 8}, slow=[PP | ZERO])
def test_cutting_tokens_over_tp_changes_no_training(family: str, axes: dict[str, int]) -> None:
    shape = make_shape(family)
    cut = train(shape, make_layout(tp=2, sequence_parallel=True, **axes))
    assert_same_training(cut, reference(shape, ADAMW))
    assert_same_training(cut, train(shape, make_layout(tp=2, **axes)))


@pytest.mark.parametrize("micro_batch_size", [2, 1])
def test_cut_tokens_move_the_weights_as_whole_ones_do(micro_batch_size: int) -> None:
    """A replicated gradient that is not summed over tp, or summed twice, shows here."""
    shape = make_shape("gpt")
    layout = Layout(
        tp=2,
        sequence_parallel=True,
        micro_batch_size=micro_batch_size,
        num_microbatches=8 // micro_batch_size,
    )
    found, expected = train(shape, layout, SGD), reference(shape, SGD)
    assert_same_training(found, expected)
    moved, should = movement(found), movement(expected)
    for name in moved:
        allowed = parameter_error(shape)
        assert relative_l2({name: moved[name]}, {name: should[name]}) < allowed, name


@pytest.mark.sampled(5)
@FAMILIES
@over_axes({}, PP, TP, TP | PP, PP | ZERO, CUT, CUT | PP)
def test_a_tied_embedding_stays_one_weight(family: str, axes: dict[str, int]) -> None:
    """`train` refuses copies that differ; here the sum of both ends' gradients is judged."""
    shape = make_shape(family, tied_embeddings=True)
    assert_same_training(train(shape, make_layout(**axes)), reference(shape, ADAMW))


@pytest.mark.sampled(5)
@FAMILIES
@over_axes({}, TP, PP, ZERO, TP | PP, CUT, CUT | PP)
def test_bf16_follows_fp32_within_its_precision(family: str, axes: dict[str, int]) -> None:
    shape = make_shape(family)
    found = train(shape, make_layout(precision="bf16", **axes))
    assert_same_training(found, train(shape, make_layout()))


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("tied", "settings"), [(False, ADAMW), (True, CLIPPED)], ids=["untied-free", "tied-clipped"]
)
@FAMILIES
@pytest.mark.parametrize("zero_stage", [2, 3])
@over_axes(
    DP,
    DP | CUT,
    DP | VPP,
    DP | PP | {"recompute": "full"},
    DP | TP | {"recompute": "selective"},
    REPLICAS,
    {"dp": 4, "micro_batch_size": 1, "num_microbatches": 2},
    slow=[DP | CUT | PP, DP | CUT | VPP, DP | VPP | {"recompute": "full"}, REPLICAS | TP],
)
def test_sharded_gradients_and_weights_change_no_training(
    axes: dict[str, Any], zero_stage: int, family: str, tied: bool, settings: OptimizerSettings
) -> None:
    shape = make_shape(family, num_layers=4, tied_embeddings=tied)
    found = train(shape, make_layout(**axes | {"zero_stage": zero_stage}), settings)
    assert_same_training(found, reference(shape, settings))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("precision", [BF16, FP16], ids=str)
@over_axes(ZERO_2, ZERO_3, ZERO_2 | PP, ZERO_3 | TP, REPLICAS | {"zero_stage": 3})
def test_sharded_training_of_16_bits_follows_fp32(
    axes: dict[str, Any], precision: dict[str, str]
) -> None:
    shape = make_shape("llama", tied_embeddings=True)
    found = train(shape, make_layout(**axes, **precision))
    assert_same_training(found, train(shape, make_layout()))


def test_the_weights_of_a_layer_that_is_not_in_use_cannot_be_read() -> None:
    def work(training: Training) -> list[int]:
        training.step(training.batch(0))
        training.gathered.begin()  # type: ignore[union-attr]
        return [slot.parameter.numel() for slot in training.flat.slots]

    for sizes in on_layout(make_layout(**ZERO_3), work):
        assert set(sizes) == {0}


@pytest.mark.parametrize(("micro_batch_size", "num_microbatches"), [(8, 1), (4, 2), (1, 8)])
def test_accumulation_changes_no_training(micro_batch_size: int, num_microbatches: int) -> None:
    shape = make_shape("llama")
    layout = Layout(micro_batch_size=micro_batch_size, num_microbatches=num_microbatches)
    assert_same_training(train(shape, layout), reference(shape, ADAMW))


def test_fewer_microbatches_than_stages_still_train_the_same() -> None:
    shape = make_shape("llama", num_layers=4)
    layout = Layout(pp=4, micro_batch_size=4, num_microbatches=2)
    alone = train(shape, Layout(micro_batch_size=4, num_microbatches=2))
    assert_bitwise_equal(train(shape, layout), alone)


def test_the_loss_falls_because_there_is_something_to_learn() -> None:
    losses = train(make_shape("llama"), make_layout()).losses
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.sampled(5)
@FAMILIES
@pytest.mark.parametrize("schedule", ["gpipe", "zero_bubble"])
@pytest.mark.parametrize(
    "axes",
    [
        {},
        {"num_microbatches": 1, "micro_batch_size": 4},
        {"pp": 4},
        {"recompute": "full"},
        {"recompute": "selective"},
        BF16,
        FP16,
        CUT,
        {"cp": 2, "cp_comm_type": "a2a"},
        ZERO,
        ZERO_2,
        ZERO_3 | {"recompute": "full"},
        DP | {"ep": 2},
        UNEVEN,
    ],
    ids=str,
)
def test_another_schedule_is_bitwise_equal_to_1f1b(
    axes: dict[str, Any], schedule: Schedule, family: str
) -> None:
    """Each parameter's gradients come in the order of the micro-batches under every schedule."""
    if "ep" in axes and family != "moe":
        pytest.skip("there are no experts to divide")
    layout = make_layout(**PP | axes)
    shape = make_shape(family, num_layers=3 if layout.pipeline_split != "layers" else 4)
    found = train(shape, replace(layout, schedule=schedule), steps=FEW_STEPS)
    assert_bitwise_equal(found, train(shape, layout, steps=FEW_STEPS))


@pytest.mark.sampled(4)
@FAMILIES
@pytest.mark.parametrize(
    "axes",
    [
        DP | {"zero_stage": 1},
        DP | {"zero_stage": 3},
        DP | {"ep": 2, "tp": 2, "sequence_parallel": True},
        DP | {"cp": 2, "cp_comm_type": "a2a", "zero_stage": 2, "zero_replicas": 2},
        DP | {"tp": 2, "schedule": "zero_bubble"},
    ],
    ids=str,
)
def test_another_order_of_ranks_is_bitwise_the_same(axes: dict[str, Any], family: str) -> None:
    """Sums go over the ranks of a group in the order of its axis, wherever their numbers are."""
    if "ep" in axes and family != "moe":
        pytest.skip("there are no experts to divide")
    shape, layout = make_shape(family), make_layout(**PP | axes)
    found = train(shape, replace(layout, rank_order="tp_cp_pp_dp"), steps=FEW_STEPS)
    assert_bitwise_equal(found, train(shape, layout, steps=FEW_STEPS))
