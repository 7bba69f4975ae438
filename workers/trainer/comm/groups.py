"""Groups of ranks. Groups whose ranks are all on one host communicate through shared memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Final, Self, TypeVar

import torch
from torch import distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.constants import default_pg_timeout

from layout_tuner.workers.trainer.comm.host_lanes import Lane
from layout_tuner.workers.trainer.comm.host_transfers import Host
from layout_tuner.workers.trainer.comm.messages import gather_documents, reading_from
from layout_tuner.workers.trainer.comm.shared_memory import (
    Region,
    SharedFile,
    can_share,
    host_identity,
)

MAX_RANKS: Final = 8
"""Largest group that uses shared memory. Each rank reads what every other one writes; in larger
groups gloo's rings move fewer bytes."""

Ranks = tuple[int, ...]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class AxisGroup:
    """The ranks of one axis of the mesh, from the view of one of them."""

    process_group: ProcessGroup
    ranks: Ranks
    """Global ranks, in the group's order."""
    rank: int
    """This rank's index in `ranks`."""
    lane: Lane | None = None
    """Shared memory of the group; None: the process group's library communicates."""

    @property
    def size(self) -> int:
        return len(self.ranks)


def make_groups(
    found: Iterable[ProcessGroup | None], *, timeout: timedelta | None, shares_memory: bool
) -> dict[ProcessGroup, AxisGroup]:
    """Describes this rank's process groups. Every rank of the job must call it at the same time.

    Communicates: two all-gathers over all ranks, where groups may share memory.

    Raises:
        PeerLostError: another rank ended meanwhile.
    """
    ranks = {group: tuple(dist.get_process_group_ranks(group)) for group in found if group}
    lanes: Mapping[Ranks, Lane] = {}
    if shares_memory and dist.is_initialized() and dist.get_backend() == "gloo":
        lanes = _lanes(set(ranks.values()), timeout or default_pg_timeout)
    this = dist.get_rank() if ranks else 0
    return {
        group: AxisGroup(process_group=group, ranks=of, rank=of.index(this), lane=lanes.get(of))
        for group, of in ranks.items()
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class _RankDescription:
    """The facts about a rank that the others need to share memory with it."""

    identity: str
    """Identity of its host; empty where it cannot share memory."""
    process: int
    cores: frozenset[int]
    """Cores that it may run on."""
    files: dict[Ranks, tuple[int, int, int]]
    """For each group of which it is the first rank, where the shared file is."""

    def to_document(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self) | {"cores": sorted(self.cores), "files": list(self.files.items())}

    @classmethod
    def from_document(cls, document: Any) -> Self:
        return cls(
            identity=str(document["identity"]),
            process=int(document["process"]),
            cores=frozenset(_whole_numbers(document["cores"])),
            files={
                _whole_numbers(ranks): _place(_whole_numbers(place))
                for ranks, place in document["files"]
            },
        )


def _lanes(groups: set[Ranks], timeout: timedelta) -> Mapping[Ranks, Lane]:
    """The shared memory of each group in which every rank could map it."""
    this = dist.get_rank()
    identity = host_identity() if can_share() else ""
    files = _make_files(groups, this) if identity else {}
    own = _RankDescription(
        identity=identity,
        process=os.getpid(),
        cores=frozenset(os.sched_getaffinity(0)),
        files={ranks: file.place for ranks, file in files.items()},
    )
    descriptions = _all_gather(own.to_document(), _RankDescription.from_document)
    regions = _map_files(groups, descriptions, identity)
    mapped = _all_gather(list(regions), lambda of: frozenset(_whole_numbers(ranks) for ranks in of))
    for file in files.values():
        file.close()
    shared = [ranks for ranks in regions if all(ranks in mapped[rank] for rank in ranks)]
    if not shared:
        return {}
    here = [rank for rank, other in enumerate(descriptions) if other.identity == identity]
    cores = frozenset[int]().union(*(descriptions[rank].cores for rank in here))
    peers = {rank for ranks in shared for rank in ranks} - {this}
    host = Host(
        {rank: descriptions[rank].process for rank in sorted(peers)},
        timeout_s=timeout.total_seconds(),
        shares_cores=len(here) > len(cores),
    )
    return {
        ranks: Lane(host, regions[ranks], ranks=ranks, rank=ranks.index(this))
        for ranks in sorted(shared)
    }


def _make_files(groups: set[Ranks], this: int) -> dict[Ranks, SharedFile]:
    """A file for each group of which this rank is the first; none where the kernel refuses."""
    with suppress(OSError):
        return {
            ranks: SharedFile(len(ranks))
            for ranks in sorted(groups)
            if ranks[0] == this and len(ranks) <= MAX_RANKS
        }
    return {}


def _map_files(
    groups: set[Ranks], descriptions: Sequence[_RankDescription], identity: str
) -> dict[Ranks, Region]:
    """Maps the files of the groups that are on this host; leaves out those that fail."""
    regions = {}
    for ranks in sorted(groups):
        place = descriptions[ranks[0]].files.get(ranks)
        if place is not None and all(descriptions[rank].identity == identity for rank in ranks):
            with suppress(OSError, ValueError):
                regions[ranks] = Region(place, len(ranks))
    return regions


def _all_gather(document: Any, read: Callable[[Any], T]) -> list[T]:
    """Every rank's document, read by `read`; an all-gather over all ranks of the job."""
    values = []
    for rank, of in enumerate(gather_documents(document, torch.device("cpu"))):
        with reading_from(rank):
            values.append(read(of))
    return values


def _whole_numbers(values: Any) -> tuple[int, ...]:
    return tuple(int(value) for value in values)


def _place(numbers: tuple[int, ...]) -> tuple[int, int, int]:
    process, descriptor, nonce = numbers
    return process, descriptor, nonce
