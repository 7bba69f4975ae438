"""The mesh: where a rank of a job is on the axes tp, dp and pp, and on the nodes."""

from __future__ import annotations

from dataclasses import dataclass

from search_spaces.spec.layout import Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class Coordinates:
    """A rank's position on the three axes. tp varies fastest, then dp, then pp (Megatron-LM)."""

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


def ranks_per_node(num_ranks: int, num_nodes: int) -> int:
    """Ranks on each node: they fill one node after the other, so that tp stays inside a node."""
    return -(-num_ranks // num_nodes)
