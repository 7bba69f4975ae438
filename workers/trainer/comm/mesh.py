"""A rank's view of the mesh: its coordinates, and its process group on each axis."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial

from torch import Tensor
from torch import distributed as dist
from torch.distributed import ProcessGroup

from search_spaces.mesh import Coordinates, coordinates, global_rank
from search_spaces.spec.layout import Layout
from workers.trainer.batches import own_chunks
from workers.trainer.comm.groups import AxisGroup, make_groups
from workers.trainer.errors import RankContextInvalidError


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """One rank's view of the job: its coordinates, and its group on each axis.

    A group is None where it would have one rank.
    """

    layout: Layout
    rank: int
    place: Coordinates
    tp_group: AxisGroup | None
    """Ranks that share this rank's weight matrices."""
    shard_group: AxisGroup | None
    """Ranks of dp and cp that share one copy of what ZeRO divides."""
    replica_group: AxisGroup | None
    """Ranks of dp and cp that own the same part of it; with ZeRO-0, all."""
    pp_group: AxisGroup | None
    """Stages of this rank's pipeline, first to last."""
    embedding_group: AxisGroup | None
    """First and last stage of this rank's pipeline, if they share a tied embedding."""
    world_group: AxisGroup | None = None
    """All ranks of the job."""
    cp_group: AxisGroup | None = None
    """Ranks that share each sequence."""

    @property
    def cuts_tokens(self) -> bool:
        """Whether a rank holds 1/tp of a micro-batch's tokens between the parallel layers."""
        return self.layout.sequence_parallel and self.layout.tp > 1

    @property
    def num_shards(self) -> int:
        """Number of parts of the optimizer states; 1 if every replica holds all of them."""
        return self.layout.zero_group_size

    @property
    def shards_gradients(self) -> bool:
        """Whether a rank keeps only its own share of the gradients (ZeRO-2 and 3)."""
        return self.layout.zero_stage >= 2 and self.num_shards > 1

    @property
    def shards_weights(self) -> bool:
        """Whether a rank keeps only its own share of the weights (ZeRO-3)."""
        return self.layout.zero_stage >= 3 and self.num_shards > 1

    @property
    def shard_rank(self) -> int:
        """The part that this rank owns; neighbours on dp and cp own different parts."""
        return self._data_rank % self.num_shards

    @property
    def replica_rank(self) -> int:
        """This rank's index among the ranks that own the same part."""
        return self._data_rank // self.num_shards

    @property
    def _data_rank(self) -> int:
        """This rank's index among the dp * cp ranks with the same weights."""
        return self.place.dp_rank * self.layout.cp + self.place.cp_rank

    def own_positions(self, whole: Tensor) -> Tensor:
        """This rank's rows of a tensor with a row for each position of a sequence."""
        return own_chunks(whole, self.layout.cp, self.place.cp_rank)

    def stage_rank(self, pp_rank: int) -> int:
        """The global rank of another stage of this rank's pipeline."""
        return global_rank(replace(self.place, pp_rank=pp_rank), self.layout)


def build_mesh(
    rank: int,
    layout: Layout,
    *,
    tied_embeddings: bool,
    timeout: timedelta | None = None,
    shares_memory: bool = True,
) -> Mesh:
    """Makes the process groups of every axis longer than one. All ranks call it.

    The default process group must be initialised.

    Args:
        rank: this rank.
        layout: the layout of the job.
        tied_embeddings: whether the first and the last stage share a weight.
        timeout: how long a collective of these groups waits for a peer; None: torch's default.
            torch does not apply the default group's timeout to new groups.
        shares_memory: whether ranks of one host exchange CPU tensors through shared memory.

    Raises:
        RankContextInvalidError: the size of the default group differs from the layout's.
        PeerLostError: another rank ended meanwhile.
    """
    refuse_wrong_world(layout, dist.get_world_size())
    place = coordinates(rank, layout)
    shards = layout.zero_group_size
    same_weights = [
        replace(place, dp_rank=dp_rank, cp_rank=cp_rank)
        for dp_rank in range(layout.dp)
        for cp_rank in range(layout.cp)
    ]
    own = same_weights.index(place)
    first_shard = own - own % shards
    pp_places = [replace(place, pp_rank=i) for i in range(layout.pp)]
    make = partial(_group, layout=layout, timeout=timeout)
    found = {
        "tp_group": make([replace(place, tp_rank=i) for i in range(layout.tp)]),
        "cp_group": make([replace(place, cp_rank=i) for i in range(layout.cp)]),
        "shard_group": make(same_weights[first_shard : first_shard + shards]),
        "replica_group": make(same_weights[own % shards :: shards]),
        "pp_group": make(pp_places),
        "embedding_group": None,
        "world_group": dist.group.WORLD if layout.num_devices > 1 else None,
    }
    if layout.pp > 1 and tied_embeddings:
        if place.pp_rank in (0, layout.pp - 1):
            found["embedding_group"] = make([pp_places[0], pp_places[-1]])
        else:
            # NCCL splits the world's communicator for each group, in which every rank must take
            # part. The stages between the ends therefore make a group that is never used.
            _new_group(pp_places[1:-1], layout, timeout)
    groups = make_groups(found.values(), timeout=timeout, shares_memory=shares_memory)
    return Mesh(
        layout=layout,
        rank=rank,
        place=place,
        **{name: groups[group] if group else None for name, group in found.items()},
    )


def refuse_wrong_world(layout: Layout, world_size: int) -> None:
    """Raises RankContextInvalidError unless the layout has exactly this many ranks."""
    if world_size != layout.num_devices:
        degrees = " x ".join(f"{name}={degree}" for name, degree in layout.degrees.items())
        raise RankContextInvalidError(
            f"{world_size} ranks were started for a layout of {degrees} = {layout.num_devices}; "
            "start exactly that many"
        )


def _group(
    places: list[Coordinates], layout: Layout, timeout: timedelta | None
) -> ProcessGroup | None:
    """The group of these positions, which alone take part in making it; None for one rank."""
    if len(places) < 2:
        return None
    if len(places) == layout.num_devices:
        return dist.group.WORLD
    return _new_group(places, layout, timeout)


def _new_group(
    places: list[Coordinates], layout: Layout, timeout: timedelta | None
) -> ProcessGroup:
    ranks = [global_rank(place, layout) for place in places]
    group: ProcessGroup = dist.new_group(ranks, timeout, use_local_synchronization=True)
    return group
