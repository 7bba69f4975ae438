"""Within what a calibration was measured, and what is asked of it beyond that."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from search_spaces.cluster import Cluster
from search_spaces.columns import LayoutColumns
from search_spaces.layout import PRECISIONS, RECOMPUTE_MODES
from search_spaces.model_shape import ModelShape
from tuner.calibration.time_evidence import TimeEvidence

_COUNTS: Final = ("tp", "pp", "dp", "vpp", "micro_batch_size", "num_microbatches", "num_devices")
_WORDS: Final = {
    "recompute": RECOMPUTE_MODES,
    "precision": PRECISIONS,
    "zero_stage": ("0", "1"),
    "sequence_parallel": ("false", "true"),
}
_SHAPE: Final = ("num_layers", "hidden_size", "seq_length")


def warning_outside(
    evidence: TimeEvidence,
    layouts: LayoutColumns,
    model: ModelShape,
    cluster: Cluster,
    software: str,
) -> str | None:
    """A sentence that lists what is asked beyond what was measured there; None: nothing is."""
    here = f"{software or 'the embedded trainer'} on {cluster.name}"
    there = [
        place
        for place, origin in enumerate(evidence.origins)
        if (origin.cluster, origin.software) == (cluster.name, software)
    ]
    if not there:
        return (
            f"the estimate is not calibrated for {here}: nothing was measured there, so it rests on "
            "data sheets and on what other clusters and software have in common with it"
        )
    rows = np.isin(evidence.origin_of, there)
    measured = evidence.columns.rows(rows)
    models = [evidence.origins[place].model for place in there]
    beyond = [*_knobs_beyond(measured, layouts), *_shape_beyond(models, model)]
    if not beyond:
        return None
    return f"the estimate is asked beyond what it was calibrated for on {here}: {'; '.join(beyond)}"


def _knobs_beyond(measured: LayoutColumns, asked: LayoutColumns) -> Iterator[str]:
    for name in _COUNTS:
        yield from _range_beyond(name, getattr(measured, name), getattr(asked, name))
    for name, words in _WORDS.items():
        seen = set(np.unique(getattr(measured, name)).tolist())
        new = sorted(set(np.unique(getattr(asked, name)).tolist()) - seen)
        if new:
            yield (
                f"{name} {', '.join(words[code] for code in new)}, measured "
                f"{', '.join(words[code] for code in sorted(seen))}"
            )


def _shape_beyond(measured: list[ModelShape], model: ModelShape) -> Iterator[str]:
    for name in _SHAPE:
        yield from _range_beyond(
            name, np.array([getattr(m, name) for m in measured]), np.array(getattr(model, name))
        )


def _range_beyond(name: str, measured: NDArray[Any], asked: NDArray[Any]) -> Iterator[str]:
    low, high = int(measured.min()), int(measured.max())
    if asked.min() < low or asked.max() > high:
        seen = f"{low}" if low == high else f"{low} to {high}"
        wanted = int(asked.max()) if asked.max() > high else int(asked.min())
        yield f"{name} {wanted}, measured {seen}"
