"""What trainers keep in a device's memory, and how sure that is."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final, Literal

from search_spaces.cluster import GIB, Cluster

LayerSplit = Literal["even", "compute"]
"""even: the first stages take one layer more where pp does not divide them. compute: as Nanotron
does, by the cumulated work of blocks and output projection (`layers_of_stage`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageSpread:
    """How far a trainer may be from what is told of it: standard deviations of factors near 1."""

    states: float = 0.1
    """Of weights and gradients, which each rank of dp holds whole."""
    sharded_states: float = 0.1
    """Of the optimizer's states, which ZeRO shares."""
    activations: float = 0.15
    """Of what is kept for the backward pass; real blocks are 6 to 12 % over the formula."""
    gathered_share: float = 0.2
    """Of the share of the gathered inputs that is kept: added to it."""
    gathered_scatter: float = 0.2
    """The same, of one layout apart from all others: how late the device is differs from layout to
    layout."""
    passing: float = 0.5
    """Of what a layer's backward pass makes at once, and of the logits."""
    workspace_bytes: float = GIB
    """Of the workspace, in bytes."""
    whole: float = 0.1
    """Of all terms alike: what the allocator adds, and whether it is counted in."""
    noise: float = 0.06
    """Of a measured peak around all of these."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerStorage:
    """What a trainer stores, and how.

    The defaults are the embedded trainer's: a flat fp32 gradient buffer that every replica holds in
    full, fused attention, gathered inputs that are kept, and a cross-entropy that turns the fp32
    logits into their gradient in place.
    """

    gradient_bytes: float = 4.0
    """Bytes of a gradient, of all its copies together."""
    fp16_gradient_bytes: float | None = None
    """The same where the precision is fp16; by default no different."""
    zero_shards_gradients: bool = False
    """Whether ZeRO-1 leaves a replica only its share of the gradients after the reduction."""
    fused_attention: bool = True
    """Whether the attention probabilities are never stored."""
    fused_swiglu: bool = True
    """Whether the activation of SwiGLU's gate is made again in the backward pass."""
    gathered_share: float = 1.0
    """How much of the column-parallel matrices' inputs stays as sequence parallelism gathered it. 0:
    Megatron-LM keeps a rank's share, and gathers it again in the backward pass. Between: gathered
    tensors are given back when the device has caught up with the host, which may be late."""
    fp32_logits: int = 1
    """Copies in fp32 of the logits at once: themselves, their softmax, their gradient."""
    layer_split: LayerSplit = "even"
    """How layers are shared out over stages."""
    workspace_bytes: float = 0.0
    """What a rank holds beside: libraries' workspaces, buffers of collectives."""
    reserved_share: float = 0.0
    """What the allocator reserves over what is allocated at the peak (phi in arXiv:2411.06465)."""
    context_bytes: float = 0.0
    """Memory of the device that no tensor can have: the driver's context, and libraries' kernels."""
    tells_out_of_memory: bool = False
    """Whether a run out of memory is recorded as such; if not, it may be any that failed."""
    spread: StorageSpread = field(default_factory=StorageSpread)
    """How sure all that is."""


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
"""What this project's trainer stores; its logical peak is 0 to 4 % over these sums."""

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
"""The same where an allocator gives out the memory, operators have temporaries, and matrix products
workspaces."""

MEGATRON_LIKE: Final = TrainerStorage(
    fp16_gradient_bytes=2.0,
    gathered_share=0.0,
    fused_swiglu=False,
    fp32_logits=2,
    workspace_bytes=0.5 * GIB,
    reserved_share=0.05,
    context_bytes=0.75 * GIB,
    spread=StorageSpread(states=0.2, sharded_states=0.1, activations=0.2),
)
"""What a trainer in the manner of Megatron-LM stores: 18 bytes a parameter with bf16 (gradients are
accumulated in fp32), 16 with fp16, shared over dp by ZeRO-1 are the optimizer's 12 alone."""

NANOTRON: Final = TrainerStorage(
    gradient_bytes=8.0,
    gathered_share=0.5,
    fused_swiglu=False,
    fp32_logits=2,
    layer_split="compute",
    workspace_bytes=0.5 * GIB,
    reserved_share=0.05,
    context_bytes=0.75 * GIB,
    spread=StorageSpread(states=0.2, sharded_states=0.1, activations=0.2, gathered_scatter=0.5),
)
"""Nanotron: Megatron-like, with a gradient three times over while a micro-batch goes backward: the
fp32 sum, the bf16 one that autograd makes, and the bucket of DistributedDataParallel
(`FP32GradientAccumulator` there); gathers run on a stream of their own, hence how many of their
results are held at once depends on how far the host is ahead: half of them, give or take half."""


def storage_of(software: str, cluster: Cluster) -> TrainerStorage:
    """The storage of what runs somewhere.

    Args:
        software: a table's source, or the software of a campaign's workers; empty, a release of torch
            or this project's name are its own trainer, what is not known is taken to be
            Megatron-like.
        cluster: where it runs.
    """
    words = software.lower()
    if not words or words.startswith("torch ") or "layout-tuner" in words:
        return EMBEDDED_TRAINER if "cpu" in cluster.device.lower() else EMBEDDED_ON_GPU
    return NANOTRON if "nanotron" in words else MEGATRON_LIKE
