"""What a node is told about one rank that it shall fork."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, Self

RANK_ENTRY: Final = "workers.rank:main"
"""What a forked rank runs, as "module:function"; tests and benchmarks have others."""

Device = Literal["cpu", "cuda"]
"""What ranks compute on; cuda is ROCm too, as in torch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTask:
    """One rank of a group, as its zygote needs to know it."""

    group: str
    """Name of the group of ranks that belong together; events and orders carry it."""
    rank: int
    """Position in the group."""
    world_size: int
    """Ranks of the group."""
    local_rank: int
    """Position among the group's ranks on this node."""
    device: Device
    """What it computes on."""
    device_index: int
    """The node's device that it owns (shares, when oversubscribed)."""
    cores: tuple[int, ...]
    """CPU numbers that it may run on, of those that the node gives us; empty: all of them."""
    address: str
    """Address of its node, where rank 0 listens."""
    rendezvous: bool
    """Whether the ranks meet; false for tasks that each rank does alone."""
    oversubscribed: bool
    """Whether ranks of the group share devices."""
    deadline_s: float
    """Seconds from its start after which the kernel ends it, whoever else is alive."""
    job: Mapping[str, Any]
    """What it does: a JSON document with a "kind", for the rank program."""

    def to_mapping(self) -> dict[str, Any]:
        """The task as plain JSON values."""
        return asdict(self)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """Reads a task back."""
        return cls(**{**mapping, "cores": tuple(mapping["cores"])})
