"""The campaigns of `make gpu-check`: models, and the layouts of one device that are measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from layout_tuner.predictions.estimates.peak_memory import peak_memory_bytes
from layout_tuner.search_spaces.layouts.layout import Layout, Precision
from layout_tuner.search_spaces.layouts.recomputation import Recompute
from layout_tuner.search_spaces.models.model_presets import resolve_model

DeviceKind = Literal["cuda", "cpu"]

CLUSTER: Final = "gpu-check"
MEANT_TO_FAIL: Final = 2
"""Layouts that are meant to run out of memory."""
_GLOBAL_BATCH: Final = 32
_SMALL: Final = {
    "name": "llama-125m",
    "family": "llama",
    "num_layers": 12,
    "hidden_size": 768,
    "ffn_hidden_size": 2048,
    "num_heads": 12,
    "num_kv_heads": 12,
    "seq_length": 2048,
    "vocab_size": 32000,
    "tied_embeddings": False,
}
_LARGE: Final = {"preset": "llama-1b", "name": "llama-1b", "seq_length": 2048}


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A campaign: a model, and layouts of one device with the same global batch."""

    name: str
    model: str | Mapping[str, Any]
    """A preset's name, or a shape."""
    layouts: tuple[Layout, ...]
    strategy: str = "exhaustive"
    iterations: int = 4

    def document(self, cluster: Mapping[str, Any]) -> dict[str, Any]:
        """The campaign as it is submitted."""
        return {
            "name": self.name,
            "model": self.model,
            "cluster": dict(cluster),
            "strategy": self.strategy,
            "budget": {"trials": len(self.layouts)},
            "probe": {"warmup": 2, "iterations": self.iterations, "deadline": "60s"},
            "stop": {"early": False, "remeasure": 0},
            # The predictions were made before any measurement.
            "knowledge": "none",
            "space": {
                "global_batch_size": _GLOBAL_BATCH,
                **dict.fromkeys(("tp", "pp", "dp", "vpp", "cp"), 1),
                "zero_stage": 0,
                "sequence_parallel": False,
                "micro_batch_size": sorted({layout.micro_batch_size for layout in self.layouts}),
                "recompute": sorted({layout.recompute for layout in self.layouts}),
                "precision": sorted({layout.precision for layout in self.layouts}),
            },
            "layouts": [layout.to_mapping() for layout in self.layouts],
        }


def workloads(device: DeviceKind, *, quick: bool) -> tuple[Workload, ...]:
    """The campaigns, the largest model last; on a CPU or quickly, models that fit a core."""
    if quick:
        least = _layouts("fp32", "none", 1, 2, 4, 16, 32)
        return (
            Workload(name="tiny-llama", model=_short("tiny-llama"), layouts=least, iterations=2),
        )
    if device == "cpu":
        sizes = (2, 4, 8, 16)
        layouts = (
            *_layouts("fp32", "none", 1, *sizes, 32),
            *_layouts("fp32", "full", 1, *sizes, 32),
            *_layouts("fp32", "selective", *sizes, 32),
            *_layouts("bf16", "none", *sizes, 32),
        )
        few = (*_layouts("fp32", "none", *sizes), *_layouts("bf16", "none", *sizes))
        return (
            Workload(
                name="tiny", model=_short("tiny"), layouts=few, strategy="guided", iterations=2
            ),
            Workload(name="tiny-llama", model=_short("tiny-llama"), layouts=layouts, iterations=2),
        )
    tiny = (
        *_layouts("bf16", "none", 1, 8, 32),
        *_layouts("bf16", "full", 8, 32),
        *_layouts("fp32", "none", 1, 8, 32),
        *_layouts("fp16", "none", 8),
    )
    small = (
        *_layouts("bf16", "none", 1, 2, 4, 8, 16, 32),
        *_layouts("bf16", "full", 8, 32),
        *_layouts("bf16", "selective", 8),
        *_layouts("fp16", "none", 8, 32),
        *_layouts("fp32", "none", 8),
    )
    large = (
        *_layouts("bf16", "none", 1, 4, 8, 16),
        *_layouts("bf16", "full", 8, 32),
        *_layouts("fp16", "none", 4),
        # By the estimate 199 GiB, more than any device has that this runs on.
        *_layouts("fp32", "none", 32),
        *_layouts("fp32", "selective", 32),
    )
    return (
        Workload(name="tiny-llama", model="tiny-llama", layouts=tiny, strategy="guided"),
        Workload(name="llama-125m", model=_SMALL, layouts=small),
        Workload(name="llama-1b", model=_LARGE, layouts=large, iterations=3),
    )


def _short(preset: str) -> Mapping[str, Any]:
    """A model for a CPU core, on which the check may take no longer than on a GPU."""
    return {"preset": preset, "name": preset, "num_layers": 2, "seq_length": 16}


def _layouts(
    precision: Precision, recompute: Recompute, *micro_batch_sizes: int
) -> tuple[Layout, ...]:
    return tuple(
        Layout(
            micro_batch_size=size,
            num_microbatches=_GLOBAL_BATCH // size,
            precision=precision,
            recompute=recompute,
        )
        for size in micro_batch_sizes
    )


def memory_limit_bytes(every: Sequence[Workload]) -> int:
    """Memory of a CPU device under which the layouts that need the most do not fit."""
    peaks = sorted(
        float(peak_memory_bytes(layout, resolve_model(workload.model)).item())
        for workload in every
        for layout in workload.layouts
    )
    fits, too_large = peaks[-MEANT_TO_FAIL - 1], peaks[-MEANT_TO_FAIL]
    return int(math.sqrt(fits * too_large))
