"""The inputs of the terms of a step, for many layouts at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from layout_tuner.array_types import Bools, Floats, Ints
from layout_tuner.predictions.estimates.activations import (
    element_bytes,
    held_tokens,
    kept_elements,
)
from layout_tuner.predictions.estimates.links import GroupLinks, LevelLinks, Links, level_links
from layout_tuner.predictions.estimates.rank_stages import RankStages, v_idle_slots
from layout_tuner.predictions.estimates.trainer_kernels import ANY_TRAINER, TrainerKernels
from layout_tuner.predictions.estimates.trainer_storage import MEGATRON_LIKE
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.layouts.layout import PRECISIONS
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns, code_of, wide_codes
from layout_tuner.search_spaces.layouts.recomputation import RECOMPUTE_MODULES
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.search_spaces.models.sublayers import has_kinds

_FP32: Final = code_of("precision", "fp32")
_FULL: Final = code_of("recompute", "full")
_ZERO_BUBBLE: Final = code_of("schedule", "zero_bubble")
_SELECTIVE: Final = code_of("recompute", "selective")

ACHIEVED_SHARES: Final[Mapping[str, float]] = {
    "A100": 0.9,
    "H100": 0.82,
    "H800": 0.82,
    "H200": 0.82,
    "GH200": 0.82,
    "MI250X": 0.58,
    "MI300X": 0.54,
}
"""Share of the peak on the data sheet that large products reach, by a part of the device's name:
A100 280 of 312 and H100 813 of 989 TFLOP/s (arXiv:2502.08145). There MI250X reaches 0.65 with the
best of all transpose modes; 0.58 is for trainers that do not choose them. MI300X 708 of 1,307
(AMD, "Measuring Max-Achievable FLOPs", part 2, bf16)."""
_USUAL_SHARE: Final = 0.8

HOST_LINKS: Final[Mapping[str, float]] = {
    **dict.fromkeys(("GH200", "GB200", "GB300"), 3.5e11),
    **dict.fromkeys(("H100", "H200", "B200", "B300", "MI3"), 5e10),
    "A100": 2.5e10,
}
"""Bytes a second in one direction between host and device, by a part of the device's name, about
0.8 of the links' rates: NVLink-C2C 450 GB/s, 16 lanes of PCIe 5 64 GB/s and of PCIe 4, the usual
one, 32 GB/s (NVIDIA's and AMD's data sheets). Hosts of HGX B300 have PCIe 5 too."""

_PARALLEL: Final = ("tp", "tp_columns", "pp", "dp_cp", "cp", "ep", "etp", "edp", "vpp")
_AS_FLOATS: Final = (*_PARALLEL, "num_microbatches")
"""Columns that terms take as they are."""


@dataclass(frozen=True, slots=True, eq=False)
class SummedParameters:
    """Parameters whose gradients the same ranks sum."""

    count: Floats
    """Parameters of a rank."""
    ranks: Floats
    """Ranks that hold them."""
    shards: Floats
    """Ranks that share one copy of what ZeRO shards."""
    links: GroupLinks
    of_layers: Floats
    """Share of them that belongs to layers."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepShape:
    """The inputs of the terms: the columns as floats, and quantities that several terms use."""

    model: ModelShape
    cluster: Cluster
    links: Links
    tp: Floats
    tp_columns: Floats
    pp: Floats
    dp_cp: Floats
    """Ranks that sum gradients: dp * cp."""
    cp: Floats
    ep: Floats
    etp: Floats
    edp: Floats
    """Ranks that hold the same experts."""
    cp_comm_type: Ints
    vpp: Floats
    num_microbatches: Floats
    tokens: Floats
    """Tokens that a rank processes of a micro-batch: 1 / cp of them."""
    precision: Ints
    """The code of the layout's precision."""
    element_bytes: Floats
    """Bytes of an activation or a weight in a matrix multiplication."""
    peak_flops_per_s: Floats
    """Speed of the fastest matrix products in the layout's precision."""
    wide_flops_per_s: Floats
    """The same of attention and the output projection, which stay in bf16 beside narrow types."""
    residual_share: Floats
    """Share of the residual stream that a rank holds: 1 / tp with sequence parallelism, else 1; and
    of the features 1 / tp_columns."""
    forward_passes: Floats
    """Forward passes of a block per micro-batch: 2 with full recomputation, else 1."""
    recomputing_share: Floats | None
    """Share of the layers that recompute on the slowest path. None: all, in every layout. Terms of
    blocks are those of layers that do (`distinct_blocks`)."""
    recomputes_attention: Floats
    """1 where the backward pass recomputes the two attention products, else 0."""
    recomputes: Mapping[str, Floats]
    """The same of the other modules of `RECOMPUTE_MODULES`."""
    offloaded_s: Floats | float
    """Seconds in which the activations of a micro-batch are sent to the host and back."""
    offloads_optimizer: Bools
    keeps_bf16_states: Bools
    repeats_operators: Floats
    """1 where it repeats every second product and what is elementwise instead, else 0."""
    zero_shards: Floats
    """Ranks that share one copy of what ZeRO shards."""
    expert_shards: Floats
    """The same of experts."""
    zero_stage: NDArray[Any]
    """What is sharded; see `Layout.zero_stage`."""
    kernels: TrainerKernels
    """How the trainer computes and communicates."""
    counted_ends: tuple[Floats, Floats]
    """Layers that embedding and head count as in the split over stages: 0 or 1 each."""
    puts_off_gradients: Bools
    """Whether the products of weight gradients wait, as with `zero_bubble`."""
    rank_layers: tuple[Bools, Floats, Floats] | None
    """Where stages are written out or in a V, with the layers of the rank that has the output, and
    of the fullest other rank (`rank_stages`). None: nowhere."""
    is_v_shaped: Bools
    """Whether a rank has both embedding and output."""
    slots: Floats
    """Stage times in a step on the slowest path: m, and those of `idle_slots`."""

    @classmethod
    def of(
        cls,
        columns: LayoutColumns,
        model: ModelShape,
        cluster: Cluster,
        kernels: TrainerKernels = ANY_TRAINER,
        levels: tuple[LevelLinks, ...] | None = None,
    ) -> StepShape:
        """`levels` are the links of the layouts whose blocks the columns stand for."""
        floats = {name: _floats(getattr(columns, name)) for name in _AS_FLOATS}
        peaks = _peaks(cluster)
        selective = np.where(columns.recompute == _SELECTIVE, 1.0, 0.0)
        scores = np.where(columns.repeats("core_attention"), 1.0, 0.0)
        by_operator = float(kernels.repeats_by_operator)
        embedding, head = map(_floats, columns.counted_ends)
        own = RankStages.of(columns, model)
        share = recomputing_share(columns, model, own)
        return cls(
            model=model,
            cluster=cluster,
            links=Links(
                columns, cluster, level_links(cluster, columns) if levels is None else levels
            ),
            **floats,
            cp_comm_type=columns.cp_comm_type,
            tokens=columns.micro_batch_size * float(model.seq_length) / floats["cp"],
            precision=columns.precision,
            element_bytes=np.where(columns.precision == _FP32, 4.0, 2.0),
            peak_flops_per_s=np.take(peaks, columns.precision),
            wide_flops_per_s=np.take(peaks, wide_codes(columns.precision)),
            residual_share=np.where(columns.sequence_parallel == 1, 1.0 / floats["tp"], 1.0)
            / floats["tp_columns"],
            forward_passes=forward_passes(columns, share),
            recomputing_share=share,
            recomputes_attention=scores - selective * by_operator,
            recomputes={name: _floats(columns.repeats(name)) for name in RECOMPUTE_MODULES[1:]},
            repeats_operators=selective * by_operator,
            offloaded_s=offloaded_s(columns, model, cluster),
            offloads_optimizer=columns.offload == code_of("offload", "optimizer"),
            keeps_bf16_states=columns.optimizer_states == code_of("optimizer_states", "bf16"),
            zero_shards=_floats(columns.zero_group_size),
            expert_shards=_floats(columns.expert_zero_group_size),
            zero_stage=columns.zero_stage,
            kernels=kernels,
            counted_ends=(embedding, head),
            puts_off_gradients=columns.splits_backward,
            rank_layers=_rank_layers(columns, own),
            is_v_shaped=columns.is_v_shaped,
            slots=floats["num_microbatches"] + idle_slots(columns, share),
        )

    @property
    def backward_share(self) -> Floats:
        """Share of the blocks' work in a step behind which data parallelism can hide.

        This is the last micro-batch's backward pass; with ZeRO-2 that of every micro-batch, and
        with ZeRO-3 every pass. Where ZeRO-1 also gathers beside forward passes, it is one
        micro-batch.
        """
        passes = 1.0 + self.forward_passes
        backward = passes / (1.0 + passes) / self.slots
        share = np.where(self.zero_stage >= 2, self.num_microbatches, 1.0) * backward
        if self.kernels.overlaps_from == 1:
            share = np.where(self.zero_stage == 1, 1.0 / self.slots, share)
        every = self.num_microbatches / self.slots
        return np.asarray(np.where(self.zero_stage == 3, every, share), dtype=np.float64)

    @property
    def tp_ranks(self) -> Floats:
        """Ranks that hold one copy of a stage's weights."""
        return self.tp * self.tp_columns

    @property
    def token_share(self) -> Floats:
        """Share of a micro-batch's tokens that a rank holds between layers."""
        return self.residual_share * self.tp_columns

    @property
    def layer_slots(self) -> Floats:
        """Layer times in a step on the slowest path, for layers that are split evenly."""
        return self.model.num_layers / self.pp * self.slots

    @property
    def expert_slots(self) -> Floats:
        """The same of the layers with experts."""
        return self.layer_slots * (self.model.num_expert_layers / self.model.num_layers)

    @property
    def expert_tokens(self) -> Floats:
        """Tokens that a rank brings to its experts: those of its residual stream, over etp."""
        return self.tokens * self.residual_share * self.etp

    @property
    def summed_parameters(self) -> Iterator[SummedParameters]:
        """What the ranks of a layout sum the gradients of: experts are a group of their own."""
        whole, ranks = self.rank_parameters, self.pp * self.tp_ranks
        share = self.model.num_layers * self.layer_parameters / ranks / whole
        yield SummedParameters(whole, self.dp_cp, self.zero_shards, self.links.data, share)
        if self.model.num_experts:
            mtp = self.model.num_mtp_layers * any(
                "experts" in kind for kind in self.model.mtp_kinds
            )
            layers = self.model.num_expert_layers + sum(self.counted_ends) + mtp
            if self.rank_layers is not None:
                is_own, last, most = self.rank_layers
                of_experts = self.model.num_expert_layers / self.model.num_layers
                layers = np.where(
                    is_own, np.maximum(last + mtp, most) * self.pp * of_experts, layers
                )
            experts = self.model.num_expert_parameters * layers / (self.pp * self.etp * self.ep)
            links = self.links.expert_data
            share = np.ones(experts.shape)
            yield SummedParameters(experts, self.edp, self.expert_shards, links, share)

    @property
    def layer_parameters(self) -> Floats:
        """Parameters of a layer outside of experts, as a mean."""
        return mean_of_layers(
            self.model,
            lambda shape: _floats(shape.num_layer_parameters - shape.num_expert_parameters),
        )

    @property
    def rank_parameters(self) -> Floats:
        """Parameters of the fullest rank: its layers, and the larger of embedding and output.

        A stage between the ends may be the fullest where embedding or output count as a layer.
        Experts are not among them.
        """
        model, (embedding, head) = self.model, self.counted_ends
        a_layer = self.layer_parameters
        of_head = float(model.num_head_parameters + num_mtp_parameters(model))
        first = float(model.num_embedding_parameters) - embedding * a_layer
        last = of_head - head * a_layer
        one = np.maximum(np.maximum(first, last), np.where(self.pp > 2, 0.0, -np.inf))
        ends = float(model.num_embedding_parameters) + of_head
        outside = np.where(self.pp > 1, one, ends)
        layers = (model.num_layers + embedding + head) * a_layer / self.pp
        held = layers + outside
        if self.rank_layers is not None:
            is_own, of_last, most = self.rank_layers
            with_output = of_last * a_layer + np.where(self.is_v_shaped, ends, of_head)
            with_input = most * a_layer + np.where(
                self.is_v_shaped, 0.0, float(model.num_embedding_parameters)
            )
            held = np.where(is_own, np.maximum(with_output, with_input), held)
        if whole := mean_of_kinds(model, lambda of: of.mixer_parts.num_whole_matrix_parameters):
            held = held + (self.tp - 1.0) * whole * model.num_layers / self.pp
        return np.asarray(held / self.tp_ranks, dtype=np.float64)


def mean_of_layers(model: ModelShape, of: Callable[[ModelShape], Floats]) -> Floats:
    """The mean of a quantity over the layers, of each kind as a shape of its own.

    Of dense first layers and those with experts, `of` takes the model itself: layers with and
    without a window are alike.
    """
    if has_kinds(model):
        total = sum(len(each.layers) * of(each.shape) for each in model.kinds)
        return np.asarray(total / model.num_layers, dtype=np.float64)
    if not model.num_dense_layers:
        return of(model)
    share = model.num_dense_layers / model.num_layers
    return np.asarray((1.0 - share) * of(model) + share * of(model.dense))


def mean_of_kinds(model: ModelShape, of: Callable[[ModelShape], float]) -> float:
    """The mean of a number over the layers."""
    return sum(len(each.layers) * of(each.shape) for each in model.kinds) / model.num_layers


def num_mtp_parameters(model: ModelShape) -> int:
    """Parameters of all depths of multi-token prediction, without their experts."""
    routed = model.num_expert_parameters * sum("experts" in kind for kind in model.mtp_kinds)
    return model.num_mtp_layers * (model.num_mtp_parameters - routed)


def _floats(values: Any) -> Floats:
    return np.asarray(values, dtype=np.float64)


def _peaks(cluster: Cluster) -> Floats:
    """FLOP/s of the fastest products by the precision's code.

    Where no peak is stated, it is a guess from the memory bandwidth.

    A processor core does about 10 operations per byte of memory bandwidth, an accelerator about 150
    (NVIDIA's data sheets: A100 153, at 16 bits).
    """
    stated = cluster.peak_flops_per_s
    a_byte = 150.0 if cluster.memory_bandwidth_bytes_per_s > 3e11 else 10.0
    guess = max(stated.values(), default=a_byte * cluster.memory_bandwidth_bytes_per_s)
    if cluster.is_measured:
        share = 1.0  # the peak is that of a product already
    else:
        known = (share for part, share in ACHIEVED_SHARES.items() if part in cluster.device)
        share = next(known, _USUAL_SHARE)
    return np.array([share * stated.get(precision, guess) for precision in PRECISIONS])


def offloaded_s(columns: LayoutColumns, model: ModelShape, cluster: Cluster) -> Floats | float:
    """Seconds in which all layers but two send their activations to the host and take them back."""
    is_here = columns.offload == code_of("offload", "activations")
    if not is_here.any():
        return 0.0
    known = (speed for part, speed in HOST_LINKS.items() if part in cluster.device)
    link = next(known, HOST_LINKS["A100"])
    kept = mean_of_layers(model, lambda shape: kept_elements(columns, shape, MEGATRON_LIKE))
    kept_bytes = element_bytes(columns) * held_tokens(columns, model) * kept
    return np.where(is_here, 2.0 * max(model.num_layers - 2, 0) * kept_bytes / link, 0.0)


def recomputing_share(
    columns: LayoutColumns, model: ModelShape, own: RankStages | None
) -> Floats | None:
    """Share of the layers that recompute on the slowest path; None: all, in every layout.

    A pipeline takes (m - 1) times its slowest stage, and once the sum of all stages. `own` are the
    stages of pipelines that are written out.
    """
    if not columns.pipeline_layout.any():
        own = None
    even = model.num_layers / columns.pp
    shares = columns.recomputing_shares(
        model.num_layers,
        None if own is None else lambda rank: np.where(own.is_own, own.layers(rank), even),
    )
    if shares is None:
        return None
    later = columns.num_microbatches - 1.0
    return np.asarray((later * shares[1] + columns.pp * shares[0]) / (later + columns.pp))


def idle_slots(columns: LayoutColumns, share: Floats | None = None) -> Floats:
    """Stage times of a step in which a stage of the pipeline waits: (p - 1) / v.

    A zero-bubble schedule has (p - 1) (F + B) - (min(m, p) - 1) W, from the tables of `schedules`,
    with a forward pass F, as much for the products of weight gradients W, and a backward pass B
    beside them that also takes as long as each forward pass that it repeats. V-shaped schedules
    have that of their tables.
    """
    later = columns.pp - 1.0
    if not columns.splits_backward.any():
        return np.asarray(later / columns.vpp, dtype=np.float64)
    if columns.is_v_shaped.any():
        own = v_idle_slots(columns, forward_passes(columns, share))
        plain = replace(columns, schedule=np.where(columns.is_v_shaped, 0, columns.schedule))
        return np.where(columns.is_v_shaped, own, idle_slots(plain, share))
    passes = 1.0 + forward_passes(columns, share)
    late = np.minimum(columns.num_microbatches, columns.pp) - 1.0
    return np.where(
        columns.schedule == _ZERO_BUBBLE,
        (later * passes - late) / (passes + 1.0),
        later / columns.vpp,
    )


def _rank_layers(
    columns: LayoutColumns, own: RankStages | None
) -> tuple[Bools, Floats, Floats] | None:
    if own is None:
        return None
    return own.is_own, *own.last_and_most(np.broadcast_to(columns.last_rank, columns.shape))


def forward_passes(columns: LayoutColumns, share: Floats | None) -> Floats:
    """Forward passes of a step's blocks, those of full recomputation included."""
    return np.where(columns.recompute == _FULL, 2.0 if share is None else 1.0 + share, 1.0)
