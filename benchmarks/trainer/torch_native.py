"""The torch-native composition: the bare model under torch's own parallelism.

DTensor tensor parallelism (`parallelize_module`), keys and values gathered by functional
collectives for context parallelism, `torch.distributed.pipelining`, DDP and
ZeroRedundancyOptimizer, or FSDP2 (`fully_shard`) for ZeRO-3, put together in the order that
torchtitan applies them. The model, the weights, the tokens and the optimizer's arithmetic are the
bare model's.
"""

# ruff: noqa: N803, N806, N812 (tensors carry their shape in the name)

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.tensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks.trainer.bare_model import (
    BareRMSNorm,
    Llama,
    MasterCopies,
    MixedPrecision,
    adamw_options,
    make_llama,
    mean_cross_entropy,
)
from benchmarks.trainer.native_experts import apply_expert_parallel
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.workers.trainer.batches import Batch, own_chunks
from layout_tuner.workers.trainer.model.precision import COMPUTE_DTYPES
from layout_tuner.workers.trainer.parallel.optimizer import OptimizerSettings

TensorParallelPlan = Literal["plain", "prepared", "sequence"]
"""How the residual stream meets the cut layers: whole, and converted by every layer of its own
(plain) or once for all that share it (prepared); or cut by tokens (sequence, torchtitan's)."""


def apply_tensor_parallel(
    model: Llama, mesh: DeviceMesh, *, plan: TensorParallelPlan, loss_in_parts: bool
) -> None:
    """Cuts the model over the mesh, in place.

    Args:
        model: what is cut.
        mesh: the tp axis.
        plan: how the residual stream meets the cut layers.
        loss_in_parts: leave the logits cut over the vocabulary, for `loss_parallel`.
    """
    stream = Shard(1) if plan == "sequence" else Replicate()
    logits = {"output_layouts": Shard(-1) if loss_in_parts else Replicate()}
    parallel: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "head": ColwiseParallel(input_layouts=stream, use_local_output=not loss_in_parts, **logits),
        "layers.*.attention.out": RowwiseParallel(output_layouts=stream),
        "layers.*.feed_forward.down": RowwiseParallel(output_layouts=stream),
    }
    for name in ("attention.query", "attention.key", "attention.value"):
        parallel[f"layers.*.{name}"] = ColwiseParallel()
    for name in ("feed_forward.gate", "feed_forward.up"):
        parallel[f"layers.*.{name}"] = ColwiseParallel()
    if plan != "plain":
        parallel["layers.*.attention"] = PrepareModuleInput(
            input_layouts=(stream, None, None),
            desired_input_layouts=(Replicate(), None, None),
        )
        parallel["layers.*.feed_forward"] = PrepareModuleInput(
            input_layouts=stream, desired_input_layouts=Replicate()
        )
    if plan == "sequence":
        for name in ("final_norm", "layers.*.attention_norm", "layers.*.feed_forward_norm"):
            parallel[name] = SequenceParallel()
    present = [name for name, _ in model.named_modules()]
    kept = {name: style for name, style in parallel.items() if "*" in name or name in present}
    parallelize_module(model, mesh, kept)


def apply_tensor_columns(model: Llama, mesh: DeviceMesh) -> None:
    """Cuts the features of the residual stream over the mesh, in place; leaves logits cut too.

    AxoNN's scheme with one row: inputs of the layers that read the stream are cut, outputs of those
    that write it, and norms take their statistics over the mesh.
    """
    stream, whole = Shard(-1), Replicate()
    reads = RowwiseParallel(input_layouts=stream, output_layouts=whole)
    writes = ColwiseParallel(input_layouts=whole, output_layouts=stream)
    parallel: dict[str, Any] = {
        "embedding": ColwiseParallel(input_layouts=whole, output_layouts=stream),
        "head": ColwiseParallel(
            input_layouts=stream, output_layouts=stream, use_local_output=False
        ),
        **dict.fromkeys(("layers.*.attention.out", "layers.*.feed_forward.down"), writes),
    }
    for name in ("attention.query", "attention.key", "attention.value"):
        parallel[f"layers.*.{name}"] = reads
    for name in ("feed_forward.gate", "feed_forward.up"):
        parallel[f"layers.*.{name}"] = reads
    parallelize_module(model, mesh, parallel)
    for module in model.modules():
        if isinstance(module, BareRMSNorm):
            distribute_module(module, mesh, _cut_weights, _cut_input, _own_output)


def _cut_weights(_name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    for name, value in list(module.named_parameters(recurse=False)):
        module.register_parameter(name, nn.Parameter(distribute_tensor(value, mesh, [Shard(0)])))


def _cut_input(_module: nn.Module, inputs: tuple[Tensor], mesh: DeviceMesh) -> tuple[Tensor]:
    return (DTensor.from_local(inputs[0], mesh, [Shard(-1)], run_check=False),)


def _own_output(_module: nn.Module, output: DTensor, _mesh: DeviceMesh) -> Tensor:
    return output.to_local()


def apply_context_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Lets every attention gather keys and values over the mesh; rotary positions are the rank's.

    The mesh has the replicas of one context-parallel group alone.
    """
    assert isinstance(model, Llama)
    cp, rank = mesh.size(), mesh.get_local_rank()
    whole = torch.arange(len(model.cos_SD))
    gathered_S = torch.cat([own_chunks(whole, cp, peer) for peer in range(cp)])
    sees_TS = own_chunks(whole, cp, rank)[:, None] >= gathered_S
    for name in ("cos_SD", "sin_SD"):
        own_SD = own_chunks(getattr(model, name), cp, rank)
        delattr(model, name)  # DDP would copy the first rank's buffers
        setattr(model, name, own_SD)
    for block in model.layers.values():
        block.attention.attend = partial(_attend_to_gathered, mesh=mesh, sees_TS=sees_TS)


def _attend_to_gathered(
    q_BNTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, *, mesh: DeviceMesh, sees_TS: Tensor
) -> Tensor:
    kv_BKTD = torch.cat((k_BKTD, v_BKTD), dim=1)
    # Newer torch deprecates the old name, and older torch lacks the new one.
    gather: Any = getattr(collectives, "all_gather_single_autograd", None)
    gather = gather or collectives.all_gather_tensor_autograd
    kv_BKSD = gather(kv_BKTD.contiguous(), 2, mesh)
    k_BKSD, v_BKSD = kv_BKSD.chunk(2, dim=1)
    grouped = q_BNTD.shape[1] != k_BKSD.shape[1]
    return F.scaled_dot_product_attention(
        q_BNTD, k_BKSD, v_BKSD, attn_mask=sees_TS, enable_gqa=grouped
    )


class NativeLoop:
    """A rank's part of the composition; needs the process group."""

    def __init__(
        self,
        shape: ModelShape,
        layout: Layout,
        *,
        seed: int,
        settings: OptimizerSettings,
        plan: TensorParallelPlan = "prepared",
        loss_in_parts: bool = True,
        mixed: MixedPrecision | None = None,
    ) -> None:
        self.shape, self.layout, self.settings = shape, layout, settings
        self.mesh = init_device_mesh(
            "cpu", (layout.pp, layout.dp_cp, layout.tp_ranks), mesh_dim_names=("pp", "dp", "tp")
        )
        self.dtype = COMPUTE_DTYPES[layout.precision]
        self.is_fsdp = layout.dp > 1 and layout.zero_stage == 3
        # DDP adds up and reduces what autograd gives it: fp32 only where the parameters are.
        mixed = mixed or ("autocast" if layout.dp_cp > 1 else "masters")
        self.autocasts = layout.precision != "fp32" and mixed == "autocast" and not self.is_fsdp
        self.has_masters = layout.precision != "fp32" and mixed == "masters"
        self.loss_in_parts = loss_in_parts and layout.tp_ranks > 1
        self.copies: list[MasterCopies] = []
        self.experts: list[nn.Parameter] = []
        self.parts = [self._part(i, seed, plan) for i in range(layout.vpp)]
        self.optimizers = self._optimizers()
        self.schedule = self._schedule() if layout.pp > 1 else None

    def _part(self, chunk: int, seed: int, plan: TensorParallelPlan) -> nn.Module:
        layout = self.layout
        num_layers = self.shape.num_layers // (layout.pp * layout.vpp)
        first = self._stage_index(chunk) * num_layers
        layers = range(first, first + num_layers)
        part: nn.Module = make_llama(
            self.shape, seed=seed, device=torch.device("cpu"), layers=layers
        )
        if layout.cp > 1:
            apply_context_parallel(part, self.mesh["dp"])
        if layout.ep > 1:
            divided = apply_expert_parallel(
                part, self.shape, self.mesh["dp"], seed=seed, dtype=self.dtype
            )
            self.experts += divided.values()
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(part, list(divided))
        if layout.tp_columns > 1:
            apply_tensor_columns(part, self.mesh["tp"])
        elif layout.tp > 1:
            apply_tensor_parallel(
                part, self.mesh["tp"], plan=plan, loss_in_parts=self.loss_in_parts
            )
        if self.has_masters:
            self.copies.append(MasterCopies(part.to(self.dtype).parameters()))
        if self.is_fsdp:
            self._shard(part)
        elif layout.dp_cp > 1:
            if layout.tp > 1:
                _pre_dp_module_transform(part)
            part = DistributedDataParallel(
                part, process_group=self.mesh["dp"].get_group(), gradient_as_bucket_view=True
            )
        return part

    def _shard(self, part: nn.Module) -> None:
        policy = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32)
        blocks = list(part.layers.values())  # type: ignore[union-attr, operator]
        for modules in (part.embedding, *blocks, [part.final_norm, part.head]):
            fully_shard(modules, mesh=self.mesh["dp"], mp_policy=policy)  # type: ignore[arg-type]
        fully_shard(part, mesh=self.mesh["dp"], mp_policy=policy)

    def _stage_index(self, chunk: int) -> int:
        return chunk * self.layout.pp + self.mesh["pp"].get_local_rank()

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        trained: Iterable[Tensor] = [p for part in self.parts for p in part.parameters()]
        if self.has_masters:
            trained = [master for copies in self.copies for master in copies.masters]
        options, alone = adamw_options(self.settings), list[torch.optim.Optimizer]()
        self.expert_masters = list(self.experts)
        if self.experts:  # no other rank has them
            divided = {id(parameter) for parameter in self.experts}
            trained = [parameter for parameter in trained if id(parameter) not in divided]
            if self.autocasts:
                self.copies.append(MasterCopies(self.experts))
                self.expert_masters = self.copies[-1].masters
            alone = [torch.optim.AdamW(self.expert_masters, **options)]
        if self.layout.dp_cp > 1 and self.layout.zero_stage in (1, 2):
            sharded = ZeroRedundancyOptimizer(
                trained,
                torch.optim.AdamW,
                process_group=self.mesh["dp"].get_group(),
                parameters_as_bucket_view=True,
                **options,
            )
            return [sharded, *alone]
        return [torch.optim.AdamW(_groups(trained), **options), *alone]

    def _schedule(self) -> Any:
        stages = [
            PipelineStage(
                part,
                self._stage_index(chunk),
                self.layout.pp * self.layout.vpp,
                torch.device("cpu"),
                group=self.mesh["pp"].get_group(),
            )
            for chunk, part in enumerate(self.parts)
        ]
        options: dict[str, Any] = {"loss_fn": self._loss, "scale_grads": False}
        count = self.layout.num_microbatches
        if self.layout.schedule == "zero_bubble":
            return ScheduleInterleavedZeroBubble(stages, count, **options)
        if len(stages) > 1:
            return ScheduleInterleaved1F1B(stages, count, **options)
        plain = Schedule1F1B if self.layout.schedule == "1f1b" else ScheduleGPipe
        return plain(stages[0], count, **options)

    def _loss(self, logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
        return mean_cross_entropy(logits_BSV, targets_BS) / self.layout.num_microbatches

    def step(self, batch: Batch) -> float:
        """One optimizer step; returns this rank's share of the global batch's mean loss."""
        with contextlib.ExitStack() as contexts:
            if self.loss_in_parts:
                contexts.enter_context(loss_parallel())
            if self.autocasts:
                contexts.enter_context(torch.autocast("cpu", self.dtype))
            losses = self._passes(batch) if self.schedule is None else self._pipeline(batch)
        for master in self.expert_masters:  # the mean over replicas, as DDP takes it
            if master.grad is not None:
                master.grad.div_(self.layout.dp)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for copies in self.copies:
            copies.copy_back()
        if not losses:
            return 0.0
        loss = torch.stack([_local(loss) for loss in losses]).double().sum().item()
        return loss / (self.layout.dp_cp * self.layout.tp_ranks)

    def _passes(self, batch: Batch) -> list[Tensor]:
        (part,) = self.parts
        size = (-1, self.shape.seq_length // self.layout.cp)
        losses, last = [], len(batch.ids_MT) - 1
        for index, (ids_T, targets_T) in enumerate(
            zip(batch.ids_MT, batch.targets_MT, strict=True)
        ):
            is_ddp = isinstance(part, DistributedDataParallel)
            with part.no_sync() if is_ddp and index < last else contextlib.nullcontext():
                loss = self._loss(part(ids_T.view(size)), targets_T.view(size))
                loss.backward()
            losses.append(loss.detach())
        return losses

    def _pipeline(self, batch: Batch) -> list[Tensor]:
        assert self.schedule is not None
        size = (-1, self.shape.seq_length // self.layout.cp)
        stage, losses = self.mesh["pp"].get_local_rank(), []
        inputs = (batch.ids_MT.view(size),) if stage == 0 else ()
        if stage < self.layout.pp - 1:
            self.schedule.step(*inputs)
        else:
            self.schedule.step(*inputs, target=batch.targets_MT.view(size), losses=losses)
        return [loss.detach() for loss in losses]


def _groups(parameters: Iterable[Tensor]) -> list[dict[str, Any]]:
    """Parameter groups: the fused kernel takes no mixture of cut and whole parameters."""
    kinds: dict[bool, list[Tensor]] = {}
    for parameter in parameters:
        kinds.setdefault(isinstance(parameter.data, DTensor), []).append(parameter)
    return [{"params": group} for group in kinds.values()]


def _local(loss: Tensor) -> Tensor:
    """The loss itself where `loss_parallel` has left a DTensor, the same on every tp rank."""
    return loss.full_tensor() if isinstance(loss, DTensor) else loss
