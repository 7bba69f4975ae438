"""Clipping: by the norm of the whole model's gradient, each parameter counted once, everywhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.workers.trainer.cases import (
    CUT,
    DP,
    PP,
    REPLICAS,
    TP,
    VPP,
    ZERO,
    assert_same_training,
    initial_weights,
    l2,
    make_layout,
    make_shape,
    over_axes,
    train,
)
from tests.workers.trainer.test_parity import reference
from tests.workers.trainer.tolerances import norm_error, unit_roundoff
from workers.trainer.parallel.optimizer import OptimizerSettings

pytestmark = pytest.mark.ranks

CLIPPED_SGD = OptimizerSettings(kind="sgd", learning_rate=0.1, clip_grad_norm=0.5)
"""Moves the weights by what is left of the gradient, which AdamW's division would hide."""


@pytest.mark.sampled(3)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@over_axes(
    *({}, TP, PP, VPP, DP, ZERO, REPLICAS, CUT, CUT | ZERO, PP | ZERO),
    slow=[
        *(TP | PP, CUT | VPP, PP | DP, VPP | ZERO),
        *(CUT | PP | ZERO, CUT | REPLICAS, PP | REPLICAS),
    ],
)
def test_clipped_gradients_move_weights_as_they_should(axes: dict[str, Any], tied: bool) -> None:
    shape = make_shape("gpt", num_layers=4, tied_embeddings=tied)
    expected, found = reference(shape, CLIPPED_SGD), train(shape, make_layout(**axes), CLIPPED_SGD)
    assert min(expected.grad_norms) > 0.5, "nothing was clipped"
    assert_same_training(found, expected)


def test_clipping_scales_the_update_to_the_limit() -> None:
    settings = OptimizerSettings(kind="sgd", learning_rate=1.0, clip_grad_norm=0.5)
    shape = make_shape("llama")
    start, run = initial_weights(shape), train(shape, make_layout(), settings, 1)
    moved = l2({name: run.weights[name].double() - start[name].double() for name in start})
    # Each new weight is rounded, by at most u of its size; the norm that divides has an error too.
    rounded = unit_roundoff(torch.float32) * l2(run.weights)
    assert moved == pytest.approx(0.5, rel=rounded / 0.5 + norm_error(shape))


def test_a_gradient_within_the_limit_is_left_alone() -> None:
    shape = make_shape("llama")
    for kind in ("adamw", "sgd"):
        loose = OptimizerSettings(kind=kind, clip_grad_norm=1e6)  # type: ignore[arg-type]
        free = OptimizerSettings(kind=kind)  # type: ignore[arg-type]
        losses = [train(shape, make_layout(), each, 3).losses for each in (loose, free)]
        assert losses[0] == losses[1]
