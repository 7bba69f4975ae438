"""Small models and layouts, and training runs of them that several tests compare."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from search_spaces.layout import Layout
from search_spaces.model_shape import ModelShape
from tests.workers.trainer.ranks import run_ranks
from workers.trainer.mesh import Coordinates, Mesh, build_mesh
from workers.trainer.model import Stage
from workers.trainer.optimizer import OptimizerSettings
from workers.trainer.parameters import Part, initialise, local_parts
from workers.trainer.training import Training

CPU = torch.device("cpu")
STEPS = 10
ADAMW = OptimizerSettings()


def make_shape(family: str = "llama", **changes: Any) -> ModelShape:
    fields = {
        "name": f"test-{family}",
        "family": family,
        "num_layers": 2,
        "hidden_size": 32,
        "ffn_hidden_size": 64,
        "num_heads": 4,
        "num_kv_heads": 2 if family == "llama" else 4,
        "seq_length": 16,
        "vocab_size": 64,
        "tied_embeddings": False,
    }
    return ModelShape(**{**fields, **changes})


def make_layout(**changes: Any) -> Layout:
    """A layout whose global batch is 8 sequences, in micro-batches of 2 unless changed."""
    dp = changes.get("dp", 1)
    return Layout(**{"micro_batch_size": 2, "num_microbatches": 4 // dp, **changes})


def lone_mesh(layout: Layout | None = None) -> Mesh:
    """The mesh of one rank, without any process group."""
    return Mesh(
        layout=layout or make_layout(),
        rank=0,
        place=Coordinates(tp_rank=0, dp_rank=0, pp_rank=0),
        tp_group=None,
        shard_group=None,
        replica_group=None,
        pp_group=None,
        embedding_group=None,
    )


def make_training(
    shape: ModelShape,
    layout: Layout | None = None,
    *,
    mesh: Mesh | None = None,
    settings: OptimizerSettings | None = None,
    seed: int = 0,
) -> Training:
    return Training(
        shape,
        mesh or lone_mesh(layout),
        seed=seed,
        device=CPU,
        settings=settings or ADAMW,
    )


def initial_weights(shape: ModelShape, seed: int = 0) -> dict[str, Tensor]:
    """Every logical parameter of the model, whole, by its canonical name."""
    stage = Stage(shape, lone_mesh(), recompute="none")
    weights = {}
    for parameter in stage.parameters():
        for part in parameter.parts:
            value = torch.empty(part.shape)
            initialise(value, part, seed=seed, tp_rank=0)
            weights[part.name] = value
    return weights


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a training run under one layout ended with."""

    losses: list[float]
    grad_norms: list[float]
    weights: dict[str, Tensor]
    """Whole logical parameters, put together from the ranks' slices."""


@functools.cache
def train(
    shape: ModelShape,
    layout: Layout,
    settings: OptimizerSettings = ADAMW,
    steps: int = STEPS,
) -> Run:
    """Trains on forked ranks; every rank must report the same losses and norms."""

    def work(rank: int) -> Any:
        mesh = build_mesh(rank, layout, tied_embeddings=shape.tied_embeddings)
        training = make_training(shape, mesh=mesh, settings=settings)
        stats = [training.step(training.batch(i)) for i in range(steps)]
        slices = [
            (part, mesh.place.tp_rank, value.detach().float().numpy())
            for slot in training.flat.slots
            for part, value in local_parts(slot.parameter.parts, slot.parameter, tp=layout.tp)
        ]
        return [(s.loss, s.grad_norm) for s in stats], slices

    results = run_ranks(layout.num_devices, work)
    assert all(stats == results[0][0] for stats, _ in results), "ranks disagree on the global batch"
    losses, grad_norms = zip(*results[0][0], strict=True)
    weights = _put_together([item for _, slices in results for item in slices])
    return Run(losses=list(losses), grad_norms=list(grad_norms), weights=weights)


def _put_together(slices: list[tuple[Part, int, Any]]) -> dict[str, Tensor]:
    """Whole parameters; copies on other replicas and stages must be equal bit for bit."""
    found: dict[tuple[str, int], Tensor] = {}
    parts = {part.name: part for part, _, _ in slices}
    for part, tp_rank, array in slices:
        value = torch.from_numpy(array)
        first = found.setdefault((part.name, tp_rank), value)
        assert torch.equal(first, value), f"copies of {part.name} differ"
    whole = {}
    for name, part in parts.items():
        ranks = sorted(rank for found_name, rank in found if found_name == name)
        values = [found[name, rank] for rank in ranks]
        if part.shard_dim is None:
            assert all(torch.equal(value, values[0]) for value in values), f"{name} differs over tp"
            whole[name] = values[0]
        else:
            whole[name] = torch.cat(values, dim=part.shard_dim)
        assert whole[name].shape == part.shape
    return whole


def relative_l2(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    distance = sum(float((found[n].double() - expected[n].double()).square().sum()) for n in found)
    size = sum(float(expected[n].double().square().sum()) for n in found)
    return float((distance / size) ** 0.5)


def largest_difference(found: list[float], expected: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(found, expected, strict=True))


def largest_ratio(found: list[float], expected: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def assert_same_training(found: Run, expected: Run) -> None:
    assert largest_difference(found.losses, expected.losses) < 1e-5
    assert largest_ratio(found.grad_norms, expected.grad_norms) < 1e-5
    assert relative_l2(found.weights, expected.weights) < 1e-4


def assert_bitwise_equal(found: Run, expected: Run) -> None:
    assert found.losses == expected.losses
    # Each rank sums the squares of its share, so the sums' order depends on the layout.
    assert largest_ratio(found.grad_norms, expected.grad_norms) < 1e-7
    for name, value in expected.weights.items():
        assert torch.equal(found.weights[name], value), name
