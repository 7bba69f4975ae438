"""Tensor columns: every layout with them trains as one process does, and sends what it should."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from layout_tuner.predictions.estimates.tensor_sums import Sums, layer_sums
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.workers.trainer.comm import collectives
from layout_tuner.workers.trainer.comm.mesh import build_mesh
from layout_tuner.workers.trainer.model.divided_norms import DividedNorm
from layout_tuner.workers.trainer.trainer_options import OVERLAPS, TrainerOptions
from layout_tuner.workers.trainer.training import Training
from tests.workers.trainer.cases import (
    COLUMNS,
    PP,
    TP,
    ZERO,
    ZERO_2,
    ZERO_3,
    in_turn,
    make_layout,
    make_shape,
    on_layout,
)
from tests.workers.trainer.parallel_layers import drawn, gradient, weight
from tests.workers.trainer.ranks import run_ranks
from tests.workers.trainer.tolerances import assert_close

pytestmark = pytest.mark.ranks

LATE = {"schedule": "zero_bubble"}


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("middle", [0.0, 300.0])
def test_a_norm_has_the_statistics_of_all_features(kind: str, middle: float) -> None:
    """Features of unequal scale: the two halves alone have other statistics than the whole."""
    x, w, b, dy = (drawn(*s, seed=i) for i, s in enumerate([(6, 8), (8,), (8,), (6, 8)]))
    x = x * torch.tensor([0.01, 0.1, 1.0, 2.0, 10.0, 30.0, 50.0, 100.0]) + middle

    def work(rank: int) -> list[Any]:
        columns = build_mesh(rank, make_layout(tp_columns=2), tied_embeddings=False).column_group
        own = slice(rank * 4, rank * 4 + 4)
        norm = DividedNorm(weight(w[own]), weight(b[own]) if kind == "layer" else None, columns)
        x_in = x[:, own].clone().requires_grad_()
        y = norm(x_in)
        y.backward(dy[:, own])
        weights = [norm.weight, *([] if norm.bias is None else [norm.bias])]
        return [y.detach(), x_in.grad, *map(gradient, weights)]

    parts = run_ranks(2, work)
    dense = [t.double().requires_grad_() for t in (x, w, b)]
    if kind == "layer":
        y = F.layer_norm(dense[0], (8,), dense[1], dense[2], 1e-5)
    else:
        y = F.rms_norm(dense[0], (8,), dense[1], 1e-5)
    y.backward(dy.double())
    expected = [y.detach(), *(t.grad for t in dense if t.grad is not None)]
    for index, value in enumerate(expected):
        found = torch.cat([each[index] for each in parts], dim=-1)
        assert_close(found, value.float(), length=8 * 30)


@pytest.mark.sampled(3)
@in_turn(
    ("axes", "family"),
    [COLUMNS | TP, TP | ZERO_2, COLUMNS | ZERO, COLUMNS | ZERO_3],
    ["gpt", "llama"],
)
def test_communication_beside_computation_changes_no_bit(axes: dict[str, Any], family: str) -> None:
    shape, layout = make_shape(family), make_layout(**axes)

    def steps(training: Training) -> list[tuple[float, float]]:
        stats = [training.step(training.batch(step)) for step in range(2)]
        return [(each.loss, each.grad_norm) for each in stats]

    found = [
        on_layout(layout, steps, shape, options=TrainerOptions(**dict.fromkeys(awaited, False)))
        for awaited in ((), *((name,) for name in OVERLAPS), OVERLAPS)
    ]
    assert all(each == found[0] for each in found)


def sent_in_blocks(
    layout: Layout, shape: ModelShape, monkeypatch: pytest.MonkeyPatch
) -> list[dict[str, Counter[str]]]:
    """By rank, of a pass forward and one backward through the blocks: elements, by operation."""

    def work(training: Training) -> dict[str, Counter[str]]:
        mesh, sent = training.mesh, {"tp": Counter[str](), "columns": Counter[str]()}
        axes = {id(mesh.tp_group): "tp", id(mesh.column_group): "columns"}
        sums = collectives.start_all_reduce

        def counted(tensor: Tensor, group: Any, *others: Any) -> Any:
            if group is not None:
                what = "norms" if tensor.dim() == 2 and len(tensor) <= 2 else "layers"
                sent[axes[id(group)]][f"{when}, {what}"] += tensor.numel()
            return sums(tensor, group, *others)

        for module in ("comm.collectives", "model.tensor_parallel", "model.divided_norms"):
            monkeypatch.setattr(f"layout_tuner.workers.trainer.{module}.start_all_reduce", counted)
        tokens = layout.micro_batch_size * shape.seq_length
        x = torch.randn(tokens, shape.hidden_size // layout.tp_columns).requires_grad_()
        training.reduction.begin()
        when, y = "forward", x
        for block in training.model.stages[0].blocks:
            y = block(y)
        when = "backward"
        stage = training.model.stages[0]
        waiting = stage.put_off_gradients() if layout.schedule == "zero_bubble" else []
        y.sum().backward()
        at_once = {axis: Counter(counts) for axis, counts in sent.items()}
        with torch.no_grad():
            for add_gradient in waiting:
                add_gradient()
        assert sent == at_once  # what waits sums nothing
        return sent

    return on_layout(layout, work, shape)


@pytest.mark.parametrize(
    ("family", "tp", "columns", "axes"),
    [
        ("gpt", 1, 2, {}),
        ("llama", 2, 2, {}),
        ("gpt", 4, 2, {}),
        ("llama", 1, 4, {}),
        ("gpt", 4, 1, {}),
        ("llama", 1, 2, PP | LATE),
        ("gpt", 2, 1, PP | LATE),
        pytest.param("llama", 2, 2, PP | LATE, marks=pytest.mark.slow),
    ],
)
def test_a_rank_sums_as_many_elements_as_the_formulas_say(
    family: str, tp: int, columns: int, axes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By axis, forward and backward: the elements that the estimate of the step time counts."""
    layout = Layout(tp=tp, tp_columns=columns, micro_batch_size=2, num_microbatches=1, **axes)
    shape = make_shape(family, num_heads=8, num_kv_heads=8, num_layers=2 * layout.pp)
    sums, times = layer_sums(shape, tp, columns), 2 * 2 * shape.seq_length  # layers times tokens

    def named(what: str, each: Sums) -> dict[str, float]:
        return {
            f"forward, {what}": times * each.forward,
            f"backward, {what}": times * each.backward,
        }

    of_columns = named("layers", sums.columns) | named("norms", sums.norms)
    expected = {
        "tp": named("layers", sums.tp) if tp > 1 else {},
        "columns": of_columns if columns > 1 else {},
    }
    for found in sent_in_blocks(layout, shape, monkeypatch):
        assert found == expected


@pytest.mark.parametrize(
    ("tp", "columns", "shards"),
    [(1, 1, 4), (2, 1, 2), (1, 2, 2), pytest.param(2, 2, 2, marks=pytest.mark.slow)],
)
def test_a_rank_gathers_and_scatters_its_blocks_of_weights(
    tp: int, columns: int, shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AxoNN's third axis, ZeRO-3: per micro-batch two gathers of 1 / (r c) of a layer, one scatter.

    All parameters fill their places here, without padding; norms, of 2 H / c, are sharded too. The
    blocks at the ends are gathered less often: they stay there where the passes turn.
    """
    widths = {"hidden_size": 512, "ffn_hidden_size": 512}
    shape = make_shape(num_layers=3, num_heads=8, num_kv_heads=8, **widths)
    layout = Layout(tp=tp, tp_columns=columns, dp=shards, zero_stage=3, num_microbatches=2)

    def work(training: Training) -> set[tuple[int, ...]]:
        sent: dict[int, Counter[str]] = {}

        def counted(name: str) -> Any:
            whole_call = getattr(collectives, name)

            def call(whole: Tensor, group: Any, tag: int, *others: Any, **options: Any) -> Any:
                sent.setdefault(tag, Counter())[name] += whole.numel()
                return whole_call(whole, group, tag, *others, **options)

            return call

        for module, name in (
            ("gathered_weights", "start_gather_of_shares"),
            ("sharded_gradients", "start_sum_of_shares"),
        ):
            monkeypatch.setattr(
                f"layout_tuner.workers.trainer.parallel.{module}.{name}", counted(name)
            )
        training.step(training.batch(0))
        blocks = training.flat.plan.layers[2:-2]
        return {tuple(sent[bucket].values()) for layer in blocks for bucket in layer}

    matrices = 4 * 512 * 512 + 3 * 512 * 512
    held = matrices // (tp * columns) + 2 * 512 // columns
    assert on_layout(layout, work, shape) == [{(2 * 2 * held, 2 * held)}] * layout.num_devices
