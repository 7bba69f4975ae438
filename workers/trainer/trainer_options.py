"""The options of the embedded trainer beside the layout: the knobs of a job.

None of them changes what is computed, except for rounding. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, Self

from layout_tuner.documents.reading import shown
from layout_tuner.search_spaces.layouts.job_settings import JobValue
from layout_tuner.trainers.embedded import EMBEDDED
from layout_tuner.workers.trainer.errors import TrainerOptionInvalidError

AttentionKernel = Literal["own", "fused", "math"]
"""own: torch's flash kernel forward, a backward pass of batched products; on CPUs alone. fused: the
kernel that torch chooses among its fused ones. math: all scores in memory at once."""

AttentionChoice = Literal["auto", "own", "fused", "math"]
"""auto: own on CPUs where each query head has a key head of its own, and fused elsewhere."""

ProductChoice = Literal["own", "measured"]
"""How factors of matrix products lie in memory. own: as they are. measured: as the calibration of
the machine found fastest (`product_layouts`); without one as they are."""

OVERLAPS: Final = ("overlap_all_reduce", "overlap_scatter", "overlap_gather")
"""Options that have communication run beside computation; the numbers are the same without."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerOptions:
    """How a rank trains, alike on every rank; `from_knobs` checks the values."""

    compile: bool = False
    """Whether torch.compile compiles RMSNorm and SwiGLU. It changes nothing for a GPT, whose norms
    and activation are single kernels."""
    overlap_all_reduce: bool = True
    """Whether a layer's input gradients are summed over tp beside its weight gradient."""
    overlap_scatter: bool = True
    """Whether a bucket's gradients are summed over dp beside the rest of the backward pass."""
    overlap_gather: bool = True
    """Whether a layer's weights (ZeRO-3) are gathered beside the layer before."""
    attention: AttentionChoice = "auto"
    bucket_elements: int | None = None
    """Elements at which a bucket of gradients is closed, under ZeRO-0 and 1. None: 4 Mi, and more
    for a large model (`parallel.flat_buffers`)."""
    threads: int = 1
    """Threads of a rank on CPUs."""
    products: ProductChoice = "measured"

    @classmethod
    def from_knobs(cls, knobs: Mapping[str, JobValue], *, compiled: bool = False) -> Self:
        """The options of a job's knobs; `compiled` is the switch of a request or a job file.

        Raises:
            TrainerOptionInvalidError: a name is unknown, a value is wrong, or the switch and the
                knob `compile` contradict each other.
        """
        catalogue = EMBEDDED.job_knobs
        for name, value in knobs.items():
            if name not in catalogue:
                raise TrainerOptionInvalidError(
                    f"the embedded trainer has no knob {shown(name)}; its knobs are "
                    f"{', '.join(catalogue)}"
                )
            if problem := catalogue[name].problem(value):
                raise TrainerOptionInvalidError(f"{name}={problem}")
        if compiled and knobs.get("compile", True) is False:
            raise TrainerOptionInvalidError(
                "compile=true contradicts the knob compile=false; state one of them"
            )
        values: dict[str, Any] = {"compile": compiled, **knobs}
        return cls(**values)


DEFAULT_OPTIONS: Final = TrainerOptions()
