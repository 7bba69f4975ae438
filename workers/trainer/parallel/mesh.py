"""The mesh: which ranks share a weight matrix, a pipeline, a replica."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from torch import distributed as dist
from torch.distributed import ProcessGroup

from search_spaces.layout import Layout
from workers.trainer.errors import RankContextInvalidError
from workers.trainer.groups import Group, make_groups


@dataclass(frozen=True, kw_only=True, slots=True)
class Coordinates:
    """A rank's position on the three axes; tp varies fastest, then dp, then pp, as in Megatron-LM."""

    tp_rank: int
    dp_rank: int
    pp_rank: int


def coordinates(rank: int, layout: Layout) -> Coordinates:
    """The position of a global rank: rank = (pp_rank * dp + dp_rank) * tp + tp_rank."""
    return Coordinates(
        tp_rank=rank % layout.tp,
        dp_rank=rank // layout.tp % layout.dp,
        pp_rank=rank // (layout.tp * layout.dp),
    )


def global_rank(place: Coordinates, layout: Layout) -> int:
    """The global rank of a position."""
    return (place.pp_rank * layout.dp + place.dp_rank) * layout.tp + place.tp_rank


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """One rank's view of the job: its coordinates, and the group of each axis that it is on."""

    layout: Layout
    rank: int
    place: Coordinates
    tp_group: Group | None
    """Ranks that share this rank's weight matrices; None when tp is 1, as for the others."""
    shard_group: Group | None
    """Data-parallel ranks that share one copy of the optimizer states (ZeRO-1)."""
    replica_group: Group | None
    """Data-parallel ranks that own the same part of the optimizer states; all, under ZeRO-0."""
    pp_group: Group | None
    """Stages of this rank's pipeline, first to last."""
    embedding_group: Group | None
    """First and last stage of this rank's pipeline, when they share a tied embedding."""
    world_group: Group | None = None
    """All ranks of the job."""

    @property
    def cuts_tokens(self) -> bool:
        """Whether a rank holds 1/tp of a micro-batch's tokens between the parallel layers."""
        return self.layout.sequence_parallel and self.layout.tp > 1

    @property
    def num_shards(self) -> int:
        """Parts that the optimizer states are cut into: 1 where every replica holds all of them."""
        return self.layout.zero_group_size

    @property
    def shard_rank(self) -> int:
        """Which of those parts this rank owns; neighbours on the dp axis own different ones."""
        return self.place.dp_rank % self.num_shards

    @property
    def replica_rank(self) -> int:
        """Which of the ranks that own the same part this is."""
        return self.place.dp_rank // self.num_shards

    def stage_rank(self, pp_rank: int) -> int:
        """The global rank of another stage of this rank's pipeline."""
        place = Coordinates(tp_rank=self.place.tp_rank, dp_rank=self.place.dp_rank, pp_rank=pp_rank)
        return global_rank(place, self.layout)


def build_mesh(
    rank: int,
    layout: Layout,
    *,
    tied_embeddings: bool,
    timeout: timedelta | None = None,
    shares_memory: bool = True,
) -> Mesh:
    """Makes the process groups of every axis longer than one; the default group must be up.

    Args:
        rank: this rank.
        layout: the job's.
        tied_embeddings: whether the first and the last stage share a weight.
        timeout: how long a collective of these groups waits for a peer; torch does not hand the
            default group's on. None: torch's own.
        shares_memory: whether ranks of one host exchange CPU tensors through memory that they share.

    Raises:
        RankContextInvalidError: the default group has another size than the layout.
        PeerLostError: another rank has ended meanwhile.
    """
    refuse_wrong_world(layout, dist.get_world_size())
    place = coordinates(rank, layout)
    tp_rank, dp_rank, pp_rank = place.tp_rank, place.dp_rank, place.pp_rank
    tp_places = [(i, dp_rank, pp_rank) for i in range(layout.tp)]
    shards = layout.zero_group_size
    first = dp_rank - dp_rank % shards
    shard_places = [(tp_rank, i, pp_rank) for i in range(first, first + shards)]
    owners = range(dp_rank % shards, layout.dp, shards)
    replica_places = [(tp_rank, i, pp_rank) for i in owners]
    pp_places = [(tp_rank, dp_rank, i) for i in range(layout.pp)]
    ends, between = [pp_places[0], pp_places[-1]], pp_places[1:-1]
    is_end = pp_rank in (0, layout.pp - 1)
    has_ends = layout.pp > 1 and tied_embeddings
    found = {
        "tp_group": _group(tp_places, layout, timeout),
        "shard_group": _group(shard_places, layout, timeout),
        "replica_group": _group(replica_places, layout, timeout),
        "pp_group": _group(pp_places, layout, timeout),
        "embedding_group": _ends_group(ends, between, layout, timeout, is_end=is_end)
        if has_ends
        else None,
        "world_group": dist.group.WORLD if layout.num_devices > 1 else None,
    }
    groups = make_groups(found.values(), timeout=timeout, shares_memory=shares_memory)
    return Mesh(
        layout=layout,
        rank=rank,
        place=place,
        **{name: groups[group] if group else None for name, group in found.items()},
    )


def _ends_group(
    ends: list[tuple[int, int, int]],
    between: list[tuple[int, int, int]],
    layout: Layout,
    timeout: timedelta | None,
    *,
    is_end: bool,
) -> ProcessGroup | None:
    """The group of a pipeline's two ends; the stages between them make one that nobody uses.

    NCCL splits the world's communicator for each group, in which every rank must take part.
    """
    if is_end:
        return _group(ends, layout, timeout)
    _new_group(between, layout, timeout)
    return None


def refuse_wrong_world(layout: Layout, world_size: int) -> None:
    """Raises RankContextInvalidError unless the layout has exactly this many ranks."""
    if world_size != layout.num_devices:
        raise RankContextInvalidError(
            f"{world_size} ranks were started for a layout of tp={layout.tp} x pp={layout.pp} x "
            f"dp={layout.dp} = {layout.num_devices}; start exactly that many"
        )


def _group(
    places: list[tuple[int, int, int]], layout: Layout, timeout: timedelta | None
) -> ProcessGroup | None:
    """The group of these positions; only they take part in making it."""
    if len(places) < 2:
        return None
    if len(places) == layout.num_devices:
        return dist.group.WORLD
    return _new_group(places, layout, timeout)


def _new_group(
    places: list[tuple[int, int, int]], layout: Layout, timeout: timedelta | None
) -> ProcessGroup:
    ranks = [
        global_rank(Coordinates(tp_rank=tp, dp_rank=dp, pp_rank=pp), layout)
        for tp, dp, pp in places
    ]
    group: ProcessGroup = dist.new_group(ranks, timeout, use_local_synchronization=True)
    return group
