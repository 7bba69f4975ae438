"""A mixture of experts: a router, and gated feed-forwards of which each token takes a few.

No token is dropped. Tokens are sorted by expert, and each of the layer's matrix products runs as
one product of groups of rows.

Shapes: T tokens of a micro-batch, L tokens of this rank beside the layer (T / tp where tokens are
cut), H hidden, E experts, K experts of a token, M = T K rows sorted by expert, F local width of an
expert.
"""

# ruff: noqa: N802, N803, N806, N812, N815 (tensors carry their shape in the name)

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from workers.trainer.comm.collectives import (
    all_reduce,
    finish,
    gather_rows,
    scatter_rows,
    start_all_reduce,
    start_scatter_rows,
)
from workers.trainer.comm.groups import AxisGroup
from workers.trainer.model.kernels import EAGER
from workers.trainer.model.matrix_products import grouped_products, refuse_without_grouped_products
from workers.trainer.model.parameters import ModelParameter


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """Which rows of the sorted tokens belong to which expert and token."""

    experts_TK: Tensor
    """The experts of each token."""
    weights_TK: Tensor
    """What their outputs count, in fp32; the sum over K is 1."""
    order_M: Tensor
    """For each row the index of its pair of token and choice, t K + j."""
    inverse_M: Tensor
    """For each pair its row."""
    ends_E: Tensor
    """The end of each expert's rows, int32."""

    def sorted(self, x_TH: Tensor) -> Tensor:
        """The rows of the tokens by expert."""
        return x_TH.index_select(0, self.order_M // self.experts_TK.shape[1])

    def combined(self, y_MH: Tensor) -> Tensor:
        """The sum of each token's rows."""
        pairs_MH = y_MH.index_select(0, self.inverse_M)
        return pairs_MH.view(*self.experts_TK.shape, -1).sum(1)


class MixtureFunction(Function):
    """residual + the sum over a token's experts of weight x expert(x).

    Forward: an all-reduce of the output over tp; where tokens are cut, an all-gather of the input
    and a reduce-scatter of the output. Backward: the same of the gradients. Each rank has a slice
    of every expert's width, and all of the router: its logits are the same on all tp ranks, and the
    gradient of its weight is the part of this rank's slices.

    The weight of an expert multiplies the rows before the second product, as in Megatron-LM: the
    outputs of experts need not be kept. The sorted tokens are not kept either but sorted again.
    """

    @staticmethod
    def forward(ctx: Any, x_LH: Tensor, residual_LH: Tensor, layer: MixtureOfExperts) -> Tensor:
        x_TH = x_LH if layer.token_group is None else gather_rows(x_LH, layer.token_group)
        routing = layer.route(x_TH)
        gate_up_M2F = grouped_products(routing.sorted(x_TH), layer.up_EFH.mT, routing.ends_E)
        ctx.layer, ctx.routing = layer, routing
        ctx.save_for_backward(x_TH, gate_up_M2F)
        inside_MF = _weighted(layer.kernels.swiglu(gate_up_M2F), routing)
        y_MH = grouped_products(inside_MF, layer.down_EHF.mT, routing.ends_E)
        del inside_MF
        y_LH = routing.combined(y_MH)
        if layer.token_group is None:
            all_reduce(y_LH, layer.group)
        else:
            y_LH = scatter_rows(y_LH, layer.token_group)
        return y_LH.add_(residual_LH)

    @staticmethod
    def backward(ctx: Any, grad_LH: Tensor) -> tuple[Tensor, Tensor, None]:
        layer, routing = ctx.layer, ctx.routing
        x_TH, gate_up_M2F = ctx.saved_tensors
        whole = layer.token_group is None
        grad_MH = routing.sorted(grad_LH if whole else gather_rows(grad_LH, layer.token_group))
        grad_inside_MF = grouped_products(grad_MH, layer.down_EHF, routing.ends_E)
        inside_MF = layer.kernels.swiglu(gate_up_M2F)
        grad_weight_M = (grad_inside_MF.float() * inside_MF).sum(-1)
        layer.down.add_products(grad_MH, _weighted(inside_MF, routing), routing.ends_E)
        del grad_MH, inside_MF
        grad_M2F = layer.kernels.swiglu_backward(gate_up_M2F, _weighted(grad_inside_MF, routing))
        del grad_inside_MF
        grad_x_MH = grouped_products(grad_M2F, layer.up_EFH, routing.ends_E)
        grad_TH = routing.combined(grad_x_MH)
        del grad_x_MH
        grad_logits_TE = _logit_gradient(grad_weight_M, routing, layer.num_experts)
        grad_TH.add_(grad_logits_TE @ layer.router.float())
        if whole:
            grad_x_LH, summing = grad_TH, start_all_reduce(grad_TH, layer.group)
        else:
            grad_x_LH, summing = start_scatter_rows(grad_TH, layer.token_group)
        layer.up.add_products(grad_M2F, routing.sorted(x_TH), routing.ends_E)
        layer.router.add_product(grad_logits_TE.t(), x_TH.float())
        finish(summing)
        return grad_x_LH, grad_LH, None


def _weighted(x_MF: Tensor, routing: Routing) -> Tensor:
    """Each row times the weight of its expert, in place; the product is rounded once."""
    weights_M = routing.weights_TK.flatten().index_select(0, routing.order_M)
    return x_MF.mul_(weights_M[:, None])


def _logit_gradient(grad_weight_M: Tensor, routing: Routing, num_experts: int) -> Tensor:
    """The gradient of the router's logits from that of the weights: softmax over K of them."""
    weights_TK = routing.weights_TK
    grad_TK = grad_weight_M.index_select(0, routing.inverse_M).view_as(weights_TK)
    grad_TK = weights_TK * (grad_TK - (weights_TK * grad_TK).sum(-1, keepdim=True))
    grad_TE = grad_TK.new_zeros(len(grad_TK), num_experts)
    return grad_TE.scatter_(1, routing.experts_TK, grad_TK)


_mix: Callable[..., Tensor] = MixtureFunction.apply


class MixtureOfExperts(nn.Module):
    """A router and the experts, of whose widths each tp rank has a slice; adds the residual.

    A token takes the K experts of its largest logits, and their weights are the softmax over these
    K. This is the softmax over all experts with the largest K renormalised (Mixtral,
    arXiv:2401.04088, section 2.1; Qwen3), and Megatron-LM's default. There is no loss that balances
    the experts, and no capacity.

    Args:
        router: (E, H).
        up: gate and up of each expert, (E 2F, H).
        down: (E H, F).
        per_token: K.
        positions_S: the positions of this rank's tokens in their sequence.
        group: the tp group; None: there is one rank.
        cuts_tokens: whether the tokens beside the layer are divided over tp too.
        shared: the feed-forward that every token takes besides; None: there is none.
    """

    def __init__(
        self,
        router: ModelParameter,
        up: ModelParameter,
        down: ModelParameter,
        *,
        per_token: int,
        positions_S: Tensor,
        group: AxisGroup | None,
        cuts_tokens: bool,
        shared: nn.Module | None,
    ) -> None:
        refuse_without_grouped_products()
        super().__init__()
        self.router, self.up, self.down = router, up, down
        self.num_experts, self.hidden_size = router.shape
        self.per_token, self.positions_S = per_token, positions_S
        self.group, self.token_group = group, group if cuts_tokens else None
        self.shared = shared
        self.kernels = EAGER
        self.balanced = False
        """Whether the router's choice is replaced by experts in turn: of choice j at position s,
        expert s K + j modulo E, whatever the layout. Its weights stay the router's."""
        self.load_sums: Tensor | None = None
        """Where the load of the fullest expert over the mean is summed, and passes are counted."""

    @property
    def up_EFH(self) -> Tensor:
        return self.up.detach().view(self.num_experts, -1, self.hidden_size)

    @property
    def down_EHF(self) -> Tensor:
        return self.down.detach().view(self.num_experts, self.hidden_size, -1)

    def forward(self, x_LH: Tensor, residual_LH: Tensor) -> Tensor:
        if self.shared is not None:
            residual_LH = self.shared(x_LH, residual_LH)
        return _mix(x_LH, residual_LH, self)

    def route(self, x_TH: Tensor) -> Routing:
        """Chooses the experts of each token, from logits in fp32."""
        logits_TE = F.linear(x_TH.float(), self.router.float())
        experts_TK = logits_TE.topk(self.per_token, dim=-1).indices
        if self.balanced:
            experts_TK = self._in_turn(experts_TK)
        experts_M = experts_TK.flatten()
        order_M = experts_M.argsort(stable=True)
        rows_M = torch.arange(len(order_M), device=order_M.device)
        ones_M = torch.ones_like(experts_M)
        counts_E = ones_M.new_zeros(self.num_experts).scatter_add_(0, experts_M, ones_M)
        if self.load_sums is not None:
            fullest = counts_E.max() * (self.num_experts / len(order_M))
            self.load_sums += torch.stack((fullest, torch.ones_like(fullest)))
        return Routing(
            experts_TK=experts_TK,
            weights_TK=logits_TE.gather(1, experts_TK).softmax(-1),
            order_M=order_M,
            inverse_M=torch.empty_like(order_M).scatter_(0, order_M, rows_M),
            ends_E=counts_E.cumsum(0).to(torch.int32),
        )

    def _in_turn(self, experts_TK: Tensor) -> Tensor:
        tokens_T = torch.arange(len(experts_TK), device=experts_TK.device)
        positions_S = self.positions_S.to(tokens_T.device)
        first_T = positions_S[tokens_T % len(positions_S)] * self.per_token
        choices_K = torch.arange(self.per_token, device=first_T.device)
        return (first_T[:, None] + choices_K) % self.num_experts
