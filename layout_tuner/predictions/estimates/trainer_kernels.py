"""What a trainer's kernels and collectives do, as far as the time of a step depends on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from layout_tuner.predictions.estimates.trainer_storage import storage_hypotheses
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.models.model_shape import ModelShape

_FUSED_TRAFFIC: Final = 0.04
"""Traffic of attention scores in fused attention, over that of scores which are stored: d^2 / M of
the scores (arXiv:2205.14135, theorem 2) with heads of 128 and 192 KiB of shared memory, over the
passes that `time_terms.SCORE_PASSES` counts. A trainer that is known to fuse is not charged for it:
it is in the rates of fused attention."""

_NEVER: Final = 4
"""A ZeRO stage that does not exist."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerKernels:
    """How a trainer computes and communicates; the time's counterpart of `TrainerStorage`."""

    score_traffic: float = 0.0
    """Share of the traffic of stored attention scores, where the model does not say whether
    attention is fused: 0 fused, 1 unfused."""
    uses_measured_rates: bool = False
    """Whether products take the rates of measured operators (`products`), and fused attention too,
    where the device has such rates."""
    uses_flash_2: bool = False
    """Whether its fused attention is FlashAttention-2, on devices with faster kernels too."""
    fuses_elementwise: bool = False
    """Whether norms, activations and rotations are one kernel each, forward and backward."""
    fuses_accumulation: bool = False
    """Whether the product of a weight gradient adds it to the fp32 sum."""
    repeats_by_operator: bool = False
    """Whether selective recomputation keeps attention and every second product, and repeats the
    other products and what is elementwise; otherwise it repeats attention alone."""
    overlaps_from: int = _NEVER
    """ZeRO stage from which gradients are always scattered beside backward passes; below it the
    factors' odds hold. With 1, weights are also gathered beside forward passes."""
    weights_gather: float = 1.0
    """Seconds of gathering the weights after a ZeRO-1 step, over those of nanotron, which chose the
    factor."""
    scatters_weight_type: bool = False
    """Whether ZeRO-2 and 3 scatter gradients in the type of the weights; else in fp32."""
    calm_nodes: int = 1
    """Nodes up to which groups that sum gradients have no congestion."""
    exposed_sums: float = 1.0
    """Share of the sums over tp that products do not hide, of dense models with sequence
    parallelism."""
    mean_hops: bool = False
    """Whether a step of the ring that sums gradients takes the mean latency of its hops; else, as
    where the factor was chosen, that between nodes."""
    gathers_narrow: bool = False
    """Whether ZeRO gathers weights of a narrow format as `narrow_formats` says; else in bf16."""
    overlaps_transfers: bool = False
    """Whether transfers of interleaved stages run beside other chunks, but in warm-up and flush."""
    expert_operations: float = 0.0
    """Operations of the host for a layer with experts, forward and backward, beyond those of a
    dense layer: router, sorting, exchange, grouped products."""

    def traffic_of(self, model: ModelShape) -> float:
        """`score_traffic` for a model, which may say whether attention is fused."""
        stated = {"fused": 0.0, "unfused": 1.0}
        return self.score_traffic if model.attention is None else stated[model.attention]


ANY_TRAINER: Final = TrainerKernels()
"""The kernels where nothing is said about the trainer."""

_EMBEDDED: Final = TrainerKernels(uses_measured_rates=True, uses_flash_2=True)
"""torch's operators without a compiler; its scaled_dot_product_attention is FlashAttention-2."""

_CALM_NODES: Final = 64
"""The logs of the authors of AxoNN (arXiv:2502.08145) show the same bandwidth on 2 to 64 nodes."""

_EXPOSED_SUMS: Final = 0.63
"""Median of seven pairs of torchtitan_benchmarks with and without async_tp: one less what it saves
over the predicted time of the sums (0.49 to 0.81)."""

_MEGATRON: Final = TrainerKernels(
    uses_measured_rates=True,
    fuses_elementwise=True,
    fuses_accumulation=True,
    # One all-gather a bucket, as fast as the reduction: the prior's 1.1 in place of 3.0.
    weights_gather=1.1 / 3.0,
    # Megatron-FSDP (megatron_fsdp.py) has ZeRO-2 and 3, and refuses not to overlap;
    # `megatron_fsdp_main_grads_dtype` is None.
    overlaps_from=2,
    scatters_weight_type=True,
    calm_nodes=_CALM_NODES,
    mean_hops=True,
    gathers_narrow=True,
    # `overlap_p2p_comm` is on beside interleaving.
    overlaps_transfers=True,
    # Chosen by the runs of a mixture in primus_schedules.
    expert_operations=700.0,
)
"""Megatron-LM since core 0.12, of which nobody says that ZeRO-1 overlaps. Transformer Engine and
the fusions are its defaults (core_v0.12.0, arguments.py: `--transformer-impl`,
`--no-gradient-accumulation-fusion`, `--no-bias-swiglu-fusion`)."""

_KNOWN: Final[Mapping[str, TrainerKernels]] = {
    "nanotron": _EMBEDDED,
    "torchtitan": replace(
        _EMBEDDED,
        repeats_by_operator=True,
        overlaps_from=1,
        calm_nodes=_CALM_NODES,
        mean_hops=True,
    ),
    "megatron-deepspeed": ANY_TRAINER,
    "megatron-bridge": replace(
        _MEGATRON, overlaps_from=1, exposed_sums=_EXPOSED_SUMS, expert_operations=300.0
    ),
    "megatron": _MEGATRON,
    "vtrain": ANY_TRAINER,
    "simulated": ANY_TRAINER,
}
"""Kernels by a word in the software; the first that matches. Megatron-DeepSpeed is Megatron-LM of
2022 with FlashAttention, as it ran on Frontier. Recipes of Megatron-Bridge overlap, those of dense
models also the sums over tp (`tp_comm_overlap`), and fuse the permutation of tokens and the router
(`moe_permute_fusion`, `moe_router_fusion`). torchtitan's FSDP2 prefetches weights and reduces in
fp32. vTrain's published runs are of Megatron-LM of 2022 (arXiv:2312.12391); simulated machines have
rates of their own. Whether attention is fused is said by the trainer's storage."""

_EXPORTED: Final = "megatron-lm"
"""The trainer whose export overlaps (--overlap-grad-reduce, --overlap-param-gather), by its name
alone: a text such as a table's source does not say with which options a run was started."""


def kernels_of(software: str, cluster: Cluster) -> TrainerKernels:
    """The kernels of a software on a cluster, for `time_terms`.

    Its storage says whether it stores attention scores. Where the trainer is not known, the traffic
    of scores is the geometric mean by the weights of the hypotheses about its storage. Its products
    do not take the measured rates: the constants without them were chosen on runs of such trainers.
    """
    hypotheses = storage_hypotheses(software, cluster)
    fused = sum(each.weight for each in hypotheses if each.storage.fused_attention)
    if len(hypotheses) > 1:
        return replace(ANY_TRAINER, score_traffic=_FUSED_TRAFFIC**fused)
    words = software.lower()
    kernels = next((each for word, each in _KNOWN.items() if word in words), _EMBEDDED)
    if words == _EXPORTED:
        kernels = replace(kernels, overlaps_from=1)
    return replace(kernels, score_traffic=1.0 - fused)
