"""The tensors that trainers keep in a device's memory, and the uncertainty about them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from layout_tuner.array_types import Floats
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.units import GIB

LayerSplit = Literal["even", "compute"]
"""even: the first stages have one layer more where pp does not divide the layers. compute: as in
Nanotron, by the cumulative work of blocks and output projection (`layers_of_stage`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageSpread:
    """Uncertainty of `TrainerStorage`: standard deviations of factors with mean 1."""

    states: float = 0.1
    """Of weights and gradients, which every rank of dp holds."""
    sharded_states: float = 0.1
    """Of the optimizer states, which ZeRO shards."""
    activations: float = 0.15
    """Of kept activations; real blocks are 6 to 12 % over the formula."""
    gathered_share: float = 0.2
    """Of `TrainerStorage.gathered_share`, in absolute terms."""
    gathered_scatter: float = 0.2
    """The same, independently for each layout: the delay of the device differs between layouts."""
    passing: float = 0.5
    """Of the tensors of a layer's backward pass, and of the logits."""
    workspace_bytes: float = GIB
    whole: float = 0.1
    """Of all terms together: what the allocator adds, and whether the measurement includes it."""
    noise: float = 0.06
    """Of a measured peak around all of these."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerStorage:
    """How a trainer stores weights, gradients, optimizer states and activations.

    The defaults are those of the embedded trainer: a flat fp32 gradient buffer that every replica
    holds in full, fused attention, gathered inputs that are kept, and a cross-entropy that turns
    the fp32 logits into their gradient in place.
    """

    gradient_bytes: float = 4.0
    """Bytes of all copies of one gradient."""
    fp16_gradient_bytes: float | None = None
    """The same with precision fp16; None: no difference."""
    master_bytes: float = 4.0
    """Bytes of a master weight beside a 16-bit weight; 0: the optimizer updates the 16-bit one."""
    shards_are_masters: bool = False
    """Whether ZeRO-3 shards the master weights alone, and gathers them in 16 bits."""
    zero_shards_gradients: bool = False
    """Whether ZeRO-1 leaves a replica only its share of the gradients after the reduction."""
    drops_scores: bool = False
    """Whether attention scores are dropped out where the model does not say."""
    fused_attention: bool = True
    """Whether the attention probabilities are never stored, unless `ModelShape.attention` says."""
    fused_swiglu: bool = True
    """Whether the backward pass recomputes the activation of SwiGLU's gate."""
    stores_narrow: bool = False
    """Whether inputs that products of 8 bits or fewer keep for the backward pass, and weights, are
    stored as `narrow_formats` says; else in bf16."""
    selective_by_operator: bool = False
    """Whether selective recomputation keeps every second matrix product of a layer (torchtitan)
    instead of all but the attention scores (arXiv:2205.05198)."""
    whole_beside_pipeline: bool = False
    """Whether ZeRO-2 and 3 leave the stage's weights and gradients whole between the micro-batches
    of a pipeline."""
    shards_bf16_states: bool = False
    """Whether a pipeline's optimizer states are sharded over dp with bf16 and without ZeRO too."""
    sorts_experts_again: bool = True
    """Whether the backward pass sorts tokens by expert again, if they did not come from other
    ranks, and recomputes the activation."""
    gathered_share: float = 1.0
    """Share of the gathered inputs of column-parallel matrices that is kept, with sequence
    parallelism. 0: as in Megatron-LM, which keeps a rank's part and gathers again in the backward
    pass. Between 0 and 1: gathered tensors are freed when the device has caught up with the host,
    which may be late."""
    fp32_logits: int = 1
    """Copies in fp32 of the logits at once: themselves, their softmax, their gradient."""
    logits_chunks: int = 1
    """Parts of a micro-batch whose logits are in memory one after another. Beside them are a copy
    of the head's input, and its gradient in fp32."""
    layer_split: LayerSplit = "even"
    """How layers are split over stages."""
    workspace_bytes: float = 0.0
    """Workspaces of libraries and buffers of collectives on each rank."""
    reserved_share: float = 0.0
    """What the allocator reserves over what is allocated at the peak (phi in arXiv:2411.06465)."""
    context_bytes: float = 0.0
    """Memory of the device that tensors cannot use: the driver's context and libraries' kernels."""
    tells_out_of_memory: bool = False
    """Whether running out of memory is recorded as such; if not, any failed run may be one."""
    spread: StorageSpread = field(default_factory=StorageSpread)
    """Uncertainty of these numbers."""


EMBEDDED_TRAINER: Final = TrainerStorage(
    tells_out_of_memory=True,
    spread=StorageSpread(
        states=0.005,
        sharded_states=0.005,
        activations=0.03,
        gathered_share=0.01,
        gathered_scatter=0.0,
        passing=0.2,
        workspace_bytes=4 << 20,
        whole=0.01,
        noise=0.015,
    ),
)
"""The embedded trainer on CPUs; its logical peak is 0 to 4 % over these sums."""

EMBEDDED_ON_GPU: Final = replace(
    EMBEDDED_TRAINER,
    workspace_bytes=64 << 20,
    reserved_share=0.05,
    context_bytes=0.75 * GIB,
    spread=StorageSpread(
        states=0.02,
        sharded_states=0.02,
        activations=0.1,
        gathered_share=0.05,
        gathered_scatter=0.0,
        passing=0.3,
        workspace_bytes=0.25 * GIB,
        whole=0.05,
        noise=0.03,
    ),
)
"""The embedded trainer on GPUs: with an allocator, temporaries of operators, and workspaces of
matrix products."""

_LIBRARY_SPREAD: Final = StorageSpread(
    states=0.12,
    sharded_states=0.06,
    activations=0.12,
    gathered_share=0.12,
    gathered_scatter=0.12,
    passing=0.3,
    workspace_bytes=0.6 * GIB,
    whole=0.06,
    noise=0.036,
)
"""Of trainers that are described by what is known of them. The middle half of the errors of 3B on
up to 256 H100 was 0.6 times as wide as with the defaults of `StorageSpread`."""

MEGATRON_LIKE: Final = TrainerStorage(
    fp16_gradient_bytes=2.0,
    drops_scores=True,
    stores_narrow=True,
    gathered_share=0.0,
    sorts_experts_again=False,
    workspace_bytes=64 << 20,
    reserved_share=0.05,
    context_bytes=0.75 * GIB,
    spread=_LIBRARY_SPREAD,
)
"""A trainer like Megatron-LM (core_v0.12.0): 18 bytes per parameter with bf16 (gradients are
accumulated in fp32), 16 with fp16. ZeRO-1 shards the 12 bytes of the optimizer. Transformer Engine
fuses attention (`--attention-backend auto`). The loss exponentiates the one fp32 copy of the logits
in place (core/tensor_parallel/cross_entropy.py, since 9634c0e4). SwiGLU keeps its input alone
(core/fusions/fused_bias_swiglu.py; `--no-bias-swiglu-fusion` is opt-out). Transformer Engine
keeps inputs of narrow products quantised. `--attention-dropout` is 0.1 by default, which counts
only where attention is not fused. cuBLAS has a workspace of 32 MiB in torch and of 32 in
Transformer Engine on Hopper (cpp_extensions/gemm.py), of 8 and 4 before it."""

MEGATRON_2022: Final = replace(
    MEGATRON_LIKE,
    stores_narrow=False,
    fp32_logits=2,
    fused_swiglu=False,
    workspace_bytes=0.5 * GIB,
)
"""Megatron-LM of 2022 and its like: the loss makes a second fp32 copy of the logits, and torch's
autograd keeps the activation of SwiGLU's gate."""

MEGATRON_DEEPSPEED: Final = replace(MEGATRON_2022, shards_bf16_states=True)
"""Megatron-DeepSpeed (4efb479d): Megatron-LM of 2022, with DeepSpeed's buckets in the workspace.
DeepSpeed's pipeline engine takes `BF16_Optimizer` for bf16 at ZeRO 0 as well, which partitions the
fp32 states over dp (runtime/engine.py, `_do_optimizer_sanity_check`; runtime/bf16_optimizer.py)."""

VTRAIN: Final = replace(MEGATRON_2022, fused_attention=False)
"""vTrain's published runs are of Megatron-LM of 2022 (arXiv:2312.12391), which fused attention on
request alone."""

NANOTRON: Final = TrainerStorage(
    gradient_bytes=8.0,
    gathered_share=0.5,
    fused_swiglu=False,
    sorts_experts_again=False,
    fp32_logits=2,
    layer_split="compute",
    workspace_bytes=0.5 * GIB,
    reserved_share=0.05,
    context_bytes=0.75 * GIB,
    spread=replace(_LIBRARY_SPREAD, gathered_scatter=0.3),
)
"""Nanotron: like Megatron-LM, with three copies of a gradient during a backward pass: the fp32 sum,
the bf16 gradient of autograd, and the bucket of DistributedDataParallel
(`FP32GradientAccumulator`). Gathers run on a separate stream, so the number of gathered tensors in
memory depends on how far the host is ahead: half of them, plus or minus half."""

TORCHTITAN: Final = TrainerStorage(
    zero_shards_gradients=True,
    shards_are_masters=True,
    gathered_share=0.0,
    fp32_logits=3,
    selective_by_operator=True,
    whole_beside_pipeline=True,
    sorts_experts_again=False,
    workspace_bytes=64 << 20,
    reserved_share=0.05,
    context_bytes=0.75 * GIB,
    tells_out_of_memory=True,
    spread=_LIBRARY_SPREAD,
)
"""torchtitan (ba246978; the same in 0.2.2 and 0.3.0) with FSDP2, which reduces gradients in fp32.
Its shards of the weights are the master weights, in fp32.
Beside a pipeline it does not reshard weights after the forward pass (distributed/fsdp.py), and
torch.distributed.pipelining reduces gradients after the last micro-batch alone (stage.py,
`set_requires_gradient_sync`). Without compilation `F.cross_entropy` of fp32 logits makes their
log-softmax and its gradient: three copies."""

_TORCHTITAN_0_3: Final = replace(TORCHTITAN, logits_chunks=8)
"""As exports to torchtitan 0.3 and main: with `ChunkedLossWrapper` (components/loss.py)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageHypothesis:
    """One way in which a trainer may store things, where its storage is not known."""

    name: str
    """What it says, in words."""
    storage: TrainerStorage
    weight: float
    """Its probability before any outcome."""


_STATES: Final[Mapping[str, tuple[int, Mapping[str, Any]]]] = {
    "fp32 gradients": (3, {}),
    "16-bit gradients": (3, {"gradient_bytes": 2.0}),
    "16-bit gradients that ZeRO shards": (
        1,
        {"gradient_bytes": 2.0, "zero_shards_gradients": True},
    ),
    "16-bit gradients and no master weights": (0, {"gradient_bytes": 2.0, "master_bytes": 0.0}),
    "three copies of a gradient": (1, {"gradient_bytes": 8.0}),
}
"""Gradients and master weights at the peak, each with the number of trainers with an adapter that
store so with ZeRO-1: whole fp32 gradients (Megatron-LM, Megatron Bridge, the embedded one); whole
16-bit ones until the step (Megatron-DeepSpeed, as measured on Frontier; DeepSpeed and Accelerate
with it); shards (FSDP of torchtitan); `NANOTRON`. A 16-bit model with torch's optimizers has no
master weights."""

_TENSORS: Final[Mapping[str, tuple[int, Mapping[str, Any]]]] = {
    "fused attention, two copies of the logits": (4, {}),
    "fused attention, three copies of the logits": (3, {"fp32_logits": 3}),
    "attention that is not fused": (1, {"fused_attention": False}),
}
"""Attention and logits, with the number of those trainers. Only Megatron-DeepSpeed fuses attention
on request alone. The losses of Nanotron and of Megatron-LM of 2022 make two copies of the logits in
fp32 (the embedded trainer one; so do Megatron-LM and Megatron Bridge today, which were counted
before that was read). The loss of plain torch makes three (themselves, their log-softmax, its
gradient): torchtitan, DeepSpeed, and Accelerate with it."""


def _unknown() -> Iterator[StorageHypothesis]:
    """Each combination; half a trainer is added to each count (Jeffreys' prior)."""
    for states, (count, changes) in _STATES.items():
        for tensors, (number, more) in _TENSORS.items():
            common = {"fp16_gradient_bytes": None, "drops_scores": False}
            storage = replace(MEGATRON_2022, **{**common, **changes, **more})
            yield StorageHypothesis(
                name=f"{states}, {tensors}",
                # More differs between trainers than what the hypotheses list.
                storage=replace(storage, spread=StorageSpread()),
                weight=_share(count, _STATES) * _share(number, _TENSORS),
            )


def _share(count: int, choices: Mapping[str, tuple[int, Mapping[str, Any]]]) -> float:
    total = sum(number for number, _ in choices.values())
    return (count + 0.5) / (total + 0.5 * len(choices))


_UNKNOWN: Final = tuple(_unknown())

_KNOWN: Final = {
    "nanotron": NANOTRON,
    "torchtitan-0.3": _TORCHTITAN_0_3,
    "torchtitan-main": _TORCHTITAN_0_3,
    "torchtitan": TORCHTITAN,
    "megatron-bridge": MEGATRON_LIKE,
    "megatron-deepspeed": MEGATRON_DEEPSPEED,
    "megatron": MEGATRON_LIKE,
    "vtrain": VTRAIN,
    "simulated": MEGATRON_2022,
}
"""Storage by a word in the software; simulated clusters store like Megatron-LM of 2022."""


def storage_hypotheses(software: str, cluster: Cluster) -> tuple[StorageHypothesis, ...]:
    """What a software may keep on a cluster: one hypothesis of a known trainer, else several.

    `software` is a table's source, or the software of a campaign's workers. An empty text, a
    release of torch and the name of this project mean the embedded trainer.
    """
    words = software.lower()
    if not words or words.startswith("torch ") or "layout-tuner" in words:
        storage = EMBEDDED_TRAINER if "cpu" in cluster.device.lower() else EMBEDDED_ON_GPU
        return (StorageHypothesis(name="the embedded trainer", storage=storage, weight=1.0),)
    for word, storage in _KNOWN.items():
        if word in words:
            if not _can_fuse_attention(word, cluster):
                storage = replace(storage, fused_attention=False)
            return (StorageHypothesis(name=f"as {word}", storage=storage, weight=1.0),)
    return _UNKNOWN


def _can_fuse_attention(trainer: str, cluster: Cluster) -> bool:
    """Whether a trainer's fused attention runs on the devices.

    Transformer Engine, which Megatron-LM and Megatron-Bridge use, has none for devices before
    compute capability 8.0 (`get_attention_backend`), the first with bf16. `trainer` is a word of
    `_KNOWN`.
    """
    peaks = cluster.peak_flops_per_s
    has_bf16 = "bf16" in peaks or "fp16" not in peaks
    return trainer not in ("megatron", "megatron-bridge") or has_bf16


def storage_of(software: str, cluster: Cluster) -> TrainerStorage:
    """The storage of a software on a cluster; of one that is not known, a Megatron-like one."""
    hypotheses = storage_hypotheses(software, cluster)
    return hypotheses[0].storage if len(hypotheses) == 1 else MEGATRON_2022


def layers_of_stage(
    pp: NDArray[Any],
    stage: NDArray[Any],
    model: ModelShape,
    storage: TrainerStorage,
    counted_ends: tuple[NDArray[Any] | int, NDArray[Any] | int] = (0, 0),
) -> Floats:
    """Layers on a stage.

    In an even split the first stages have one layer more where pp does not divide the layers, the
    counted embedding and head among them (`LayoutColumns.counted_ends`).

    Nanotron (`build_model`) closes a stage with the block that exceeds the stage's share of the
    work, which includes the output projection: the first stages have more layers, the last one has
    fewer.
    """
    if storage.layer_split == "even":
        embedding, head = counted_ends
        counted = model.num_layers + embedding + head
        each = counted // pp + (stage < counted % pp)
        ends = embedding * (stage == 0) + head * (stage == pp - 1)
        return np.asarray(each - ends, dtype=np.float64)
    kinds = model.kinds if model.layer_kinds or model.experts_every else ()
    block = (
        model.num_layer_matrix_parameters
        if not kinds
        else sum(len(each.layers) * each.shape.num_layer_matrix_parameters for each in kinds)
        / model.num_layers
    )
    share = (model.num_layers + model.vocab_size * model.hidden_size / block) / pp
    until = _layers_until(stage + 1, share, pp, model)
    return until - np.where(stage == 0, 0.0, _layers_until(stage, share, pp, model))


def _layers_until(
    stages: NDArray[Any], share: Floats, pp: NDArray[Any], model: ModelShape
) -> Floats:
    """Layers on the first `stages` stages; the block that exceeds the share closes a stage."""
    closed = np.where(share < 1, stages, np.floor(share * stages) + 1.0)
    return np.where(stages >= pp, model.num_layers, np.minimum(closed, model.num_layers))
