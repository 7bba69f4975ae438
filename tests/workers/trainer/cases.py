"""Small models and layouts, and training runs of them that several tests compare."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from layout_tuner.search_spaces.layouts.layout import Layout, Precision
from layout_tuner.search_spaces.layouts.rank_mesh import Coordinates
from layout_tuner.search_spaces.models.layer_kinds import repeated
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.workers.trainer.comm.mesh import Mesh, build_mesh
from layout_tuner.workers.trainer.model.model import Stage
from layout_tuner.workers.trainer.model.parameters import (
    ModelParameter,
    ParameterPart,
    initialise,
    local_parts,
)
from layout_tuner.workers.trainer.parallel.optimizer import OptimizerSettings
from layout_tuner.workers.trainer.trainer_options import TrainerOptions
from layout_tuner.workers.trainer.training import Training
from tests.workers.trainer.ranks import run_ranks
from tests.workers.trainer.tolerances import TrainingTolerance, norm_error, training_tolerance

CPU = torch.device("cpu")
STEPS = 5
ADAMW = OptimizerSettings()

TP, PP, DP = {"tp": 2}, {"pp": 2}, {"dp": 2}
CUT = {"tp": 2, "sequence_parallel": True}
COLUMNS = {"tp_columns": 2}
VPP = {"pp": 2, "vpp": 2}
ZERO = {"dp": 2, "zero_stage": 1}
ZERO_2, ZERO_3 = ZERO | {"zero_stage": 2}, ZERO | {"zero_stage": 3}
REPLICAS = {"dp": 4, "zero_stage": 1, "zero_replicas": 2}


def over_axes(*axes: dict[str, Any], slow: Sequence[dict[str, Any]] = ()) -> pytest.MarkDecorator:
    """Runs a test with the fields of each of these layouts, with some in the slow suite alone."""
    marked = [pytest.param(each, marks=pytest.mark.slow) for each in slow]
    return pytest.mark.parametrize("axes", [*axes, *marked], ids=str)


def in_turn(names: Sequence[str], first: Sequence[Any], *others: Sequence[Any]) -> Any:
    """Cases in which each of the first values has one of every other's values in turn.

    The nightly suite has the rest of their product.
    """
    turns = [
        (each, *(other[index % len(other)] for other in others)) for index, each in enumerate(first)
    ]
    rest = [case for case in itertools.product(first, *others) if case not in turns]
    cases = [*turns, *(pytest.param(*case, marks=pytest.mark.nightly) for case in rest)]
    return pytest.mark.parametrize(names, cases, ids=str)


EXPERTS = {
    "num_experts": 4,
    "experts_per_token": 2,
    "moe_ffn_hidden_size": 32,
    "shared_expert_ffn_hidden_size": 32,
    "head_dim": 16,
    "qk_norm": True,
    "attention_window": 6,
    "full_attention_every": 2,
}
"""A mixture of experts with all that its family may have, but dense layers."""


LATENT = {
    "num_heads": 8,
    "num_kv_heads": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
MIXTURES = ("moe", "glm", "mla", "hybrid")
FIELDS: dict[str, dict[str, Any]] = {
    "moe": {"ffn_hidden_size": 32, **EXPERTS},
    "neox": {
        "norm": "layer",
        "activation": "gelu",
        "biases": "all",
        "parallel_block": True,
        "rotary_fraction": 0.5,
        "head_dim": 16,
        "qk_norm": "width",
        "attention_output_gate": True,
    },
    "glm": {
        "ffn_hidden_size": 32,
        **EXPERTS,
        "attention_window": None,
        "full_attention_every": None,
        "qk_norm": "width",
        "num_experts": 8,
        "activation": "geglu",
        "biases": "all",
        "rotary_fraction": 0.5,
        "router_score": "sigmoid",
        "router_groups": 4,
        "router_topk_groups": 2,
        "router_scaling_factor": 2.5,
        "shared_expert_gate": True,
    },
    "mla": {
        **LATENT,
        "num_experts": 4,
        "experts_per_token": 2,
        "moe_ffn_hidden_size": 32,
        "shared_expert_ffn_hidden_size": 32,
        "num_dense_layers": 1,
    },
    "hybrid": {
        "num_heads": 8,
        "num_kv_heads": 4,
        "num_experts": 4,
        "experts_per_token": 2,
        "moe_ffn_hidden_size": 32,
        "attention_window": 6,
        "window_num_heads": 4,
        "window_num_kv_heads": 4,
        "layer_kinds": ("window+dense", "experts", "full", "dense"),
    },
}
"""Families of shapes with most fields of blocks and of routers, with latent attention, and with
layers of several kinds."""


def make_shape(family: str = "llama", **changes: Any) -> ModelShape:
    if family in FIELDS:
        return make_shape("llama", **{"name": f"test-{family}"} | FIELDS[family] | changes)
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
    sizes: dict[str, Any] = {**fields, **changes}
    if kinds := sizes.get("layer_kinds"):  # as many of the pattern as there are layers
        sizes["layer_kinds"] = repeated(kinds, sizes["num_layers"])
    return ModelShape(**sizes)


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
    balanced_routing: bool = False,
) -> Training:
    return Training(
        shape,
        mesh or lone_mesh(layout),
        seed=seed,
        device=CPU,
        settings=settings or ADAMW,
        balanced_routing=balanced_routing,
    )


def on_layout(
    layout: Layout,
    work: Callable[[Training], Any],
    shape: ModelShape | None = None,
    *,
    settings: OptimizerSettings | None = None,
    **mesh_options: Any,
) -> list[Any]:
    """What `work(training)` returns on each rank of a layout."""
    model = shape or make_shape()
    mesh_options.setdefault("options", TrainerOptions.from_knobs(layout.job))

    def run(rank: int) -> Any:
        mesh = build_mesh(
            rank,
            layout,
            tied_embeddings=model.tied_embeddings,
            has_experts=model.num_experts > 0,
            **mesh_options,
        )
        return work(make_training(model, mesh=mesh, settings=settings))

    return run_ranks(layout.num_devices, run)


@functools.cache
def initial_weights(shape: ModelShape, seed: int = 0, device: str = "cpu") -> dict[str, Tensor]:
    """Every logical parameter of the model, whole, by its canonical name, in the host's memory.

    `device` draws the numbers: a GPU's generator draws others than the CPU's.
    """
    stage = Stage(shape, lone_mesh())
    weights = {}
    for parameter in stage.parameters():
        for part in parameter.parts:
            value = torch.empty(part.shape, device=device)
            initialise(value, part, seed=seed)
            weights[part.name] = value.cpu()
    return weights


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a training run under one layout ended with."""

    shape: ModelShape
    settings: OptimizerSettings
    precision: Precision
    losses: list[float]
    grad_norms: list[float]
    weights: dict[str, Tensor]
    """Whole logical parameters, put together from the ranks' slices."""


def whole_parameters(training: Training) -> Iterator[ModelParameter]:
    """Each parameter of the rank, whole; under ZeRO-3 until the next one is asked for."""
    if training.gathered is None:
        yield from (slot.parameter for slot in training.flat.slots)
        return
    gathered, seen = training.gathered, set()
    sharded = {bucket for layer in training.flat.plan.layers for bucket in layer}
    yield from (slot.parameter for slot in training.flat.slots if slot.bucket not in sharded)
    for layer, slots in enumerate(gathered._slots):
        for there in list(gathered._spans):
            gathered._release(there)
        gathered._start(layer)
        gathered._finish(layer)
        yield from (slot.parameter for slot in slots if id(slot) not in seen)
        seen |= {id(slot) for slot in slots}


@functools.cache
def train(
    shape: ModelShape,
    layout: Layout,
    settings: OptimizerSettings = ADAMW,
    steps: int = STEPS,
    *,
    balanced_routing: bool = False,
) -> Run:
    """Trains on forked ranks; every rank must report the same losses and norms.

    With experts, tokens are cut over tp (the rule `experts_need_sequence_parallel`).
    """
    if shape.num_experts and layout.tp > 1:
        layout = replace(layout, sequence_parallel=True)

    def work(training: Training) -> Any:
        for mixture in training.model.mixtures:
            mixture.balanced = balanced_routing
        stats = [training.step(training.batch(i)) for i in range(steps)]
        slices = [
            (part, part.offsets(parameter.cut), value.detach().float().numpy().copy())
            for parameter in whole_parameters(training)
            for part, value in local_parts(parameter, parameter)
        ]
        return [(s.loss, s.grad_norm) for s in stats], slices

    results = on_layout(layout, work, shape, settings=settings)
    assert all(stats == results[0][0] for stats, _ in results), "ranks disagree on the global batch"
    losses, grad_norms = zip(*results[0][0], strict=True)
    weights = _put_together([item for _, slices in results for item in slices])
    return Run(
        shape=shape,
        settings=settings,
        precision=layout.precision,
        losses=list(losses),
        grad_norms=list(grad_norms),
        weights=weights,
    )


def _put_together(slices: list[tuple[ParameterPart, tuple[int, ...], Any]]) -> dict[str, Tensor]:
    """Whole parameters; copies of a slice on other ranks must be equal bit for bit."""
    found: dict[tuple[str, tuple[int, ...]], Tensor] = {}
    whole = {part.name: torch.full(part.shape, torch.nan) for part, _, _ in slices}
    for part, offsets, array in slices:
        value = torch.from_numpy(array)
        first = found.setdefault((part.name, offsets), value)
        assert torch.equal(first, value), f"copies of {part.name} differ"
        sizes = zip(offsets, value.shape, strict=True)
        whole[part.name][tuple(slice(start, start + size) for start, size in sizes)] = value
    assert not any(value.isnan().any() for value in whole.values()), "a slice is missing"
    return whole


def movement(run: Run) -> dict[str, Tensor]:
    """How far each weight has moved, without weights that the model does not depend on.

    Softmax does not see the biases of keys: their exact gradient is zero, and only rounding moves
    them.
    """
    start = initial_weights(run.shape)
    return {
        name: value.double() - start[name].double()
        for name, value in run.weights.items()
        if not name.endswith("key.bias")
    }


def relative_l2(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    distance = sum(float((found[n] - expected[n]).square().sum()) for n in found)
    return distance**0.5 / l2(expected)


def l2(tensors: dict[str, Tensor]) -> float:
    return float(sum(float(value.double().square().sum()) for value in tensors.values()) ** 0.5)


def largest(numbers: Iterable[float]) -> float:
    """The largest of them; infinity where one is NaN, which `max` may pass over."""
    return max(math.inf if math.isnan(number) else number for number in numbers)


def excess(found: Run, expected: Run) -> float:
    """The largest difference of two runs, in units of possible rounding: up to 1 they agree.

    Infinity where either run has a loss, a norm or a weight that is NaN.
    """
    ways = movement(found), movement(expected)
    tolerance = training_tolerance(
        found.shape,
        found.settings,
        steps=len(found.losses),
        precision=found.precision,
        way=l2(ways[1]),
        size=l2(expected.weights),
    )
    own, other = ((run.losses, run.grad_norms) for run in (found, expected))
    steps = excess_of_steps(own, other, tolerance)
    return largest([steps, relative_l2(*ways) / tolerance.moved])


def excess_of_steps(
    found: tuple[list[float], list[float]],
    expected: tuple[list[float], list[float]],
    tolerance: TrainingTolerance,
) -> float:
    """The same of losses and gradient norms alone."""
    allowed = tolerance.losses, tolerance.grad_norms
    return largest(
        abs(a - b) / limit
        for own, other, limits in zip(found, expected, allowed, strict=True)
        for a, b, limit in zip(own, other, limits, strict=True)
    )


def assert_same_training(found: Run, expected: Run) -> None:
    """`expected` is in fp32; `found` in fp32 too, or in a lower precision."""
    assert excess(found, expected) <= 1


def assert_bitwise_equal(found: Run, expected: Run) -> None:
    """For runs whose kernels see the same shapes: the same library then sums in the same order."""
    assert found.losses == expected.losses
    # Each rank sums the squares of its share, so the sums' order depends on the layout.
    assert found.grad_norms == pytest.approx(expected.grad_norms, rel=norm_error(found.shape))
    for name, value in expected.weights.items():
        assert torch.equal(found.weights[name], value), name
