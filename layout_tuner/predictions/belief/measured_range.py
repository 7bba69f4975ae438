"""Warns of estimates for layouts, models and clusters outside of what was measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from layout_tuner.predictions.belief.time_evidence import TimeEvidence
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.layouts.knobs import Knob
from layout_tuner.search_spaces.layouts.layout import COUNT_KNOBS, KNOBS
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.models.model_shape import ModelShape

_COUNTS: Final = (
    *(name for name in COUNT_KNOBS if name not in ("num_nodes", "zero_replicas")),
    "num_devices",
)
_CHOSEN: Final = tuple(each for each in KNOBS.values() if not each.is_count)
_SHAPE: Final = ("num_layers", "hidden_size", "seq_length")


def warning_outside(
    evidence: TimeEvidence,
    layouts: LayoutColumns,
    model: ModelShape,
    cluster: Cluster,
    software: str,
) -> str | None:
    """A warning that lists what lies outside of the measurements of this cluster and software."""
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
    beyond = [*_knobs_beyond(measured, layouts)]
    for name in _SHAPE:
        sizes = np.array([getattr(each, name) for each in models])
        beyond += _range_beyond(name, sizes, np.array(getattr(model, name)))
    if not beyond:
        return None
    return f"the estimate is asked beyond what it was calibrated for on {here}: {'; '.join(beyond)}"


def _knobs_beyond(measured: LayoutColumns, asked: LayoutColumns) -> Iterator[str]:
    for name in _COUNTS:
        yield from _range_beyond(name, getattr(measured, name), getattr(asked, name))
    for knob in _CHOSEN:
        seen = set(np.unique(getattr(measured, knob.name)).tolist())
        if new := sorted(set(np.unique(getattr(asked, knob.name)).tolist()) - seen):
            words = _words(knob, new, asked), _words(knob, sorted(seen), measured)
            yield "{} {}, measured {}".format(knob.name, *words)


def _words(knob: Knob, codes: Sequence[int], columns: LayoutColumns) -> str:
    # Codes of free texts are above those of words.
    words = (columns.texts.get(code) or knob.choices[code] for code in codes)
    return ", ".join(str(word).lower() for word in words)


def _range_beyond(name: str, measured: NDArray[Any], asked: NDArray[Any]) -> Iterator[str]:
    low, high = int(measured.min()), int(measured.max())
    if asked.min() < low or asked.max() > high:
        seen = f"{low}" if low == high else f"{low} to {high}"
        wanted = int(asked.max()) if asked.max() > high else int(asked.min())
        yield f"{name} {wanted}, measured {seen}"
