"""Every layout trains the same model as an independent reference does.

How far two runs may be apart follows from the arithmetic: see `tolerances.py`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as limits
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from layout_tuner.search_spaces.layouts.layout import Layout, Precision
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.workers.trainer.batches import SyntheticTokens, cut_batch
from layout_tuner.workers.trainer.parallel.optimizer import OptimizerSettings
from layout_tuner.workers.trainer.training import Training
from tests.workers.trainer.cases import (
    ADAMW,
    MIXTURES,
    STEPS,
    ZERO_3,
    Run,
    assert_same_training,
    initial_weights,
    make_layout,
    make_shape,
    movement,
    on_layout,
    relative_l2,
    train,
)
from tests.workers.trainer.knob_pairs import (
    KNOBS,
    LAYOUT_FIELDS,
    NUM_FAST,
    RUNS,
    Values,
    layout_of,
    legal_pairs,
    pairs_of,
    random_runs,
    settings_of,
    shape_of,
    values_of,
    words_of,
)
from tests.workers.trainer.ranks import run_ranks
from tests.workers.trainer.reference import ReferenceModel, train_reference
from tests.workers.trainer.tolerances import parameter_error

pytestmark = pytest.mark.ranks

SGD = OptimizerSettings(kind="sgd", learning_rate=0.1)
FAMILIES = pytest.mark.parametrize("family", KNOBS["family"])


class TorchOptimizer:
    """torch's own updates, by its functions: its classes import its compiler in every rank."""

    def __init__(self, settings: OptimizerSettings, weights: Iterable[Tensor]) -> None:
        self._settings, self._weights = settings, list(weights)
        self._moments = [[torch.zeros_like(w) for w in self._weights] for _ in range(2)]
        self._steps = [torch.tensor(0.0) for _ in self._weights]

    def zero_grad(self) -> None:
        for weight in self._weights:
            weight.grad = None

    @torch.no_grad()
    def step(self) -> None:
        settings, gradients = self._settings, [weight.grad for weight in self._weights]
        common = {"lr": settings.learning_rate, "foreach": False, "maximize": False}
        if settings.kind == "sgd":
            plain = {"momentum": 0.0, "dampening": 0.0, "nesterov": False, "weight_decay": 0.0}
            sgd(self._weights, gradients, [None] * len(gradients), **common, **plain)
            return
        adamw(
            *(self._weights, gradients, *self._moments, [], self._steps),
            beta1=settings.beta1,
            beta2=settings.beta2,
            eps=settings.epsilon,
            weight_decay=settings.weight_decay,
            amsgrad=False,
            **common,
        )


def global_batches(shape: ModelShape) -> list[tuple[Tensor, Tensor]]:
    """Ids and targets of every step, a sequence a row."""
    batches, source = [], SyntheticTokens(shape=shape, seed=0)
    for step in range(STEPS):
        batch = cut_batch(source, make_layout(), step=step, dp_rank=0)
        size = (-1, shape.seq_length)
        batches.append((batch.ids_MT.reshape(size), batch.targets_MT.reshape(size)))
    return batches


class BalancedModel(ReferenceModel):
    balanced = True


@functools.cache
def reference(
    shape: ModelShape,
    settings: OptimizerSettings,
    *,
    balanced: bool = False,
    weights_from: str = "cpu",
) -> Run:
    """The independent model on the same global batches; in a forked rank, as the trainer runs.

    It computes on the CPU, from the weights that the device `weights_from` draws.
    """

    def work(rank: int) -> Any:
        losses, norms, weights = train_reference(
            shape,
            initial_weights(shape, device=weights_from),
            global_batches(shape),
            functools.partial(TorchOptimizer, settings),
            clip_grad_norm=settings.clip_grad_norm,
            make_model=BalancedModel if balanced else ReferenceModel,
        )
        return losses, norms, {name: value.numpy() for name, value in weights.items()}

    losses, norms, arrays = run_ranks(1, work)[0]
    weights = {name: torch.from_numpy(array) for name, array in arrays.items()}
    told = {"losses": losses, "grad_norms": norms, "weights": weights}
    return Run(shape=shape, settings=settings, precision="fp32", **told)


@pytest.mark.parametrize(
    "words",
    [*RUNS[:NUM_FAST], *(pytest.param(words, marks=pytest.mark.slow) for words in RUNS[NUM_FAST:])],
)
def test_every_pair_of_knobs_trains_as_the_reference(words: str) -> None:
    """AdamW forgives a gradient of the wrong scale; in SGD it shows in how far each weight moved.

    `train` refuses ranks that report other losses, and copies of a weight that differ.
    """
    values = values_of(words)
    shape, layout, settings = shape_of(values), layout_of(values), settings_of(values)
    found = train(shape, layout, settings, balanced_routing=values["balanced"])
    expected = reference(shape, settings, balanced=values["balanced"])
    assert_same_training(found, expected)
    if values["columns"] > 1 and layout.precision == "fp32":
        assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    if values["clipped"]:
        assert min(expected.grad_norms) > 0.5, "nothing was clipped"
    # Clipped, some weights move by a few roundings of their own size alone.
    if settings == SGD and layout.precision == "fp32":
        moved, should = movement(found), movement(expected)
        for name in moved:
            error = relative_l2({name: moved[name]}, {name: should[name]})
            assert error < parameter_error(shape), name


@pytest.mark.slow
def test_the_runs_have_every_legal_pair_of_knobs() -> None:
    """A knob, or a value, that the rules open must be in `KNOBS`, and then in a run of its own."""
    fields = {field.name for field in dataclasses.fields(Layout)} - {"job"}
    levers = {"recompute_layers", "pipeline_layout", "optimizer_states", "offload"}  # `test_levers`
    assert fields - set(LAYOUT_FIELDS.values()) == {"num_nodes", "num_microbatches"} | levers
    have = set().union(*(pairs_of(values_of(words)) for words in RUNS))
    missing = {pair: words_of(run) for pair, run in legal_pairs(known=have)}
    assert not missing, "no run has these pairs, which such runs would have"
    by_sgd = [each for each in map(values_of, RUNS[:NUM_FAST]) if each["kind"] == "sgd"]
    exact = [each for each in by_sgd if each["precision"] == "fp32"]
    for runs, knobs in ((by_sgd, {"precision"}), (exact, KNOBS.keys() - {"kind", "precision"})):
        values = {(name, value) for name in knobs for value in KNOBS[name]}
        assert set().union(*(each.items() for each in runs)) >= values


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "number",
    [pytest.param(12, marks=pytest.mark.slow), pytest.param(60, marks=pytest.mark.nightly)],
)
def test_random_layouts_train_as_a_lone_rank(number: int) -> None:
    """Runs further from each other than pairs of knobs are.

    What is legal is what the search space's own rules say, so that a knob whose range is opened
    there, which the test above wants to see among `KNOBS`, is trained here.
    """

    @limits(max_examples=number, suppress_health_check=[HealthCheck.too_slow])
    @given(random_runs())
    def train_both(values: Values) -> None:
        shape, optimizer, balanced = shape_of(values), settings_of(values), values["balanced"]
        found = train.__wrapped__(shape, layout_of(values), optimizer, 4, balanced_routing=balanced)
        alone = train(shape, make_layout(), optimizer, 4, balanced_routing=balanced)
        assert_same_training(found, alone)

    train_both()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@FAMILIES
def test_one_process_trains_as_the_reference(family: str, precision: Precision) -> None:
    shape, balanced = make_shape(family), family in MIXTURES and precision != "fp32"
    found = train(shape, make_layout(precision=precision), balanced_routing=balanced)
    assert_same_training(found, reference(shape, ADAMW, balanced=balanced))


def test_another_rotary_base_reaches_every_layer() -> None:
    shape = make_shape("llama", rotary_base=500.0)
    found = train(shape, make_layout())
    assert_same_training(found, reference(shape, ADAMW))
    assert found.losses != train(make_shape("llama"), make_layout()).losses


def test_the_weights_of_a_layer_that_is_not_in_use_cannot_be_read() -> None:
    def work(training: Training) -> list[int]:
        training.step(training.batch(0))
        training.gathered.begin()
        return [slot.parameter.numel() for slot in training.flat.slots]

    for sizes in on_layout(make_layout(**ZERO_3), work):
        assert set(sizes) == {0}


def test_a_gradient_within_the_limit_is_not_clipped() -> None:
    shape, loose = make_shape("llama"), dataclasses.replace(SGD, clip_grad_norm=1e6)
    losses = [train(shape, make_layout(), each, 3).losses for each in (loose, SGD)]
    assert losses[0] == losses[1]
