"""The mesh: where a rank of a job is on the axes of a layout, and on the nodes."""

from __future__ import annotations

from dataclasses import dataclass

from layout_tuner.search_spaces.layouts.layout import Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class Coordinates:
    """A rank's position on the axes.

    Tensor columns vary fastest, then tp, cp, dp and pp (AxoNN; without columns Megatron-LM), or
    with another `Layout.rank_order` pp before dp (Megatron-LM's --use-tp-pp-dp-mapping).
    """

    column_rank: int = 0
    tp_rank: int
    cp_rank: int = 0
    dp_rank: int
    pp_rank: int


def coordinates(rank: int, layout: Layout) -> Coordinates:
    """The position of a global rank.

    It is number ((outer * cp + cp_rank) * tp + tp_rank) * tp_columns + column_rank, where outer is
    pp_rank * dp + dp_rank, or dp_rank * pp + pp_rank.
    """
    rest, column_rank = divmod(rank, layout.tp_columns)
    rest, tp_rank = divmod(rest, layout.tp)
    rest, cp_rank = divmod(rest, layout.cp)
    if layout.rank_order == "tp_cp_dp_pp":
        pp_rank, dp_rank = divmod(rest, layout.dp)
    else:
        dp_rank, pp_rank = divmod(rest, layout.pp)
    return Coordinates(
        column_rank=column_rank, tp_rank=tp_rank, cp_rank=cp_rank, dp_rank=dp_rank, pp_rank=pp_rank
    )


def global_rank(place: Coordinates, layout: Layout) -> int:
    if layout.rank_order == "tp_cp_dp_pp":
        outer = place.pp_rank * layout.dp + place.dp_rank
    else:
        outer = place.dp_rank * layout.pp + place.pp_rank
    rest = (outer * layout.cp + place.cp_rank) * layout.tp + place.tp_rank
    return rest * layout.tp_columns + place.column_rank


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertCoordinates:
    """A rank's position among the ranks of its stage that hold experts.

    Attention divides the ranks of a stage by tp, cp and dp, experts by etp, ep and edp ("parallel
    folding", arXiv:2504.14960); etp varies fastest.
    """

    etp_rank: int
    ep_rank: int
    edp_rank: int


def expert_coordinates(rank: int, layout: Layout) -> ExpertCoordinates:
    """The position of a rank, number (edp_rank * ep + ep_rank) * etp + etp_rank of its stage.

    Without tensor columns, which models with experts do not have.
    """
    place = coordinates(rank, layout)
    of_stage = (place.dp_rank * layout.cp + place.cp_rank) * layout.tp + place.tp_rank
    rest, etp_rank = divmod(of_stage, layout.etp)
    edp_rank, ep_rank = divmod(rest, layout.ep)
    return ExpertCoordinates(etp_rank=etp_rank, ep_rank=ep_rank, edp_rank=edp_rank)


def expert_rank(place: ExpertCoordinates, pp_rank: int, layout: Layout) -> int:
    """The global rank of a position of a stage."""
    of_stage = (place.edp_rank * layout.ep + place.ep_rank) * layout.etp + place.etp_rank
    rest, tp_rank = divmod(of_stage, layout.tp)
    dp_rank, cp_rank = divmod(rest, layout.cp)
    at = Coordinates(tp_rank=tp_rank, cp_rank=cp_rank, dp_rank=dp_rank, pp_rank=pp_rank)
    return global_rank(at, layout)


def sequence_chunks(cp: int, cp_rank: int) -> list[int]:
    """The two of a sequence's 2 cp equal chunks that a context-parallel rank holds.

    With the head and the tail of the sequence in pairs, causal attention is the same work on every
    rank.
    """
    return [cp_rank, 2 * cp - 1 - cp_rank]


def ranks_per_node(num_ranks: int, num_nodes: int) -> int:
    """Ranks on each node: they fill one node after the other, so that tp stays inside a node."""
    return -(-num_ranks // num_nodes)
