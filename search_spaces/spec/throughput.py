"""From tokens per second to FLOP/s and to the part of the peak that is used."""

from __future__ import annotations

from dataclasses import dataclass

from search_spaces.layout import Layout
from search_spaces.model_shape import ModelShape


@dataclass(frozen=True, kw_only=True, slots=True)
class Throughput:
    """A rate of training and what it means for each device.

    FLOPs are those of the model per token (arXiv:2104.04473, equation 3) times the tokens that
    the ranks consumed.
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
        """With what full recomputation computes twice."""
        flops_per_token = self.model.hardware_flops_per_token(self.layout.recompute)
        return self.tokens_per_s_per_device * flops_per_token / 1e12

    @property
    def mfu(self) -> float:
        """Part of the peak that the model's own arithmetic uses."""
        return self.model_tflops_per_device / self.peak_tflops_per_device

    @property
    def hfu(self) -> float:
        """Part of the peak that is used, recomputation included."""
        return self.hardware_tflops_per_device / self.peak_tflops_per_device
