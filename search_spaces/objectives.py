"""Objectives of layouts: throughputs, and the free share of memory. More is better.

A throughput is a factor that depends on the layout and the model, divided by the step time. A
campaign may have several objectives: the first ranks, and the Pareto front is over all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, get_args

from layout_tuner.documents.reading import nearest, shown
from layout_tuner.errors import ObjectiveInvalidError
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.layouts.recomputation import RECOMPUTE_CHOICES
from layout_tuner.units import SECONDS_PER_HOUR

if TYPE_CHECKING:  # numpy takes 0.1 s to import, and clients need the names alone
    import numpy as np
    from numpy.typing import NDArray

    from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
    from layout_tuner.search_spaces.models.model_shape import ModelShape

    Floats = NDArray[np.float64]

Objective = Literal[
    "tokens_per_s_per_device",
    "tokens_per_s",
    "model_tflops_per_device",
    "hardware_tflops_per_device",
    "tokens_per_node_hour",
]
"""Objectives that can rank: throughputs. tokens_per_node_hour is the inverse of a token's cost."""

AnyObjective = Literal[Objective, "memory_headroom"]
"""All objectives; memory_headroom is the share of a device's memory that stays free."""

OBJECTIVES: Final[tuple[Objective, ...]] = get_args(Objective)
MEMORY_HEADROOM: Final = "memory_headroom"
ALL_OBJECTIVES: Final[tuple[AnyObjective, ...]] = (*OBJECTIVES, "memory_headroom")
DEFAULT_OBJECTIVES: Final[tuple[AnyObjective, ...]] = ("tokens_per_s_per_device",)
MAX_OBJECTIVES: Final = 3
"""Most objectives of one campaign: with more, nearly every layout is on the front."""

OBJECTIVE_FIGURES: Final = (
    *(name for name in OBJECTIVES if name != "tokens_per_node_hour"),
    "peak_memory_bytes",
)
"""Fields of a measurement that objectives are computed from: those of `Measured`."""


_DECIDING_FLOPS: Final = (
    *("recompute", "recompute_layers", "schedule", "pipeline_split", "pipeline_layout"),
)
"""Knobs beside pp and vpp that decide which layers are recomputed."""


class Measured(Protocol):
    """The fields of a measurement that objectives use."""

    @property
    def tokens_per_s(self) -> float: ...

    @property
    def tokens_per_s_per_device(self) -> float: ...

    @property
    def model_tflops_per_device(self) -> float: ...

    @property
    def hardware_tflops_per_device(self) -> float: ...

    @property
    def peak_memory_bytes(self) -> int | None: ...


def objective_factors(name: str, columns: LayoutColumns, model: ModelShape) -> Floats:
    """The objective times the step time of each layout, for objectives that are throughputs.

    The FLOPs of a token are those that the trainer counts by: `ModelShape.model_flops_per_token`
    and `hardware_flops_per_token`.

    Raises:
        ObjectiveInvalidError: the objective is unknown, or not a throughput.
    """
    import numpy as np

    tokens = columns.global_batch_size * float(model.seq_length)
    if name == "tokens_per_s":
        return np.asarray(tokens, dtype=np.float64)
    if name == "tokens_per_node_hour":
        return np.asarray(tokens * SECONDS_PER_HOUR / columns.num_nodes, dtype=np.float64)
    per_device = tokens / columns.num_devices
    if name == "tokens_per_s_per_device":
        return np.asarray(per_device, dtype=np.float64)
    if name == "model_tflops_per_device":
        return np.asarray(per_device * (model.model_flops_per_token / 1e12), dtype=np.float64)
    if name == "hardware_tflops_per_device":
        return np.asarray(per_device * (_executed_flops(columns, model) / 1e12), dtype=np.float64)
    raise ObjectiveInvalidError(
        f"objective {name!r} is not one of the throughputs {', '.join(OBJECTIVES)}"
    )


def _executed_flops(columns: LayoutColumns, model: ModelShape) -> Floats:
    """FLOPs of a token of each layout, recomputation included."""
    import numpy as np

    from layout_tuner.search_spaces.layouts.layout_columns import different_combinations

    if not columns.recompute_layers.any():
        by_mode = [model.hardware_flops_per_token(each) for each in RECOMPUTE_CHOICES]
        return np.array(by_mode, dtype=np.float64)[columns.recompute]
    named = {name: columns.words(name) for name in _DECIDING_FLOPS}
    places = [place for _, place in named.values()]
    found, of_each = different_combinations([columns.pp, columns.vpp, *places])
    flops = []
    for pp, vpp, *codes in found.T.tolist():
        each = zip(named.items(), codes, strict=True)
        knobs: dict[str, Any] = {name: words[code] for (name, (words, _)), code in each}
        layers = Layout(pp=pp, vpp=vpp, **knobs).recomputing_layers(model.num_layers)
        flops.append(model.hardware_flops_per_token(knobs["recompute"], layers))
    return np.array(flops, dtype=np.float64)[of_each]


def measured_objective(
    name: str, measured: Measured, *, num_nodes: int, device_memory_bytes: int | None = None
) -> float | None:
    """The measured objective, None if not measured; ObjectiveInvalidError if there is none such."""
    if name == MEMORY_HEADROOM:
        return memory_headroom(measured.peak_memory_bytes, device_memory_bytes)
    if name == "tokens_per_node_hour":
        return measured.tokens_per_s * SECONDS_PER_HOUR / num_nodes
    if name not in OBJECTIVES:
        raise ObjectiveInvalidError(f"objective {name!r} is not one of {', '.join(ALL_OBJECTIVES)}")
    return float(getattr(measured, name))


def memory_headroom(peak_memory_bytes: int | None, device_memory_bytes: int | None) -> float | None:
    """The share of a device's memory that stayed free; None where either value is unknown."""
    if not peak_memory_bytes or not device_memory_bytes:
        return None
    return 1.0 - peak_memory_bytes / device_memory_bytes


def pareto_front(values: Floats) -> NDArray[np.bool_]:
    """The rows that no other row dominates (is at least as good in every column and better in one).

    Equal rows are both on the front or both off it. A NaN is worse than any number.

    There is one row per layout and one column per objective; more is better.
    """
    import numpy as np

    values = np.where(np.isnan(values), -np.inf, values)
    is_front = np.zeros(len(values), dtype=np.bool_)
    if not len(values):
        return is_front
    # The first row in descending order of the columns is dominated by none; it is on the front with
    # its equals. Rows that are not better than it in any column are left out.
    left = np.lexsort(tuple(-values[:, column] for column in reversed(range(values.shape[1]))))
    while len(left):
        best, others = values[left[0]], values[left]
        is_front[left[(others == best).all(axis=1)]] = True
        left = left[(others > best).any(axis=1)]
    return is_front


def read_objectives(value: Any) -> tuple[AnyObjective, ...]:
    """Reads a name, or two or three that begin with a throughput; else ObjectiveInvalidError."""
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)) or not 1 <= len(names) <= MAX_OBJECTIVES:
        raise ObjectiveInvalidError(
            f"{shown(value)} is neither a name nor a list of 1 to {MAX_OBJECTIVES} names; choose from "
            f"{', '.join(ALL_OBJECTIVES)}"
        )
    for place, name in enumerate(names):
        if not isinstance(name, str) or name not in ALL_OBJECTIVES:
            hint = nearest(name, ALL_OBJECTIVES) if isinstance(name, str) else ""
            raise ObjectiveInvalidError(f"{shown(name)} is unknown{hint}")
        if name in names[:place]:
            raise ObjectiveInvalidError(f"{name!r} is listed more than once")
    if names[0] not in OBJECTIVES:
        raise ObjectiveInvalidError(
            f"{names[0]!r} cannot rank alone (the smallest layout would win); list a throughput "
            f"before it: {', '.join(OBJECTIVES)}"
        )
    return tuple(names)
