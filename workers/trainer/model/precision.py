"""Precision: the types of weights and activations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from layout_tuner.search_spaces.layouts.layout import Precision

COMPUTE_DTYPES: Final[Mapping[Precision, torch.dtype]] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
"""Type of the weights, the activations and the matrix products. Gradients accumulate in fp32."""


def keeps_master_weights(precision: Precision) -> bool:
    """Whether the optimizer updates an fp32 copy of the weights instead of the weights."""
    return COMPUTE_DTYPES[precision] is not torch.float32
