"""Groups of ranks, and which of them talk through shared memory: those that are of one host."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from torch import distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.constants import default_pg_timeout

from workers.trainer.host import Host
from workers.trainer.host_lanes import Lane
from workers.trainer.shared_memory import Region, SharedFile, can_share, host_identity

MOST_RANKS: Final = 8
"""Each rank reads what every other one writes: in larger groups gloo's rings move fewer bytes."""

Ranks = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The ranks of one axis, as one of them sees them."""

    process_group: ProcessGroup
    ranks: Ranks
    """Global ranks, in the group's order."""
    rank: int
    """This rank's place among them."""
    lane: Lane | None = None
    """Shared memory; None where the library that the process group has does everything."""

    @property
    def size(self) -> int:
        return len(self.ranks)


def make_groups(
    found: Iterable[ProcessGroup | None], *, timeout: timedelta | None, shares_memory: bool
) -> dict[ProcessGroup, Group]:
    """What this rank's process groups are; every rank of the job calls it at the same time.

    Communicates: over all ranks twice, where groups might share memory.

    Raises:
        PeerLostError: another rank has ended meanwhile.
    """
    ranks = {group: tuple(dist.get_process_group_ranks(group)) for group in found if group}
    lanes: Mapping[Ranks, Lane] = {}
    if shares_memory and dist.is_initialized() and dist.get_backend() == "gloo":
        lanes = _lanes(set(ranks.values()), timeout or default_pg_timeout)
    this = dist.get_rank() if ranks else 0
    return {
        group: Group(process_group=group, ranks=of, rank=of.index(this), lane=lanes.get(of))
        for group, of in ranks.items()
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class _Told:
    """What a rank tells all others of itself."""

    identity: str
    """Of its host; empty where it cannot share memory."""
    process: int
    cores: frozenset[int]
    """Those that it may run on."""
    files: dict[Ranks, tuple[int, int, int]]
    """Where the memory of the groups is that it is the first rank of."""


def _lanes(groups: set[Ranks], timeout: timedelta) -> Mapping[Ranks, Lane]:
    """The shared memory of those groups all of whose ranks have it."""
    this = dist.get_rank()
    identity = host_identity() if can_share() else ""
    files = _make_files(groups, this) if identity else {}
    told: list[_Told] = _all_gather(
        _Told(
            identity=identity,
            process=os.getpid(),
            cores=frozenset(os.sched_getaffinity(0)),
            files={ranks: file.place for ranks, file in files.items()},
        )
    )
    regions = _map_files(groups, told, identity)
    have = _all_gather(frozenset(regions))
    for file in files.values():
        file.close()
    shared = [ranks for ranks in regions if all(ranks in have[rank] for rank in ranks)]
    if not shared:
        return {}
    here = [rank for rank, other in enumerate(told) if other.identity == identity]
    cores = frozenset[int]().union(*(told[rank].cores for rank in here))
    peers = {rank for ranks in shared for rank in ranks} - {this}
    host = Host(
        {rank: told[rank].process for rank in sorted(peers)},
        timeout_s=timeout.total_seconds(),
        shares_cores=len(here) > len(cores),
    )
    return {
        ranks: Lane(host, regions[ranks], ranks=ranks, rank=ranks.index(this))
        for ranks in sorted(shared)
    }


def _make_files(groups: set[Ranks], this: int) -> dict[Ranks, SharedFile]:
    """Those of the groups that this rank is the first of; none where the kernel makes none."""
    with suppress(OSError):
        return {
            ranks: SharedFile(len(ranks))
            for ranks in sorted(groups)
            if ranks[0] == this and len(ranks) <= MOST_RANKS
        }
    return {}


def _map_files(groups: set[Ranks], told: Sequence[_Told], identity: str) -> dict[Ranks, Region]:
    """The regions that this rank has reached, of groups that are of its host."""
    regions = {}
    for ranks in sorted(groups):
        place = told[ranks[0]].files.get(ranks)
        if place is not None and all(told[rank].identity == identity for rank in ranks):
            with suppress(OSError, ValueError):
                regions[ranks] = Region(place, len(ranks))
    return regions


def _all_gather(value: Any) -> list[Any]:
    """Every rank's value, over all ranks of the job."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
