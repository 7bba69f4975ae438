"""Tokens per second as FLOP/s and as a share of the peak (MFU, HFU)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_shape import ModelShape

MEASURED_PEAK: Final = "measured matmul"
"""Prefix of `peak_source` for a measured peak, which is too low if the machine was busy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Throughput:
    """The throughput of a layout, and the rates per device.

    FLOPs are the model's FLOPs per token (arXiv:2104.04473, equation 3) times the consumed tokens.
    """

    model: ModelShape
    layout: Layout
    tokens_per_s: float
    """Of all devices together."""
    peak_tflops_per_device: float

    @property
    def tokens_per_s_per_device(self) -> float:
        return self.tokens_per_s / self.layout.num_devices

    @property
    def model_tflops_per_device(self) -> float:
        return self.tokens_per_s_per_device * self.model.model_flops_per_token / 1e12

    @property
    def hardware_tflops_per_device(self) -> float:
        """Including recomputation."""
        layers = self.layout.recomputing_layers(self.model.num_layers)
        flops_per_token = self.model.hardware_flops_per_token(self.layout.recompute, layers)
        return self.tokens_per_s_per_device * flops_per_token / 1e12

    @property
    def mfu(self) -> float:
        """Share of the peak that the model's FLOPs use."""
        return self.model_tflops_per_device / self.peak_tflops_per_device

    @property
    def hfu(self) -> float:
        """Share of the peak that all FLOPs use, including recomputation."""
        return self.hardware_tflops_per_device / self.peak_tflops_per_device

    @property
    def figures(self) -> dict[str, Any]:
        """The rates and the peak, by the names of a measurement's fields."""
        names = (
            "tokens_per_s",
            "tokens_per_s_per_device",
            "model_tflops_per_device",
            "hardware_tflops_per_device",
            "peak_tflops_per_device",
            "mfu",
            "hfu",
        )
        return {name: getattr(self, name) for name in names}
