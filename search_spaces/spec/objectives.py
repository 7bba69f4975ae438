"""What a layout is judged by: figures of which more is better, each from a step time and a peak.

Every throughput is a factor that the layout alone decides, over its step time. A campaign may weigh
several objectives at once: the first ranks, and the Pareto front is over all of them.
"""

from __future__ import annotations

from typing import Any, Final, Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from search_spaces.cluster import Cluster
from search_spaces.columns import LayoutColumns
from search_spaces.errors import ObjectiveInvalidError
from search_spaces.layout import RECOMPUTE_MODES, Layout
from search_spaces.model_shape import ModelShape
from search_spaces.reading import nearest, shown

Floats = NDArray[np.float64]

Objective = Literal[
    "tokens_per_s_per_device",
    "tokens_per_s",
    "model_tflops_per_device",
    "hardware_tflops_per_device",
    "tokens_per_node_hour",
]
"""What can rank: a throughput. tokens_per_node_hour is what a token budget costs, the other way up."""

AnyObjective = Literal[Objective, "memory_headroom"]
"""What can be weighed beside others: also the share of a device's memory that stays free."""

OBJECTIVES: Final[tuple[Objective, ...]] = get_args(Objective)
MEMORY_HEADROOM: Final = "memory_headroom"
ALL_OBJECTIVES: Final[tuple[AnyObjective, ...]] = (*OBJECTIVES, "memory_headroom")
DEFAULT_OBJECTIVES: Final[tuple[AnyObjective, ...]] = ("tokens_per_s_per_device",)
MAX_OBJECTIVES: Final = 3
"""Most objectives of one campaign: a front over more holds nearly every layout."""

SECONDS_PER_HOUR: Final = 3600.0


class Measured(Protocol):
    """A measurement as far as objectives look at it."""

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


def objective_factors(
    name: str, columns: LayoutColumns, model: ModelShape, cluster: Cluster
) -> Floats:
    """What a throughput is made of: the objective times the step time, of each layout.

    No factor depends on the cluster so far. The work of a token is `ModelShape.model_flops_per_token`
    and `hardware_flops_per_token`, which the trainer counts by, too.

    Raises:
        ObjectiveInvalidError: it is none, or no throughput.
    """
    del cluster
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
        by_mode = [model.hardware_flops_per_token(mode) / 1e12 for mode in RECOMPUTE_MODES]
        return np.asarray(per_device * np.array(by_mode)[columns.recompute], dtype=np.float64)
    raise ObjectiveInvalidError(
        f"objective {name!r} is not one of the throughputs {', '.join(OBJECTIVES)}"
    )


def objective_values(
    name: str,
    columns: LayoutColumns,
    step_time_s: Floats,
    model: ModelShape,
    cluster: Cluster,
    *,
    peak_memory_bytes: Floats | None = None,
) -> Floats:
    """The objective of each layout, more is better.

    Peaks are for memory_headroom alone, which does not look at step times; it is under 0 where an
    estimated peak exceeds the device.

    Raises:
        ObjectiveInvalidError: it is none, or the headroom is asked for without peaks.
    """
    if name != MEMORY_HEADROOM:
        return objective_factors(name, columns, model, cluster) / step_time_s
    if peak_memory_bytes is None:
        raise ObjectiveInvalidError("memory_headroom needs peaks of memory, and none were given")
    return 1.0 - np.asarray(peak_memory_bytes, dtype=np.float64) / cluster.device_memory_bytes


def measured_objective(
    name: str, measured: Measured, *, num_nodes: int, device_memory_bytes: int | None = None
) -> float | None:
    """The objective as it was measured; None where the measurement does not tell.

    Raises:
        ObjectiveInvalidError: there is no such objective.
    """
    if name == MEMORY_HEADROOM:
        return memory_headroom(measured.peak_memory_bytes, device_memory_bytes)
    if name == "tokens_per_node_hour":
        return measured.tokens_per_s * SECONDS_PER_HOUR / num_nodes
    if name not in OBJECTIVES:
        raise ObjectiveInvalidError(f"objective {name!r} is not one of {', '.join(ALL_OBJECTIVES)}")
    return float(getattr(measured, name))


def memory_headroom(peak_memory_bytes: int | None, device_memory_bytes: int | None) -> float | None:
    """The share of a device's memory that stayed free; None where either is not known."""
    if not peak_memory_bytes or not device_memory_bytes:
        return None
    return 1.0 - peak_memory_bytes / device_memory_bytes


def model_and_hardware_tflops(
    tokens_per_s_per_device: float, layout: Layout, model: ModelShape
) -> tuple[float, float]:
    """Work of the model, and work with what is recomputed, of a device in TFLOP/s, from its tokens."""
    return (
        tokens_per_s_per_device * model.model_flops_per_token / 1e12,
        tokens_per_s_per_device * model.hardware_flops_per_token(layout.recompute) / 1e12,
    )


def pareto_front(values: Floats) -> NDArray[np.bool_]:
    """Which rows no other row beats: at least as good in every column and better in one.

    Equal rows stand together, on the front or off it. A NaN is worse than any number.

    Args:
        values: one row a layout, one column an objective, more is better.
    """
    values = np.where(np.isnan(values), -np.inf, values)
    is_front = np.zeros(len(values), dtype=np.bool_)
    if not len(values):
        return is_front
    # From the best in the first column down (of equals the best in the next ones first), a row can
    # only be beaten by one that came before: so by one of the front.
    order = np.lexsort(tuple(-values[:, column] for column in reversed(range(values.shape[1]))))
    front: list[int] = []
    for row in order:
        others = values[front]
        beaten = (others >= values[row]).all(axis=1) & (others > values[row]).any(axis=1)
        if not beaten.any():
            front.append(int(row))
    is_front[front] = True
    return is_front


def read_objectives(value: Any) -> tuple[AnyObjective, ...]:
    """One name, or a list of two or three of which the first is a throughput.

    Raises:
        ObjectiveInvalidError: it is neither; the message says what it may be.
    """
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
