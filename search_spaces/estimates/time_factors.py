"""What each term of a step really costs, as a multiple of its seconds at the promised constants.

A factor is never negative. Before anything was measured it is log-normal about one over the efficiency
that data sheets and papers lead one to expect, wide where they say little.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

Kind = Literal["device", "host", "reduction", "odds", "rest"]
"""How a term adds to the step. device and host work side by side, and the longer counts; a reduction
counts where the backward pass of the last micro-batch cannot hide it, or does not: the odds are its
not doing so; the rest is added."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FactorPrior:
    """What is believed of one term's factor before any measurement."""

    name: str
    """The term."""
    kind: Kind
    """How it adds to the step."""
    median: float
    """Seconds measured over seconds at the promised constants, as likely above as below."""
    log_sd: float
    """Standard deviation of its logarithm between clusters and software."""
    meaning: str
    """The term, for people."""


def _factor(name: str, kind: Kind, median: float, log_sd: float, meaning: str) -> FactorPrior:
    return FactorPrior(name=name, kind=kind, median=median, log_sd=log_sd, meaning=meaning)


_FACTORS: Final = (
    # Large matrices reach 60 to 80 % of the data sheet's peak in cuBLAS (arXiv:2104.04473 saw 52 % of
    # it in whole steps, everything else included).
    _factor("matrices", "device", 1.5, 0.2, "matrix multiplications"),
    # FlashAttention-2 reaches 50 to 73 % of the peak forward (arXiv:2307.08691), about 60 with the
    # backward pass, and skips half of the products, which the term counts, under a causal mask.
    _factor("attention", "device", 1.2, 0.4, "attention"),
    # Nothing of it is left where attention is fused, and all where it is not.
    _factor("attention_bytes", "device", 0.1, 1.5, "memory traffic of attention that is not fused"),
    _factor("matrix_bytes", "device", 0.7, 0.7, "memory traffic of the matrices"),
    _factor("elementwise", "device", 1.5, 0.5, "norms, activations, residual sums"),
    _factor("kernels", "device", 1.0, 0.6, "starting and draining kernels"),
    _factor("tensor_inside", "device", 1.1, 0.4, "tensor parallel inside a node"),
    _factor("tensor_across", "device", 1.5, 0.8, "tensor parallel between nodes"),
    _factor("latency_inside", "device", 1.5, 0.6, "latency of tensor parallelism inside a node"),
    _factor("latency_across", "device", 1.5, 0.8, "latency of tensor parallelism between nodes"),
    _factor("head", "device", 1.5, 0.3, "output projection"),
    _factor("logits", "device", 1.0, 0.5, "logits and loss"),
    # The cluster's bandwidths are effective ones already.
    _factor("accumulation", "device", 1.2, 0.6, "adding up gradients"),
    _factor("imbalance", "device", 1.0, 0.4, "waiting for the slowest stage of the best split"),
    _factor(
        "equal_layers", "device", 0.5, 0.8, "waiting for the output where layers are cut equally"
    ),
    _factor("host", "host", 1.5, 0.6, "the host's work on the blocks"),
    _factor("host_tensor", "host", 1.5, 0.6, "the host's work on tensor-parallel collectives"),
    _factor("each_microbatch", "host", 1.0, 1.0, "a constant a micro-batch"),
    _factor("data_inside", "reduction", 1.1, 0.4, "gradient reduction inside a node"),
    _factor("data_across", "reduction", 1.5, 0.6, "gradient reduction between nodes"),
    _factor("data_congestion", "reduction", 0.1, 1.0, "congestion of the gradient reduction"),
    _factor("data_latency", "reduction", 1.5, 0.8, "latency of the gradient reduction"),
    # PyTorch's DDP overlaps it (arXiv:2006.15704). Sharded optimizers do so only when they are told:
    # Megatron-LM's --overlap-grad-reduce and DeepSpeed's overlap_comm of ZeRO-1 are off by default.
    _factor("data_overlap", "odds", 0.3, 1.0, "gradient reduction beside the backward pass"),
    _factor("shards_overlap", "odds", 3.0, 1.2, "gradient scattering beside the backward pass"),
    _factor("weights_gather", "rest", 1.5, 0.6, "gathering of the weights after a ZeRO step"),
    _factor("gather_latency", "rest", 1.5, 0.8, "latency of that gathering"),
    _factor("pipeline_inside", "rest", 1.5, 0.8, "transfers between stages inside a node"),
    _factor("pipeline_across", "rest", 1.5, 0.8, "transfers between stages on different nodes"),
    _factor("pipeline_latency", "rest", 2.0, 0.8, "latency between stages"),
    _factor("optimizer", "rest", 1.5, 0.6, "optimizer"),
    _factor("each_step", "rest", 1.0, 1.0, "a constant a step"),
)

FACTOR_PRIORS: Final[Mapping[str, FactorPrior]] = MappingProxyType(
    {factor.name: factor for factor in _FACTORS}
)
"""Every term's prior by its name, in the order of the terms."""

TERM_NAMES: Final = tuple(FACTOR_PRIORS)
"""The names of the terms, in their order."""


def terms_of(kind: Kind) -> list[int]:
    """The places of the terms of one kind."""
    return [place for place, factor in enumerate(_FACTORS) if factor.kind == kind]
