"""The task of one rank, as it is sent to its node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, Self

RANK_ENTRY: Final = "layout_tuner.workers.rank_jobs.rank:main"
"""The program of a rank, as "module:function"; tests and benchmarks have others."""

Device = Literal["cpu", "cuda"]
"""Kind of the devices; "cuda" includes ROCm, as in torch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTask:
    group: str
    """Name of the group; it is part of events and orders."""
    rank: int
    """Position in the group."""
    world_size: int
    """Ranks of the group."""
    local_rank: int
    """Position among the group's ranks on this node."""
    device: Device
    local_world_size: int
    """Ranks of the group on this node."""
    node_rank: int
    """Position of its node among the group's nodes."""
    device_index: int
    """Index of its device on the node; other ranks use it too where the group is oversubscribed."""
    visible_devices: tuple[int, ...]
    """Indices of the devices that its process sees, in this order; usually only its own."""
    cores: tuple[int, ...]
    """CPU numbers that it may use; empty: all that this process may use."""
    address: str
    """Address of its node, where rank 0 listens."""
    master_address: str
    """Address of the node of rank 0."""
    rendezvous: bool
    """Whether the ranks connect to each other; false for tasks without communication."""
    oversubscribed: bool
    """Whether ranks of the group share devices."""
    deadline_s: float
    """Seconds from its start after which the kernel ends it in every case."""
    job: Mapping[str, Any]
    """Its job: a JSON document with a "kind", for the rank program."""

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        lists = {name: tuple(mapping[name]) for name in ("cores", "visible_devices")}
        return cls(**{**mapping, **lists})
