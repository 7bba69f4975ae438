"""The tensors that trainers keep in a device's memory, and the uncertainty about them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from layout_tuner.search_spaces.clusters.cluster import Cluster
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
    zero_shards_gradients: bool = False
    """Whether ZeRO-1 leaves a replica only its share of the gradients after the reduction."""
    fused_attention: bool = True
    """Whether the attention probabilities are never stored."""
    fuses_on_request: bool = False
    """Whether attention is fused only where an option says so."""
    fused_swiglu: bool = True
    """Whether the backward pass recomputes the activation of SwiGLU's gate."""
    keeps_fp8_inputs: bool = False
    """Whether fp8 products keep their inputs in fp8 for the backward pass."""
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
    fuses_on_request=True,
    gathered_share=0.0,
    fused_swiglu=False,
    sorts_experts_again=False,
    fp32_logits=2,
    workspace_bytes=0.5 * GIB,
    reserved_share=0.05,
    context_bytes=0.75 * GIB,
    spread=_LIBRARY_SPREAD,
)
"""A trainer like Megatron-LM: 18 bytes per parameter with bf16 (gradients are accumulated in fp32),
16 with fp16. ZeRO-1 shards the 12 bytes of the optimizer."""

MEGATRON_BRIDGE: Final = replace(
    MEGATRON_LIKE, fuses_on_request=False, fused_swiglu=True, keeps_fp8_inputs=True, fp32_logits=1
)
"""Megatron-Bridge (067f987d) with Megatron-LM's core (d98e8a6): layers of Transformer Engine, which
chooses a fused attention and keeps quantised inputs; recipes fuse the activation of experts, and
the loss turns one fp32 copy of the logits into their gradient."""

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
on request alone. The losses of Megatron-LM, Megatron Bridge and Nanotron make two copies of the
logits in fp32 (the embedded trainer one; Megatron Bridge's fused loss makes one too, and was
counted before that was read). The loss of plain torch makes three (themselves, their log-softmax,
its gradient): torchtitan, DeepSpeed, and Accelerate with it."""


def _unknown() -> Iterator[StorageHypothesis]:
    """Each combination; half a trainer is added to each count (Jeffreys' prior)."""
    for states, (count, changes) in _STATES.items():
        for tensors, (number, more) in _TENSORS.items():
            plain: dict[str, Any] = {"fp16_gradient_bytes": None, "fuses_on_request": False}
            storage = replace(MEGATRON_LIKE, **{**plain, **changes, **more})
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
    "megatron-bridge": MEGATRON_BRIDGE,
    "megatron": MEGATRON_LIKE,
    "vtrain": MEGATRON_LIKE,
    "simulated": MEGATRON_LIKE,
}
"""Storage by a word in the software. vTrain's published runs are of Megatron-LM
(arXiv:2312.12391); simulated clusters store like it."""


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
            return (StorageHypothesis(name=f"as {word}", storage=storage, weight=1.0),)
    return _UNKNOWN


def storage_of(software: str, cluster: Cluster) -> TrainerStorage:
    """The storage of a software on a cluster; of one that is not known, the Megatron-like one."""
    hypotheses = storage_hypotheses(software, cluster)
    return hypotheses[0].storage if len(hypotheses) == 1 else MEGATRON_LIKE


_SCORE_TRAFFIC: Final = {"fused": 0.04, "option": 0.4, "not fused": 1.0}
"""Traffic of attention scores over that of scores which are stored. Fused attention moves 0.04 of
it: d^2 / M of the scores (arXiv:2205.14135, theorem 2) with heads of 128 and 192 KiB of shared
memory, over the passes that `time_terms.SCORE_PASSES` counts. Where fusing is an option: about the
geometric mean, with some weight on that it is not used."""


def score_traffic_of(software: str, cluster: Cluster) -> float:
    """The `score_traffic` of a software's `time_terms`.

    An option of trainers like Megatron-LM has 1, which the prior of the factor is for. Where the
    trainer is not known, it is the geometric mean by the weights of its hypotheses.
    """
    hypotheses = storage_hypotheses(software, cluster)
    if hypotheses[0].storage.fuses_on_request:
        return 1.0
    fused = sum(each.weight for each in hypotheses if each.storage.fused_attention)
    traffic = _SCORE_TRAFFIC["fused"] ** fused * _SCORE_TRAFFIC["not fused"] ** (1.0 - fused)
    return float(traffic / _SCORE_TRAFFIC["option"])
