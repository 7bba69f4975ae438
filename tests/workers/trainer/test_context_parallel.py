"""Sequences that ranks share: every way of communication trains as one process does."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from search_spaces.estimates.memory import peak_memory_bytes
from search_spaces.spec.layout import Layout
from tests.workers.trainer.cases import (
    ADAMW,
    CUT,
    DP,
    PP,
    REPLICAS,
    TP,
    VPP,
    ZERO,
    assert_same_training,
    make_layout,
    make_shape,
    movement,
    on_layout,
    over_axes,
    relative_l2,
    train,
)
from tests.workers.trainer.test_parity import SGD, reference
from tests.workers.trainer.tolerances import parameter_error
from workers.trainer.probe.measurement import rehearse

pytestmark = pytest.mark.ranks

COMM_TYPES = pytest.mark.parametrize("comm_type", ["all_gather", "p2p", "a2a"])
FAMILIES = pytest.mark.parametrize("family", ["gpt", "llama"])


def cp_layout(comm_type: str, **changes: Any) -> Any:
    return make_layout(**{"cp": 2, "cp_comm_type": comm_type, **changes})


@COMM_TYPES
@FAMILIES
def test_two_ranks_follow_the_reference(family: str, comm_type: str) -> None:
    shape = make_shape(family)
    assert_same_training(train(shape, cp_layout(comm_type)), reference(shape, ADAMW))


@COMM_TYPES
def test_sgd_moves_the_weights_as_the_reference_does(comm_type: str) -> None:
    """A gradient of the wrong scale, which AdamW forgives, shows in how far each weight moved."""
    shape = make_shape("gpt")
    found, expected = train(shape, cp_layout(comm_type), SGD), reference(shape, SGD)
    assert_same_training(found, expected)
    moved, should = movement(found), movement(expected)
    for name in moved:
        assert relative_l2({name: moved[name]}, {name: should[name]}) < parameter_error(shape), name


@pytest.mark.sampled(7)
@COMM_TYPES
@FAMILIES
@over_axes(
    {"cp": 4, "tp": 1},
    TP,
    CUT,
    PP,
    DP,
    ZERO,
    {"cp": 4, "zero_stage": 1, "zero_replicas": 2},
    {"zero_stage": 1},
    {"recompute": "full"},
    {"recompute": "selective"},
    slow=[VPP, REPLICAS, TP | PP, CUT | PP, CUT | {"recompute": "full"}],
)
def test_every_other_axis_beside_cp_follows_the_reference(
    family: str, comm_type: str, axes: dict[str, Any]
) -> None:
    shape = make_shape(family, num_layers=4, num_heads=8, num_kv_heads=8 if family == "gpt" else 4)
    assert_same_training(train(shape, cp_layout(comm_type, **axes)), reference(shape, ADAMW))


LONG = make_shape(
    num_layers=8,
    hidden_size=128,
    ffn_hidden_size=256,
    seq_length=64,
    num_heads=8,
    num_kv_heads=4,
)


@functools.cache
def peaks(**changes: Any) -> list[int]:
    layout = Layout(**{"micro_batch_size": 16, "num_microbatches": 2, **changes})
    return on_layout(layout, functools.partial(rehearse, limit_bytes=None), LONG)


@pytest.mark.sampled(5)
@COMM_TYPES
@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_the_peak_is_what_is_estimated(comm_type: Any, cp: int, recompute: Any) -> None:
    knobs = {"cp": cp, "cp_comm_type": comm_type, "recompute": recompute}
    layout = Layout(micro_batch_size=16, num_microbatches=2, **knobs)
    assert max(peaks(**knobs)) == pytest.approx(float(peak_memory_bytes(layout, LONG)), rel=0.06)


@pytest.mark.sampled(3)
@COMM_TYPES
def test_sharing_sequences_lowers_the_peak_of_every_rank(comm_type: str) -> None:
    (alone,) = peaks()
    two, four = (peaks(cp=cp, cp_comm_type=comm_type, recompute="none") for cp in (2, 4))
    assert max(four) < min(two)
    assert max(two) < alone
