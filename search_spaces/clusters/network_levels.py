"""The levels of a cluster's network: units of devices that contain each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import Any, Final

from layout_tuner.documents.reading import (
    MAX_COUNT,
    Problems,
    is_name,
    read_fields_of,
    read_mapping,
    shown,
)
from layout_tuner.errors import ClusterInvalidError
from layout_tuner.search_spaces.physical_ranges import Range

BANDWIDTHS: Final = Range(1e3, 1e15, "bytes/s")
LATENCIES: Final = Range(1e-15, 10.0, "s")
_MOST: Final = 8

LEVEL_RANGES: Final[Mapping[str, Range]] = {
    "devices": Range(1, MAX_COUNT, "devices"),
    "bandwidth_bytes_per_s": BANDWIDTHS,
    "latency_s": LATENCIES,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkLevel:
    """A level of the network, as a node, an NVLink domain or a group of a dragonfly.

    `Cluster` checks its levels at construction.
    """

    name: str = ""
    devices: int | None = None
    """Devices of a unit of the level; None, for the largest level: the whole cluster."""
    bandwidth_bytes_per_s: float | None = None
    """Effective bandwidth of a device to the other units of the level below, in one direction.

    None: that of the cluster's fields `intra_node_...` up to the node, else `inter_node_...`.
    """
    latency_s: float | None = None
    """Latency of a step of a collective, or of a transfer, likewise."""

    def to_mapping(self) -> dict[str, Any]:
        """The stated fields."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def read_levels(value: object) -> tuple[NetworkLevel, ...]:
    """The levels of a document, a list of mappings; ClusterInvalidError says what is wrong."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ClusterInvalidError.of_field(
            "levels", f"levels={shown(value)} is not a list of mappings, each with name and devices"
        )
    problems, levels = Problems(ClusterInvalidError), list[NetworkLevel]()
    known = [f.name for f in fields(NetworkLevel)]
    for position, each in enumerate(value[: _MOST + 1]):
        with problems.collecting(f"levels[{position}]"):
            given = read_mapping(each, ClusterInvalidError, "a level")
            what = "field of a level"
            levels.append(read_fields_of(NetworkLevel, given, known, ClusterInvalidError, what))
    problems.refuse()
    return tuple(levels)


def level_problems(levels: object, devices_per_node: int | None) -> Iterator[str]:
    """Why levels are impossible for nodes of so many devices; None: their number is not known."""
    if not isinstance(levels, tuple) or not all(isinstance(e, NetworkLevel) for e in levels):
        yield f"levels={shown(levels)} is not a tuple of NetworkLevel"
        return
    if len(levels) > _MOST:
        yield f"levels: there are more than {_MOST}"
        return
    wrong = [problem for level in levels for problem in _problems_of(level)]
    yield from wrong or (_problems_together(levels, devices_per_node) if levels else ())


def _problems_of(level: NetworkLevel) -> Iterator[str]:
    if not is_name(level.name):
        yield f"levels: the name {shown(level.name)} is not a string of 1 to 64 characters"
    for name, allowed in LEVEL_RANGES.items():
        value = getattr(level, name)
        if value is not None and (problem := allowed.problem(value)):
            yield f"levels: {name}={problem}, at level {shown(level.name)}"


def _problems_together(levels: tuple[NetworkLevel, ...], node: int | None) -> Iterator[str]:
    names = [level.name for level in levels]
    if len(set(names)) < len(names):
        yield f"levels: each name may be there once, not {', '.join(names)}"
    for below, level in pairwise(levels):
        if below.devices is None:
            yield f"levels: {below.name!r} states no devices, which only the last level may"
        elif level.devices is not None and (
            level.devices <= below.devices or level.devices % below.devices
        ):
            yield (
                f"levels: {level.name!r} has {level.devices} devices, which is no multiple of the "
                f"{below.devices} of {below.name!r}; list levels from the smallest to the largest"
            )
    if node is not None and node not in [level.devices for level in levels]:
        sizes = ", ".join(f"{each.name} {each.devices or 'all'}" for each in levels)
        yield (f"levels: none has devices_per_node={node} devices ({sizes}); one level is the node")
