"""What each term of a step really costs, as a multiple of its seconds at the promised constants.

A factor is never negative. Before anything was measured it is log-normal about one over the efficiency
that data sheets and papers lead one to expect, wide where they say little.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True, kw_only=True, slots=True)
class FactorPrior:
    """What is believed of one term's factor before any measurement."""

    name: str
    """The term."""
    median: float
    """Seconds measured over seconds at the promised constants, as likely above as below."""
    log_sd: float
    """Standard deviation of its logarithm between clusters and software."""
    meaning: str
    """The term, for people."""


_FACTORS: Final = (
    FactorPrior(name="matrices", median=1.6, log_sd=0.2, meaning="matrix multiplications"),
    FactorPrior(name="attention", median=1.5, log_sd=0.4, meaning="attention"),
    FactorPrior(
        name="matrix_bytes", median=1.0, log_sd=0.7, meaning="memory traffic of the matrices"
    ),
    FactorPrior(
        name="elementwise", median=1.5, log_sd=0.5, meaning="norms, activations, residual sums"
    ),
    FactorPrior(name="launches", median=2.0, log_sd=0.8, meaning="kernel launches"),
    FactorPrior(name="head", median=1.5, log_sd=0.3, meaning="output projection"),
    FactorPrior(name="logits", median=1.5, log_sd=0.5, meaning="logits and loss"),
    FactorPrior(name="imbalance", median=0.5, log_sd=0.8, meaning="waiting for the slowest stage"),
    FactorPrior(
        name="tensor_inside", median=1.4, log_sd=0.4, meaning="tensor parallel inside a node"
    ),
    FactorPrior(
        name="tensor_across", median=2.5, log_sd=0.8, meaning="tensor parallel between nodes"
    ),
    FactorPrior(
        name="tensor_latency", median=2.0, log_sd=0.8, meaning="latency of tensor parallelism"
    ),
    FactorPrior(name="pipeline_bytes", median=1.5, log_sd=0.8, meaning="transfers between stages"),
    FactorPrior(name="pipeline_latency", median=3.0, log_sd=1.0, meaning="latency between stages"),
    FactorPrior(
        name="data_hidden",
        median=0.5,
        log_sd=1.0,
        meaning="gradient reduction beside the backward pass",
    ),
    FactorPrior(
        name="data_exposed", median=1.4, log_sd=0.6, meaning="gradient reduction that cannot hide"
    ),
    FactorPrior(
        name="weights_gather",
        median=1.5,
        log_sd=0.8,
        meaning="gathering of the weights after a ZeRO step",
    ),
    FactorPrior(name="data_latency", median=2.0, log_sd=1.0, meaning="latency of data parallelism"),
    FactorPrior(name="optimizer", median=1.5, log_sd=0.6, meaning="optimizer"),
    FactorPrior(name="accumulation", median=1.2, log_sd=0.6, meaning="adding up gradients"),
    FactorPrior(name="each_microbatch", median=1.0, log_sd=1.0, meaning="a constant a micro-batch"),
    FactorPrior(name="each_step", median=1.0, log_sd=1.0, meaning="a constant a step"),
)

FACTOR_PRIORS: Final[Mapping[str, FactorPrior]] = MappingProxyType(
    {factor.name: factor for factor in _FACTORS}
)
"""Every term's prior by its name, in the order of the terms."""

TERM_NAMES: Final = tuple(FACTOR_PRIORS)
"""The names of the terms, in their order."""
