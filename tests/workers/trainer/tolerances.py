"""How far two computations of the same thing may differ, by arithmetic and not by measurement.

What is assumed of a processor, and all that is:

- A result is rounded to its precision once. The error is at most the unit roundoff u, half of the
  precision's machine epsilon, relative to the result; over many results it is uniform in [-u, u],
  so that its standard deviation is u / sqrt(3).
- Products of 16-bit numbers are added up in fp32, and rounded to 16 bits at the end. oneDNN does so
  unless it is asked for another accumulation mode, in AMX's tiles and in AVX512-FP16 too; MKL,
  cuBLAS and torch's own kernels do so as well.
- A sum is added up in any order and in any blocks.

Bounds of single operations are worst cases. Bounds of a training run are random walks, because the
worst case over a whole run would allow any fault. `test_tolerances.py` trains with roundings drawn
at random, as a processor that nobody has, and checks that these bounds hold; and it checks that
plausible faults exceed them by far.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from layout_tuner.search_spaces.layouts.layout import Precision
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.workers.trainer.model.precision import COMPUTE_DTYPES
from layout_tuner.workers.trainer.parallel.optimizer import OptimizerSettings

FP32 = torch.float32
GLOBAL_BATCH = 8
"""Sequences of a step in every training test."""

LARGEST_GRADIENT = 4.0
"""Norms of the gradient of the tests' models stay below this."""
LARGEST_CURVATURE = 40.0
"""The gradient of the tests' models changes by less than this for each unit of distance along it.

Both are properties of the models and of the tokens; `test_tolerances.py` computes them in fp64.
"""

SWIGLU_ROUNDINGS = 10
"""Of silu(gate) * up and its gradient: exponential, sum, quotient, and up to five products and
sums. The exponential is right to two units in the last place (two roundings each)."""

UPDATES_APART = 2.0
"""AdamW's update of one weight is -1 to 1 learning rates: two updates differ by up to 2."""


def unit_roundoff(dtype: torch.dtype) -> float:
    """The largest relative error of one rounding: fp32 6.0e-8, fp16 4.9e-4, bf16 3.9e-3."""
    return torch.finfo(dtype).eps / 2


def sum_error(length: int) -> float:
    """Error of an fp32 sum of `length` terms, relative to its root sum of squares: the worst case.

    Each of `length` roundings is at most u times a partial sum, which is at most the sum of the
    terms' sizes; by Cauchy-Schwarz that is at most sqrt(length) root sums of squares. A sum of
    terms of any sign is about as large as its root sum of squares.
    """
    return unit_roundoff(FP32) * length * math.sqrt(length)


def operation_error(dtype: torch.dtype, *, length: int = 1, roundings: int = 1) -> float:
    """Error of an operator's result of that type, relative to its largest element: the worst case.

    Args:
        length: terms of its longest sum.
        roundings: how often the result, or a factor of it, is rounded to its type; all of them at
            their largest, and the same way.
    """
    return roundings * unit_roundoff(dtype) + sum_error(length)


def assert_close(found: Tensor, expected: Tensor, *, length: int = 1, roundings: int = 1) -> None:
    """Compares two results of an operation; `expected` is of the same type, or exact in fp64."""
    allowed = operation_error(found.dtype, length=length, roundings=roundings)
    if expected.dtype != torch.float64:
        allowed *= 2  # it has errors of its own
    found, expected = found.detach().double(), expected.detach().double()
    assert expected.isfinite().all(), "an infinite number would allow any difference"
    atol = allowed * float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=0.0, atol=atol)


def relative_distance(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference, relative to the norm of what is expected."""
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm())


def norm_error(shape: ModelShape) -> float:
    """Relative error of the norm of one gradient: its squares are added up in fp32, share by share.

    A sum of n squares has no cancellation: its partial sums grow to the whole, and a random walk
    over their roundings is u sqrt(n) / 3; the root halves it. Six times that is allowed. The norms
    of the shares are added up in fp64.
    """
    h, f, v = shape.hidden_size, shape.ffn_hidden_size, shape.vocab_size
    return unit_roundoff(FP32) * math.sqrt(h * max(3 * h, 2 * f, v))


def num_roundings(num_layers: int) -> int:
    """Roundings between the tokens and the gradient of a weight, on the longest way.

    A layer has 14 forward (norm, fused projection, rotation, scores, probabilities, values, output
    projection, sum over tp, residual; norm, fused projection, activation, output projection,
    residual) and one for each of them backward; the ends have 8 together; the weight's own gradient
    3 (product, sum over micro-batches, sum over dp).
    """
    return 2 * 14 * num_layers + 8 + 3


def gradient_error(shape: ModelShape, precision: Precision) -> float:
    """Relative error of an element of the gradient, as a standard deviation: a random walk.

    Every rounding on its way adds a relative error of u / sqrt(3). Every sum adds that of its own
    random walk: with n terms of random signs its partial sums have sizes like sqrt(k), k up to n,
    so that the error is u sqrt(n / 6) relative to the result. The longest sum is over the tokens of
    the global batch, or over the widest dim.
    """
    roundings = num_roundings(shape.num_layers)
    length = max(GLOBAL_BATCH * shape.seq_length, shape.ffn_hidden_size, shape.vocab_size)
    rounded = unit_roundoff(COMPUTE_DTYPES[precision]) * math.sqrt(roundings / 3)
    summed = unit_roundoff(FP32) * math.sqrt(roundings * length / 6)
    return math.hypot(rounded, summed)


def parameter_error(shape: ModelShape) -> float:
    """Relative error of how far one parameter moves by plain gradient descent in fp32.

    The gradient of a bias is a sum over the tokens whose terms may cancel to a root of their number
    less than in a random walk; twice, as for the whole model.
    """
    error = math.sqrt(2) * gradient_error(shape, "fp32")
    return 2 * error * math.sqrt(GLOBAL_BATCH * shape.seq_length)


@dataclass(frozen=True, kw_only=True)
class TrainingTolerance:
    """How far two runs of the same training may be apart."""

    losses: list[float]
    """Of each step, absolute, in nats."""
    grad_norms: list[float]
    """Of each step, absolute."""
    moved: float
    """Norm of the difference of all weights at the end, relative to the way that they have come."""


def training_tolerance(
    shape: ModelShape,
    settings: OptimizerSettings,
    *,
    steps: int,
    precision: Precision = "fp32",
    way: float = 1.0,
    size: float = 0.0,
) -> TrainingTolerance:
    """A run in this precision against one in fp32, or both in fp32 under different layouts.

    Step 0 comes before any update. Its loss is off by the error of the logits, which are of order
    one, and by a few roundings of its own size; the norm of its gradient by the error of the
    gradient.

    Later steps start from weights that differ, see `_weights_apart`. Those differences have no
    common direction: along any one of the P directions, such as that of the gradient, they are
    smaller by a factor of sqrt(P). The loss changes by that times the gradient, the norm of the
    gradient by that times the curvature along it. The gradient's own error is allowed twice on top:
    once for the step, once for what earlier steps' errors change in it.

    Args:
        way: norm of the difference between the last weights and the first.
        size: norm of the last weights. 16-bit weights are rounded: each by at most u of its size.
    """
    error = math.hypot(gradient_error(shape, precision), gradient_error(shape, "fp32"))
    logits = error + 4 * unit_roundoff(FP32) * math.log(shape.vocab_size)
    losses, grad_norms = [logits], [error * LARGEST_GRADIENT]
    for step in range(1, steps):
        apart = _weights_apart(shape, settings, error, updates=step)
        along = apart / math.sqrt(shape.num_parameters)
        losses.append(2 * logits + along * LARGEST_GRADIENT)
        grad_norms.append(2 * error * LARGEST_GRADIENT + along * LARGEST_CURVATURE)
    clips = settings.clip_grad_norm is not None
    followed = (3 if clips else 2) * error  # clipping divides by a norm that has an error, too
    rounded = 0.0 if precision == "fp32" else unit_roundoff(COMPUTE_DTYPES[precision]) * size
    apart = rounded + _weights_apart(shape, settings, error, updates=steps)
    moved = followed + apart / way
    return TrainingTolerance(losses=losses, grad_norms=grad_norms, moved=moved)


def _weights_apart(
    shape: ModelShape, settings: OptimizerSettings, error: float, *, updates: int
) -> float:
    """Norm of the difference of the weights that AdamW makes of a gradient's rounding errors.

    AdamW divides a gradient by its own size: where it is smaller than its error, the error decides
    the sign of the update, which is a whole learning rate. Of gradients with a normal distribution
    whose errors are a part r of them, a part r / pi have the wrong sign. The number of wrong signs
    among P weights in each update has a Poisson distribution: four standard deviations, and four
    signs more, are allowed (in fp32 the mean is less than one). Plain gradient descent has no such
    step.
    """
    if settings.kind == "sgd":
        return 0.0
    mean = updates * shape.num_parameters * error / math.pi
    signs = mean + 4 * math.sqrt(mean) + 4
    return UPDATES_APART * settings.learning_rate * math.sqrt(signs)
