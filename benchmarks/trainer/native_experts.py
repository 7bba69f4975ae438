"""A mixture of experts whose experts are divided over ranks, as torchtitan composes it from torch.

Counts by `all_to_all_single`, tokens by `all_to_all_single_autograd`; on the rank of the experts
a permutation by expert, grouped products, and the permutation back; weights multiply the outputs.
The router chooses experts in turn, as the trainer's does under balanced routing.

Shapes: B sequences, S positions, T = B S tokens, H hidden, A experts of all ranks, E of this rank,
N ranks, K experts of a token, F width, M = T K rows, R rows of this rank's experts.
"""

# ruff: noqa: N803, N806, N812 (tensors carry their shape in the name)

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.workers.trainer.model.parameters import ParameterPart, initialise


class NativeMixture(nn.Module):
    """The experts of one layer that belong to this rank of the mesh, and the router."""

    def __init__(self, shape: ModelShape, mesh: DeviceMesh, prefix: str, *, seed: int) -> None:
        super().__init__()
        self.mesh, self.per_token = mesh, shape.experts_per_token
        self.num_experts, each = shape.num_experts, shape.num_experts // mesh.size()
        first = mesh.get_local_rank() * each
        names = [f"{prefix}.experts.{index}" for index in range(first, first + each)]
        hidden, width = shape.hidden_size, shape.moe_ffn_hidden_size
        narrow = 0.02 / (2 * shape.num_layers) ** 0.5

        def drawn(names: list[str], *size: int, std: float = 0.02) -> nn.Parameter:
            values = torch.empty(len(names), *size)
            for name, value in zip(names, values, strict=True):
                part = ParameterPart(name=name, shape=size, shard_dim=None, init="normal", std=std)
                initialise(value, part, seed=seed)
            return nn.Parameter(values)

        router_1AH = drawn([f"{prefix}.router.weight"], self.num_experts, hidden)
        self.router = nn.Parameter(router_1AH.detach()[0])
        self.gate = drawn([f"{name}.gate.weight" for name in names], width, hidden)
        self.up = drawn([f"{name}.up.weight" for name in names], width, hidden)
        self.down = drawn([f"{name}.down.weight" for name in names], hidden, width, std=narrow)

    def forward(self, x_BSH: Tensor) -> Tensor:
        x_TH = x_BSH.flatten(0, 1)
        with torch.autocast("cpu", enabled=False):
            logits_TA = F.linear(x_TH.float(), self.router)
        positions_T = torch.arange(x_BSH.shape[1]).repeat(x_BSH.shape[0])
        choices_K = torch.arange(self.per_token)
        experts_TK = (positions_T[:, None] * self.per_token + choices_K) % self.num_experts
        weights_TK = logits_TA.gather(1, experts_TK).softmax(-1)
        order_M = experts_TK.flatten().argsort(stable=True)
        counts_A = torch.histc(experts_TK.float(), self.num_experts, 0, self.num_experts).long()
        rows_MH = x_TH.to(self.up.dtype)[order_M // self.per_token]
        y_MH = self._at_experts(rows_MH, counts_A)
        pairs_MH = torch.zeros_like(y_MH).index_copy(0, order_M, y_MH)
        with torch.autocast("cpu", enabled=False):
            pairs_TKH = pairs_MH.view(*experts_TK.shape, -1).float()
            y_T1H = torch.bmm(weights_TK[:, None], pairs_TKH)
        return y_T1H.to(x_BSH.dtype).view_as(x_BSH)

    def _at_experts(self, rows_MH: Tensor, counts_A: Tensor) -> Tensor:
        """What the experts make of each row, on whatever rank they are."""
        size, group = self.mesh.size(), self.mesh.get_group()
        with torch.no_grad():
            received_A = collectives.all_to_all_single(counts_A, None, None, group)
            counts_NE = collectives.wait_tensor(received_A).view(size, -1)
            sent, received = counts_A.view(size, -1).sum(1).tolist(), counts_NE.sum(1).tolist()
            ends_E = counts_NE.sum(0).cumsum(0).to(torch.int32)
            experts_NE = torch.arange(counts_NE.shape[1]).expand_as(counts_NE).flatten()
            order_R = experts_NE.repeat_interleave(counts_NE.flatten()).argsort(stable=True)
        exchange: Any = collectives.all_to_all_single_autograd
        rows_RH = exchange(rows_MH, received, sent, group)[order_R]
        gate_RF = F.grouped_mm(rows_RH, self.gate.mT, offs=ends_E)
        up_RF = F.grouped_mm(rows_RH, self.up.mT, offs=ends_E)
        y_RH = F.grouped_mm(F.silu(gate_RF) * up_RF, self.down.mT, offs=ends_E)
        back_RH = torch.empty_like(y_RH).index_copy(0, order_R, y_RH)
        y_MH: Tensor = exchange(back_RH, sent, received, group)
        return y_MH


def apply_expert_parallel(
    model: nn.Module, shape: ModelShape, mesh: DeviceMesh, *, seed: int, dtype: torch.dtype
) -> dict[str, nn.Parameter]:
    """Gives every block a mixture of experts that the mesh divides, in place.

    Returns the weights of the experts, by their names in the model, in this precision.
    """
    for index, block in model.layers.items():  # type: ignore[union-attr, operator]
        prefix = f"layers.{index}.feed_forward"
        block.feed_forward = NativeMixture(shape, mesh, prefix, seed=seed)
    found = {}
    for name, parameter in model.named_parameters():
        if name.endswith((".feed_forward.gate", ".feed_forward.up", ".feed_forward.down")):
            parameter.data = parameter.data.to(dtype)
            found[name] = parameter
    return found
