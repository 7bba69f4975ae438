"""A mixture of experts: a router, and feed-forwards of which each token takes a few.

No token is dropped. Tokens are sorted by expert, and each of the layer's matrix products runs as
one product of groups of rows. `RowExchange` sends rows to the ranks that hold their experts.

Shapes: L tokens of this rank beside the layer, T = L etp tokens that it chooses experts of, H
hidden, A experts of all ranks, E = A / N of this rank, N ranks of the ep group, K experts of a
token, M = T K rows sorted by expert, R rows of this rank's experts (M without ep), F local width of
an expert, U = 2 F outputs of gate and up, or F of up alone.
"""

# ruff: noqa: N802, N803, N806, N812, N815 (tensors carry their shape in the name)

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.workers.trainer.comm.collectives import (
    Pending,
    finish,
    gather_rows,
    scatter_rows,
    start_all_to_all_rows,
    start_scatter_rows,
)
from layout_tuner.workers.trainer.comm.groups import AxisGroup
from layout_tuner.workers.trainer.model.backward import Remade
from layout_tuner.workers.trainer.model.kernels import EAGER, Kernels
from layout_tuner.workers.trainer.model.matrix_products import (
    grouped_products,
    refuse_without_grouped_products,
)
from layout_tuner.workers.trainer.model.parameters import ModelParameter
from layout_tuner.workers.trainer.stopwatch import part


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """Which rows of the sorted tokens belong to which expert and token."""

    experts_TK: Tensor
    weights_TK: Tensor
    """What their outputs count, in fp32; the sum over K is the scaling factor of the weights."""
    slopes_TK: Tensor | None
    """Of a sigmoid, divided by the scores; None: the weights are a softmax."""
    order_M: Tensor
    """For each row the index of its pair of token and choice, t K + j."""
    inverse_M: Tensor
    """For each pair its row."""
    ends_E: Tensor
    """The end of the rows of each of this rank's experts, int32."""
    exchange: RowExchange | None
    """Between the ranks that divide the experts; None: this rank has all."""

    @property
    def weights_M(self) -> Tensor:
        """The weight of each row."""
        return self.weights_TK.flatten().index_select(0, self.order_M)

    def sorted(self, x_TH: Tensor) -> Tensor:
        """The rows of the tokens by expert."""
        return x_TH.index_select(0, self.order_M // self.experts_TK.shape[1])

    def at_experts(self, *every_M: Tensor) -> Sequence[Tensor]:
        """Sorted rows on the ranks of their experts."""
        return every_M if self.exchange is None else self.exchange.to_experts(*every_M)

    def start_to_tokens(self, each_R: Tensor) -> tuple[Tensor, Pending | None]:
        """Starts sending rows back to the ranks of their tokens."""
        return (each_R, None) if self.exchange is None else self.exchange.start_to_tokens(each_R)

    def combined(self, y_MH: Tensor) -> Tensor:
        """The sum of each token's rows."""
        pairs_MH = y_MH.index_select(0, self.inverse_M)
        return pairs_MH.view(*self.experts_TK.shape, -1).sum(1)

    @property
    def _counts_E(self) -> Tensor:
        return torch.diff(self.ends_E, prepend=self.ends_E.new_zeros(1)).long()

    def rows_of(self, bias: Tensor, num_rows: int) -> Tensor:
        """The bias of each row's expert, (R, O), of biases of all of them, (E O)."""
        bias_EO, counts_E = bias.detach().view(len(self.ends_E), -1), self._counts_E
        return bias_EO.repeat_interleave(counts_E, 0, output_size=num_rows)

    def bias_gradient(self, grad_RO: Tensor) -> Tensor:
        """The sums over each expert's rows, (E O), in fp32."""
        sums_EO = torch.segment_reduce(grad_RO.float(), "sum", lengths=self._counts_E, unsafe=True)
        return sums_EO.flatten()


class MixtureFunction(Function):
    """residual + the sum over a token's experts of weight x expert(x).

    Forward: over etp an all-gather of the input and a reduce-scatter of the output; over ep an
    all-to-all of the sorted tokens and their weights, and one of the experts' outputs. Backward:
    the same of the gradients. Each rank has a slice of the width of its experts, and all of the
    router, of whose weight's gradient it computes the part of its tokens and slices.

    The weight of an expert multiplies the rows before the second product, as in Megatron-LM: the
    outputs of experts need not be kept. Tokens that were sorted are not kept either but sorted
    again; those that were received are kept. An input that is remade is gathered again over etp.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_LH: Tensor,
        residual_LH: Tensor,
        layer: MixtureOfExperts,
        remade: Remade | None,
    ) -> Tensor:
        x_TH = layer.gathered(x_LH)
        routing = layer.route(x_TH)
        rows_RH, weights_R = routing.at_experts(routing.sorted(x_TH), routing.weights_M)
        up_RU = grouped_products(rows_RH, layer.up_EUH.mT, routing.ends_E)
        if layer.up_bias is not None:
            up_RU.add_(routing.rows_of(layer.up_bias, len(up_RU)))
        ctx.layer, ctx.routing, ctx.remade = layer, routing, remade
        kept = () if routing.exchange is None else (rows_RH,)
        ctx.save_for_backward(x_TH if remade is None else None, up_RU, weights_R, *kept)
        del rows_RH, kept
        inside_RF = layer.row_kernels.activate(layer.activation, up_RU)
        inside_RF.mul_(weights_R[:, None])  # rounded once
        y_RH = grouped_products(inside_RF, layer.down_EHF.mT, routing.ends_E)
        del inside_RF
        if (bias := layer.added_bias) is not None:
            y_RH.add_(routing.rows_of(bias, len(y_RH)) * weights_R[:, None])
        y_MH, work = routing.start_to_tokens(y_RH)
        del y_RH
        _finish(work)
        y_LH = routing.combined(y_MH)
        if layer.etp_group is not None:
            with part("ep"):
                y_LH = scatter_rows(y_LH, layer.etp_group)
        return y_LH.add_(residual_LH)

    @staticmethod
    def backward(ctx: Any, grad_LH: Tensor) -> tuple[Tensor, Tensor, None, None]:
        layer, routing = ctx.layer, ctx.routing
        x_TH, up_RU, weights_R, *kept = ctx.saved_tensors
        (grad_RH,) = routing.at_experts(routing.sorted(layer.gathered(grad_LH)))
        grad_inside_RF = grouped_products(grad_RH, layer.down_EHF, routing.ends_E)
        inside_RF = layer.row_kernels.activate(layer.activation, up_RU)
        grad_weights_R = (grad_inside_RF.float() * inside_RF).sum(-1)
        if (bias := layer.added_bias) is not None:
            grad_weights_R += (grad_RH.float() * routing.rows_of(bias, len(grad_RH))).sum(-1)
        if layer.down_bias is not None:
            grad_bias = routing.bias_gradient(grad_RH.float() * weights_R[:, None])
            layer.down_bias.add_gradient(grad_bias)
        layer.down.add_products(grad_RH, inside_RF.mul_(weights_R[:, None]), routing.ends_E)
        del grad_RH, inside_RF
        grad_RU = layer.row_kernels.activate_backward(
            layer.activation, up_RU, grad_inside_RF.mul_(weights_R[:, None])
        )
        del grad_inside_RF
        if layer.up_bias is not None:
            layer.up_bias.add_gradient(routing.bias_gradient(grad_RU))
        returning = [
            routing.start_to_tokens(each)
            for each in (grouped_products(grad_RU, layer.up_EUH, routing.ends_E), grad_weights_R)
        ]
        if kept:  # while the rows are on their way
            layer.up.add_products(grad_RU, *kept, routing.ends_E)
        for _, work in returning:
            _finish(work)
        (grad_x_MH, _), (grad_weights_M, _) = returning
        grad_TH = routing.combined(grad_x_MH)
        del grad_x_MH, returning
        grad_logits_TA = layer.logit_gradient(grad_weights_M, routing)
        grad_TH.add_(grad_logits_TA @ layer.router.float())
        if x_TH is None:
            x_TH = layer.gathered(ctx.remade.again())
        grad_x_LH, summing = layer.start_scattered(grad_TH)
        if not kept:
            layer.up.add_products(grad_RU, routing.sorted(x_TH), routing.ends_E)
        layer.router.add_product(grad_logits_TA.t(), x_TH.float())
        if layer.router_bias is not None:
            layer.router_bias.add_gradient(grad_logits_TA.sum(0))
        _finish(summing)
        return grad_x_LH, grad_LH, None, None


def _finish(work: Pending | None) -> None:
    """Waits for rows that are on their way over ep or etp."""
    with part("ep"):
        finish(work)


_mix: Callable[..., Tensor] = MixtureFunction.apply


class MixtureOfExperts(nn.Module):
    """A router and this rank's experts, of whose widths it has a slice; adds the residual.

    With `router_score` softmax a token takes the K experts of its largest logits, and their weights
    are the softmax over these K. This is the softmax over all experts with the largest K
    renormalised (Mixtral, arXiv:2401.04088, section 2.1; Qwen3), and Megatron-LM's default. With
    sigmoid it takes those of the largest scores, divided by their sum where K > 1
    (arXiv:2412.19437, equations 13 to 15). There is no loss that balances the experts, and no
    capacity.

    Args:
        router: (A, H).
        up: gate and up of each expert, (E U, H); or up alone.
        down: (E H, F).
        shape: of the layer.
        positions_T: the positions of the tokens in their sequences.
        ep_group: the ranks that divide the experts; None: this rank has all.
        etp_group: the ranks that divide the widths; None: this rank has all.
        shared: the feed-forward that every token takes besides; None: there is none.
        shared_gate: the layer whose sigmoid scales its output (Qwen2-MoE); None: there is none.
        router_bias, up_bias, down_bias: (A), (E U) and (E H); the first rank of etp adds the last.
    """

    def __init__(
        self,
        router: ModelParameter,
        up: ModelParameter,
        down: ModelParameter,
        *,
        shape: ModelShape,
        positions_T: Tensor,
        ep_group: AxisGroup | None,
        etp_group: AxisGroup | None,
        shared: nn.Module | None,
        shared_gate: nn.Module | None = None,
        router_bias: ModelParameter | None = None,
        up_bias: ModelParameter | None = None,
        down_bias: ModelParameter | None = None,
    ) -> None:
        refuse_without_grouped_products()
        super().__init__()
        self.router, self.up, self.down = router, up, down
        self.router_bias, self.up_bias, self.down_bias = router_bias, up_bias, down_bias
        self.num_experts, self.hidden_size = router.shape
        self.per_token, self._positions_T = shape.experts_per_token, positions_T
        self.shape, self.activation = shape, shape.activation_of
        self.ep_group, self.etp_group = ep_group, etp_group
        self._num_own = self.num_experts // (1 if ep_group is None else ep_group.size)
        self.shared, self.shared_gate = shared, shared_gate
        self.kernels: Kernels = EAGER
        self.balanced = False
        """Whether the router's choice is replaced by experts in turn: of choice j at position s,
        expert s K + j modulo E, whatever the layout. Its weights stay the router's."""
        self.load_sums: Tensor | None = None
        """Where the load of the fullest expert over the mean is summed, and passes are counted."""

    @property
    def up_EUH(self) -> Tensor:
        return self.up.detach().view(self._num_own, -1, self.hidden_size)

    @property
    def down_EHF(self) -> Tensor:
        return self.down.detach().view(self._num_own, self.hidden_size, -1)

    @property
    def added_bias(self) -> ModelParameter | None:
        """The bias of outputs that this rank adds."""
        is_first = self.etp_group is None or self.etp_group.rank == 0
        return self.down_bias if is_first else None

    @property
    def row_kernels(self) -> Kernels:
        """Compiled kernels are for one number of rows, which changes where routers send them."""
        return self.kernels if self.ep_group is None or self.balanced else EAGER

    def forward(self, x_LH: Tensor, residual_LH: Tensor, remade: Remade | None = None) -> Tensor:
        if self.shared is not None and self.shared_gate is not None:
            share_L1 = self.shared_gate(x_LH, remade).sigmoid()
            y_LH = self.shared(x_LH, None, remade)
            residual_LH = torch.addcmul(residual_LH, y_LH, share_L1)
        elif self.shared is not None:
            residual_LH = self.shared(x_LH, residual_LH, remade)
        return _mix(x_LH, residual_LH, self, remade)

    def gathered(self, x_LH: Tensor) -> Tensor:
        """The tokens of all ranks that have slices of the same experts."""
        if self.etp_group is None:
            return x_LH
        with part("ep"):
            return gather_rows(x_LH, self.etp_group)

    def start_scattered(self, grad_TH: Tensor) -> tuple[Tensor, Pending | None]:
        """Starts summing gradients over these ranks; returns those of the own tokens."""
        if self.etp_group is None:
            return grad_TH, None
        with part("ep"):
            return start_scatter_rows(grad_TH, self.etp_group)

    def route(self, x_TH: Tensor) -> Routing:
        """Chooses the experts of each token, from logits in fp32.

        Communicates: an all-gather of the counts over ep.
        """
        bias_A = None if self.router_bias is None else self.router_bias.float()
        scores_TA = F.linear(x_TH.float(), self.router.float(), bias_A)
        if self.shape.router_score == "sigmoid":
            scores_TA = scores_TA.sigmoid_()
        experts_TK = self._in_groups(scores_TA).topk(self.per_token, dim=-1).indices
        if self.balanced:
            experts_TK = self._in_turn(experts_TK)
        experts_M = experts_TK.flatten()
        order_M = experts_M.argsort(stable=True)
        rows_M = torch.arange(len(order_M), device=order_M.device)
        ones_M = torch.ones_like(experts_M)
        counts_A = ones_M.new_zeros(self.num_experts).scatter_add_(0, experts_M, ones_M)
        exchange = None if self.ep_group is None else RowExchange(counts_A, self.ep_group)
        if self.load_sums is not None:
            all_A = counts_A if exchange is None else exchange.counts_NA.sum(0)
            fullest = all_A.max() * (self.num_experts / all_A.sum())
            self.load_sums += torch.stack((fullest, torch.ones_like(fullest)))
        weights_TK, slopes_TK = self._weights(scores_TA.gather(1, experts_TK))
        return Routing(
            experts_TK=experts_TK,
            weights_TK=weights_TK,
            slopes_TK=slopes_TK,
            order_M=order_M,
            inverse_M=torch.empty_like(order_M).scatter_(0, order_M, rows_M),
            ends_E=counts_A.cumsum(0).to(torch.int32) if exchange is None else exchange.ends_E,
            exchange=exchange,
        )

    def _in_groups(self, scores_TA: Tensor) -> Tensor:
        """The scores; -inf for experts outside of the groups that a token takes experts of.

        A group counts by the sum of its best scores, as many as a token takes of each group on
        average (arXiv:2412.19437, section 2.1.2).
        """
        groups, taken = self.shape.router_groups, self.shape.router_topk_groups
        if not groups:
            return scores_TA
        scores_TGA = scores_TA.view(len(scores_TA), groups, -1)
        best = min(max(self.per_token // taken, 1), scores_TGA.shape[2])
        sums_TG = scores_TGA.topk(best, dim=-1).values.sum(-1)
        is_other_TG = torch.ones_like(sums_TG, dtype=torch.bool)
        is_other_TG.scatter_(1, sums_TG.topk(taken, dim=-1).indices, False)
        return scores_TGA.masked_fill(is_other_TG[:, :, None], -math.inf).flatten(1)

    def _weights(self, chosen_TK: Tensor) -> tuple[Tensor, Tensor | None]:
        """The weights of the chosen experts, of logits or sigmoids; and the sigmoids' slopes."""
        if self.shape.router_score == "softmax":
            return chosen_TK.softmax(-1).mul_(self.shape.router_scaling_factor), None
        sums = chosen_TK.sum(-1, keepdim=True).add_(1e-20) if self.per_token > 1 else 1.0
        return (chosen_TK / sums).mul_(self.shape.router_scaling_factor), 1.0 - chosen_TK

    def logit_gradient(self, grad_weights_M: Tensor, routing: Routing) -> Tensor:
        """The gradient of the router's logits, (T, A), from that of the weights."""
        weights_TK, slopes_TK = routing.weights_TK, routing.slopes_TK
        grad_TK = grad_weights_M.index_select(0, routing.inverse_M).view_as(weights_TK)
        if slopes_TK is None or self.per_token > 1:
            means_T1 = (weights_TK * grad_TK).sum(-1, keepdim=True)
            grad_TK = grad_TK - means_T1.div_(self.shape.router_scaling_factor)
        grad_TK = weights_TK * grad_TK
        grad_TK = grad_TK if slopes_TK is None else grad_TK.mul_(slopes_TK)
        grad_TA = grad_TK.new_zeros(len(grad_TK), self.num_experts)
        return grad_TA.scatter_(1, routing.experts_TK, grad_TK)

    def _in_turn(self, experts_TK: Tensor) -> Tensor:
        self._positions_T = self._positions_T.to(experts_TK.device)
        choices_K = torch.arange(self.per_token, device=experts_TK.device)
        first_T = self._positions_T * self.per_token
        return (first_T[:, None] + choices_K) % self.num_experts


class RowExchange:
    """Where the rows of a micro-batch go in one layer, and where they come from.

    Communicates over ep: an all-gather of the counts; for each `to_experts` and `start_to_tokens`
    an all-to-all of rows. With balanced routing a rank sends (N - 1) / N of its M rows.

    `counts_A` are this rank's rows for each expert of the ep group.
    """

    def __init__(self, counts_A: Tensor, group: AxisGroup) -> None:
        self._group, size = group, group.size
        with part("ep"):
            self.counts_NA = gather_rows(counts_A[None], group)
        counts_NNE = self.counts_NA.view(size, size, -1)
        rows = counts_NNE.sum(-1).tolist()
        self._sent, self._received = rows[group.rank], [row[group.rank] for row in rows]
        self._largest = max(map(max, rows))
        counts_NE = counts_NNE[:, group.rank]
        self.ends_E = counts_NE.sum(0).cumsum(0).to(torch.int32)
        """The end of each own expert's rows."""
        self._order_R = self._order_by_expert(counts_NE)
        """The received rows by expert; of the same expert in the order of the ranks."""

    def _order_by_expert(self, counts_NE: Tensor) -> Tensor:
        starts_NE = counts_NE.flatten().cumsum(0).view_as(counts_NE) - counts_NE
        sizes, starts = counts_NE.t().flatten(), starts_NE.t().flatten()
        shifts = starts - (sizes.cumsum(0) - sizes)
        num_rows = sum(self._received)
        rows_R = torch.arange(num_rows, device=counts_NE.device)
        return rows_R + shifts.repeat_interleave(sizes, output_size=num_rows)

    def to_experts(self, *every_M: Tensor) -> list[Tensor]:
        """Tensors with a row for each of M as tensors of R, on the ranks of the experts."""
        with part("ep"):
            started = [
                start_all_to_all_rows(
                    each, self._group, self._sent, self._received, largest=self._largest
                )
                for each in every_M
            ]
            for _, work in started:
                finish(work)
        return [received.index_select(0, self._order_R) for received, _ in started]

    def start_to_tokens(self, each_R: Tensor) -> tuple[Tensor, Pending | None]:
        """The reverse: starts sending rows back; returns those of the own tokens."""
        ordered = torch.empty_like(each_R).index_copy_(0, self._order_R, each_R)
        with part("ep"):
            return start_all_to_all_rows(
                ordered, self._group, self._received, self._sent, largest=self._largest
            )
