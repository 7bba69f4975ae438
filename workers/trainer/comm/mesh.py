"""A rank's view of the mesh: its coordinates, and its process group on each axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Final

from torch import Tensor
from torch import distributed as dist
from torch.distributed import ProcessGroup

from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.layouts.rank_mesh import (
    Coordinates,
    coordinates,
    expert_coordinates,
    expert_rank,
    global_rank,
)
from layout_tuner.workers.trainer.batches import own_chunks
from layout_tuner.workers.trainer.comm.groups import AxisGroup, make_groups
from layout_tuner.workers.trainer.errors import RankContextInvalidError
from layout_tuner.workers.trainer.trainer_options import DEFAULT_OPTIONS, TrainerOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class Copies:
    """The ranks that hold the same parameters and sum their gradients, seen from one of them.

    ZeRO divides what they hold among `num_shards` neighbours.
    """

    size: int = 1
    index: int = 0
    """This rank's place among them."""
    num_shards: int = 1
    """Number of parts of what ZeRO divides; 1 if every rank holds all of it."""
    zero_stage: int = 0
    shard_group: AxisGroup | None = None
    """Ranks that share one copy of what ZeRO divides."""
    replica_group: AxisGroup | None = None
    """Ranks that own the same part of it; with ZeRO-0, all."""

    @property
    def shards_gradients(self) -> bool:
        """Whether a rank keeps only its own share of the gradients (ZeRO-2 and 3)."""
        return self.zero_stage >= 2 and self.num_shards > 1

    @property
    def shards_weights(self) -> bool:
        """Whether a rank keeps only its own share of the weights (ZeRO-3)."""
        return self.zero_stage >= 3 and self.num_shards > 1

    @property
    def shard_rank(self) -> int:
        """The part that this rank owns; neighbours own different parts."""
        return self.index % self.num_shards

    @property
    def replica_rank(self) -> int:
        """This rank's index among the ranks that own the same part."""
        return self.index // self.num_shards

    @property
    def num_replicas(self) -> int:
        """Ranks that own the same part."""
        return self.size // self.num_shards


NO_OTHER: Final = Copies()
"""One rank holds the parameters."""


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
    column_group: AxisGroup | None = None
    """Ranks that hold the other columns of this rank's weights, and of its tokens' features."""
    vocabulary_group: AxisGroup | None = None
    """Ranks that divide the vocabulary: those of tp and of tensor columns."""
    pp_group: AxisGroup | None
    """Stages of this rank's pipeline, first to last."""
    embedding_group: AxisGroup | None
    """First and last stage of this rank's pipeline, if they share a tied embedding."""
    world_group: AxisGroup | None = None
    """All ranks of the job."""
    cp_group: AxisGroup | None = None
    """Ranks that share each sequence."""
    ep_group: AxisGroup | None = None
    """Ranks that each hold some of a layer's experts."""
    etp_group: AxisGroup | None = None
    """Ranks that share the weight matrices of the same experts."""
    copies: Copies = NO_OTHER
    """Ranks of dp and cp, which hold the same weights."""
    expert_copies: Copies = NO_OTHER
    """Ranks that hold the same experts; the same object where these are the same ranks."""
    options: TrainerOptions = DEFAULT_OPTIONS
    """How the ranks train."""

    @property
    def cuts_tokens(self) -> bool:
        """Whether a rank holds 1/tp of a micro-batch's tokens between the parallel layers."""
        return self.layout.sequence_parallel and self.layout.tp > 1

    @property
    def vocabulary_rank(self) -> int:
        """This rank's place among those that divide the vocabulary."""
        return self.place.tp_rank * self.layout.tp_columns + self.place.column_rank

    @property
    def every_copies(self) -> tuple[Copies, ...]:
        """`copies`, and `expert_copies` where they differ."""
        same = self.expert_copies is self.copies
        return (self.copies,) if same else (self.copies, self.expert_copies)

    def copies_of(self, *, experts: bool) -> Copies:
        """The ranks that hold the same parameters: those of experts, or the others."""
        return self.expert_copies if experts else self.copies

    @property
    def shards_gradients(self) -> bool:
        """Whether a rank keeps only its own share of some gradients (ZeRO-2 and 3)."""
        return any(copies.shards_gradients for copies in self.every_copies)

    @property
    def shards_weights(self) -> bool:
        """Whether a rank keeps only its own share of some weights (ZeRO-3)."""
        return any(copies.shards_weights for copies in self.every_copies)

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
    has_experts: bool = False,
    timeout: timedelta | None = None,
    shares_memory: bool = True,
    options: TrainerOptions = DEFAULT_OPTIONS,
) -> Mesh:
    """Makes the process groups of every axis longer than one. All ranks call it.

    The default process group must be initialised.

    Args:
        rank: this rank.
        layout: the layout of the job.
        tied_embeddings: whether the first and the last stage share a weight.
        has_experts: whether the model has layers with experts.
        timeout: how long a collective of these groups waits for a peer; None: torch's default.
            torch does not apply the default group's timeout to new groups.
        shares_memory: whether ranks of one host exchange CPU tensors through shared memory.
        options: how the ranks train.

    Raises:
        RankContextInvalidError: the size of the default group differs from the layout's.
        PeerLostError: another rank ended meanwhile.
    """
    refuse_wrong_world(layout, dist.get_world_size())
    axes = _axes(rank, layout, has_experts=has_experts)
    if layout.pp > 1 and tied_embeddings:
        first, *between, last = axes["pp"]
        # NCCL splits the world's communicator for each group, in which every rank must take part.
        # The stages between the ends therefore make a group that is never used.
        axes |= {"unused": between} if rank in between else {"embedding": [first, last]}
    make = _Groups(layout, timeout)
    made = {
        name: make.of(ranks, is_needed=name == "unused")
        for name, ranks in axes.items()
        if not name.endswith("copies")
    }
    described = make_groups(made.values(), timeout=timeout, shares_memory=shares_memory)
    groups = {name: described[group] if group else None for name, group in made.items()}

    def copies_of(whose: str, num_shards: int) -> Copies:
        ranks = axes[f"{whose}copies"]
        return Copies(
            size=len(ranks),
            index=ranks.index(rank),
            num_shards=num_shards,
            zero_stage=layout.zero_stage,
            shard_group=groups[f"{whose}shard"],
            replica_group=groups[f"{whose}replica"],
        )

    copies = expert_copies = copies_of("", layout.zero_group_size)
    if axes["expert_copies"] != axes["copies"]:
        expert_copies = copies_of("expert_", layout.expert_zero_group_size)
    names = ("tp", "column", "vocabulary", "cp", "pp", "ep", "etp", "embedding", "world")
    return Mesh(
        layout=layout,
        rank=rank,
        place=coordinates(rank, layout),
        copies=copies,
        expert_copies=expert_copies,
        options=options,
        **{f"{name}_group": groups.get(name) for name in names},
    )


def _axes(rank: int, layout: Layout, *, has_experts: bool) -> dict[str, list[int]]:
    """The global ranks along each axis through this rank, and those that hold the same."""
    place, experts = coordinates(rank, layout), expert_coordinates(rank, layout)

    def line(name: str, length: int) -> list[int]:
        return [global_rank(replace(place, **{f"{name}_rank": i}), layout) for i in range(length)]

    def expert_line(name: str, length: int) -> list[int]:
        places = (replace(experts, **{f"{name}_rank": i}) for i in range(length))
        return [expert_rank(each, place.pp_rank, layout) for each in places]

    axes = {name: line(name, getattr(layout, name)) for name in ("tp", "cp", "pp")}
    first = rank - rank % layout.tp_ranks
    axes |= {"column": line("column", layout.tp_columns)}
    axes |= {"vocabulary": list(range(first, first + layout.tp_ranks))}
    copies = [
        global_rank(replace(place, dp_rank=dp_rank, cp_rank=cp_rank), layout)
        for dp_rank in range(layout.dp)
        for cp_rank in range(layout.cp)
    ]
    axes |= {"world": list(range(layout.num_devices)), "copies": copies, "expert_copies": copies}
    axes |= _divided("", copies, layout.zero_group_size, rank)
    if has_experts:
        axes |= {name: expert_line(name, getattr(layout, name)) for name in ("ep", "etp")}
        axes["expert_copies"] = same = expert_line("edp", layout.edp)
        axes |= _divided("expert_", same, layout.expert_zero_group_size, rank)
    return axes


def _divided(whose: str, ranks: list[int], num_shards: int, rank: int) -> dict[str, list[int]]:
    """Of ranks that hold the same: those that divide it, and those that own the same part."""
    own = ranks.index(rank)
    first = own - own % num_shards
    return {
        f"{whose}shard": ranks[first : first + num_shards],
        f"{whose}replica": ranks[own % num_shards :: num_shards],
    }


def refuse_wrong_world(layout: Layout, world_size: int) -> None:
    """Raises RankContextInvalidError unless the layout has exactly this many ranks."""
    if world_size != layout.num_devices:
        degrees = " x ".join(f"{name}={degree}" for name, degree in layout.degrees.items())
        raise RankContextInvalidError(
            f"{world_size} ranks were started for a layout of {degrees} = {layout.num_devices}; "
            "start exactly that many"
        )


class _Groups:
    """Makes process groups, of the same ranks only once."""

    def __init__(self, layout: Layout, timeout: timedelta | None) -> None:
        self._num_ranks, self._timeout = layout.num_devices, timeout
        self._made: dict[tuple[int, ...], ProcessGroup] = {}

    def of(self, ranks: Sequence[int], *, is_needed: bool = False) -> ProcessGroup | None:
        """The group of these global ranks, which alone take part in making it.

        None for one rank, unless it is needed.
        """
        if len(ranks) < 2 and not is_needed:
            return None
        if len(ranks) == self._num_ranks:
            return dist.group.WORLD
        key = tuple(ranks)
        if key not in self._made:
            group = dist.new_group(list(ranks), self._timeout, use_local_synchronization=True)
            self._made[key] = group
        return self._made[key]
