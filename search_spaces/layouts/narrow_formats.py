"""Types of 8 bits or fewer: what Transformer Engine and Megatron-LM keep of them, in bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from layout_tuner.search_spaces.layouts.layout import Precision


@dataclass(frozen=True, kw_only=True, slots=True)
class NarrowFormat:
    """A type of 8 bits or fewer, as in Transformer Engine d0067d0d and Megatron-LM d98e8a64."""

    stored_bytes: float
    """Of an element with its share of a scale. The input of a product is kept once, along the side
    that the product of the weight gradient takes (pytorch/module/linear.py)."""
    cast_bytes: float = 0.0
    """Read and written where an input or the gradient of an output is quantised along both sides;
    0: not counted."""
    copies: float = 2.0
    """Quantised copies of a weight: one along each side."""
    beside_bf16: bool = False
    """Whether weights are also in bf16 with ZeRO, too. Without ZeRO they always are: primary
    weights of a narrow type need the distributed optimizer (megatron/training/arguments.py)."""
    gathered_bytes: float = 2.0
    """Of a weight that ZeRO gathers."""

    def weight_bytes(self, *, is_sharded: bool) -> float:
        """Bytes of a weight of a layer's matrices, with ZeRO (`is_sharded`) or without."""
        wide = 2.0 if self.beside_bf16 or not is_sharded else 0.0
        return wide + self.copies * self.stored_bytes


def _in_blocks(element: float, scale: float, block: int, reads: float = 1.0) -> NarrowFormat:
    """The format of elements and scales of so many bytes; quantising reads bf16 `reads` times."""
    stored = element + scale / block
    return NarrowFormat(stored_bytes=stored, cast_bytes=2.0 * (reads + stored))


NARROW: Final[Mapping[str, NarrowFormat]] = {
    # One scale a tensor; the copies of weights and the casts are not counted.
    "fp8": NarrowFormat(stored_bytes=1.0, copies=0.0, beside_bf16=True),
    # A scale in fp32 for 128 elements, which counts for weights, too: theirs are for 128 x 128.
    # Megatron-Bridge's precision of this name has bf16 weights.
    "fp8_block": replace(_in_blocks(1.0, 4.0, 128), beside_bf16=True),
    # A scale of a byte for 32 elements. Weights are gathered in bf16, since both copies are made of
    # the same numbers (core/distributed/param_and_grad_buffer.py).
    "mxfp8": _in_blocks(1.0, 1.0, 32),
    # A scale of a byte for 16 elements, and one a tensor, for which it is read once more. Weights
    # are gathered in 4 bits; ranks have the scales before (core/fp4_utils.py).
    "nvfp4": replace(_in_blocks(0.5, 1.0, 16, reads=2.0), gathered_bytes=0.5),
}
"""The narrow precisions. All three products of a matrix are in the type; with nvfp4 those of weight
gradients take inputs and gradients after a Hadamard transform, and gradients are rounded
stochastically (common/recipe/__init__.py, NVFP4BlockScaling)."""


def wide_precision(precision: Precision) -> Precision:
    """The type of what stays wide: bf16 beside a narrow type, else the type itself."""
    return "bf16" if precision in NARROW else precision
