"""Seconds of a transformer block, of the embedding and of the head, on one rank.

A pass is an array of the seconds of `AXES`: those of the device, and those of communication by
axis as far as nothing hides it. What a rank computes depends on a few knobs alone, so that layouts
which agree in these share their blocks.

The collectives are those of the trainer: over tp two sums a pass (arXiv:1909.08053), or gathers and
scatters of tokens (arXiv:2205.05198); over tensor columns the sums of the other products
(arXiv:2305.13525) and of norms' statistics; over cp keys and values, or heads for tokens; over ep
tokens for the ranks of their experts, and back.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from layout_tuner.array_types import Floats
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.layouts.narrow_formats import NARROW, wide_precision
from layout_tuner.search_spaces.layouts.recomputation import modules_of
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.workers.simulation.machine import Machine, element_bytes
from layout_tuner.workers.simulation.placement import ALONE, Axis, Place, Placement

AXES: Final = ("compute", "tp", "cp", "ep", "dp")
COMPUTE, TP, CP, EP, DP = range(5)

_HOST_OPERATIONS: Final = {"gpt": 33.0, "llama": 46.0}
"""Operations of a block's forward pass in eager PyTorch; the backward pass has twice as many."""
_LOGIT_BYTES: Final = (26.0, 16.0)
"""Bytes that are moved for each logit, forward and backward: casts, maximum, exponential, sums."""
_ACCUMULATION_BYTES: Final = 8.0
"""The sum of a weight's gradients is read and written in fp32."""


def seconds(**by_axis: float) -> Floats:
    """Seconds by axis; those that are left out are 0."""
    return np.array([by_axis.get(axis, 0.0) for axis in AXES])


@dataclass(frozen=True)
class BlockTimes:
    """One block for one micro-batch; of a model with experts, one that has them."""

    layout: Layout
    model: ModelShape
    machine: Machine
    crosses: bool = False
    """Whether the pipeline crosses nodes."""

    @cached_property
    def _places(self) -> dict[Axis, Place]:
        placement = Placement.on(self.layout, self.machine.cluster)
        axes: tuple[Axis, ...] = ("tp", "tp_columns", "cp", "etp", "ep")
        is_alone = {axis: getattr(self.layout, axis) == 1 for axis in axes}
        return {axis: ALONE if is_alone[axis] else placement.place(axis) for axis in axes}

    @property
    def _is_cut(self) -> bool:
        """Whether tokens are cut over tp between the products."""
        return self.layout.sequence_parallel and self.layout.tp > 1

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on the rank."""
        return self.model.seq_length * self.layout.micro_batch_size // self.layout.cp

    @property
    def _size(self) -> int:
        return element_bytes(self.layout.precision)

    @property
    def _width(self) -> float:
        """Features of a token on the rank."""
        return self.model.hidden_size / self.layout.tp_columns

    @property
    def _ups(self) -> float:
        return 2.0 if self.model.family == "llama" else 1.0

    @property
    def residual_bytes(self) -> float:
        """The residual stream of a micro-batch on the rank, with all of its tokens."""
        return self._size * self.tokens * self._width

    @cached_property
    def _products(self) -> list[tuple[bool, float, float]]:
        """Products of all tokens: whether it is over whole inputs (a column), and its sides."""
        m, t = self.model, self.layout.tp
        dense = m.shared_expert_ffn_hidden_size if m.num_experts else m.ffn_hidden_size
        found = [
            (True, (m.query_size + 2 * m.kv_hidden_size) / t, self._width),
            (False, self._width, m.query_size / t),
        ]
        if dense:
            found.append((True, self._ups * dense / t, self._width))
            found.append((False, self._width, dense / t))
        return found

    @cached_property
    def _expert_rows(self) -> float:
        """Rows of tokens that the rank's experts take under balanced routing."""
        here = self.tokens / self.layout.tp if self._is_cut else self.tokens
        return self.model.experts_per_token * here * self.layout.etp

    @cached_property
    def _expert_products(self) -> list[tuple[float, float]]:
        m, etp = self.model, self.layout.etp
        if not m.num_experts:
            return []
        inner = m.moe_ffn_hidden_size / etp
        return [(2 * inner, m.hidden_size), (m.hidden_size, inner)]

    @cached_property
    def forward(self) -> Floats:
        """The forward pass: its sums over tp, columns and cp are waited for."""
        own = sum(self._matmul_s(self.tokens, out, inner) for _, out, inner in self._products)
        own += self._grouped_s("forward") + self._attention_s + self._elementwise_s
        own += self._casts_s(of_outputs=False)
        sums = self._row_sums_s * sum(not is_column for is_column, *_ in self._products)
        gathers = self._gather_s * sum(is_column for is_column, *_ in self._products)
        forward = seconds(compute=own, tp=sums + gathers + self._column_sums_s + self._norm_sums_s)
        forward += self._context(backward=False) + self._experts
        return self._with_host(forward, passes=1)

    def backward(self, *, weights_later: bool, recomputes: bool = True) -> Floats:
        """The backward pass, with what it recomputes if the layer is one that does.

        The sum of an input's gradient runs beside the products for weights, unless these are put
        off; a gather beside the product for the input.
        """
        compute = self._grouped_s("inputs") + 2.5 * self._attention_s + 2 * self._elementwise_s
        compute += self._casts_s(of_outputs=True)
        tensor = self._norm_sums_s
        for is_column, out, inner in self._products:
            to_input = self._matmul_s(self.tokens, inner, out)
            to_weight = self._matmul_s(out, inner, self.tokens)
            compute += to_input
            if is_column:
                tensor += self.machine.beside_s(self._gather_s, to_input)
                hidden = 0.0 if weights_later else to_weight
                tensor += self.machine.beside_s(self._row_sums_s, hidden)
            else:
                tensor += self._gather_s  # of the gradient, under sequence parallelism
                sum_s = self._columns_s(self._size * self.tokens * inner)
                hidden = 0.0 if weights_later or self._is_cut else to_weight
                tensor += self.machine.beside_s(sum_s, hidden)
        backward = seconds(compute=compute, tp=tensor)
        backward += self._context(backward=True) + self._experts
        if not weights_later:
            backward[COMPUTE] += self._weights_s
        backward = self._with_host(backward, passes=2)
        return backward + self._again if recomputes else backward

    @cached_property
    def _again(self) -> Floats:
        """What a layer that recomputes runs again, as the embedded trainer does.

        Of a dense feed-forward these are the first product and the activation, of a norm no gather.
        The activations of experts are always made again, so that `moe_act` adds nothing.
        """
        if self.layout.recompute == "full":
            return self.forward
        modules, moved = modules_of(self.layout.recompute), self.machine.software.elementwise
        again, stream_s = seconds(), self.machine.device.stream_s
        if "core_attention" in modules:
            again += seconds(compute=self._attention_s) + self._context(backward=False)
        if "layernorm" in modules:
            here = self.residual_bytes / (self.layout.tp if self._is_cut else 1)
            again += seconds(compute=stream_s(moved * 4 * here, 2), tp=self._norm_sums_s)
        if "mlp" in modules and not self.model.num_experts:
            _, out, inner = self._products[2]
            inside = self._size * (1 + 1 / self._ups) * out * self.tokens
            product_s = self._matmul_s(self.tokens, out, inner)
            sums_s = self._gather_s + self._columns_s(self._size * self.tokens * out)
            again += seconds(compute=product_s + stream_s(moved * inside), tp=sums_s)
        return again

    @cached_property
    def weights(self) -> Floats:
        """The products for weights alone, as zero bubble puts them off."""
        return seconds(compute=self._weights_s)

    @cached_property
    def _weights_s(self) -> float:
        products = sum(self._matmul_s(out, i, self.tokens) for _, out, i in self._products)
        held = sum(out * inner for _, out, inner in self._products)
        if m := self.model.num_experts:
            held += m / self.layout.ep * sum(out * inner for out, inner in self._expert_products)
        added = self.machine.device.stream_s(_ACCUMULATION_BYTES * held)
        return products + self._grouped_s("weights") + added

    def _with_host(self, passed: Floats, *, passes: int) -> Floats:
        """The host launches kernels ahead of the device, or the device waits for it."""
        count = self.machine.software.host_operations * _HOST_OPERATIONS[self.model.family]
        layout = self.layout
        # A pass has two collectives of each axis, or a gather and a scatter twice.
        calls = 2 * ((layout.tp > 1) * (1 + self._is_cut) + (layout.cp > 1))
        calls += 4 * (layout.tp_columns > 1)
        if self.model.num_experts:
            calls += 2 * ((layout.ep > 1) + (layout.etp > 1))
        host_s = passes * self.machine.host_s * count + calls * self.machine.host_collective_s
        if self.crosses and layout.tp > 1:
            host_s *= 1 + self.machine.host_crowding * layout.tp
        passed[COMPUTE] += max(host_s - float(passed.sum()), 0.0)
        return passed

    def _matmul_s(self, rows: float, columns: float, inner: float) -> float:
        return self.machine.device.matmul_s(rows, columns, inner, self.layout.precision)

    def _casts_s(self, *, of_outputs: bool) -> float:
        """Quantising the inputs of the products, or the gradients of their outputs."""
        if self.layout.precision not in NARROW:
            return 0.0
        side = 0 if of_outputs else 1
        elements = self.tokens * sum(sides[side] for _, *sides in self._products)
        elements += self._expert_rows * sum(sides[side] for sides in self._expert_products)
        return elements * NARROW[self.layout.precision].cast_bytes / self.machine.device.bytes_per_s

    def _grouped_s(self, which: str) -> float:
        """The experts' products, each kind of all experts of the rank in one kernel."""
        if not self.model.num_experts:
            return 0.0
        count = self.model.num_experts / self.layout.ep
        rows = self._expert_rows / count
        total, matmul_s = 0.0, self.machine.device.matmul_s
        for out, inner in self._expert_products:
            sides = {
                "forward": (rows, out, inner),
                "inputs": (rows, inner, out),
                "weights": (out, inner, rows),
            }[which]
            total += matmul_s(*sides, self.layout.precision, count)
        return total

    @cached_property
    def _attention_s(self) -> float:
        """Causal attention; half of the positions that FLOPs are counted over are hidden."""
        m, layout, device = self.model, self.layout, self.machine.device
        heads, b = m.num_heads / layout.tp, layout.micro_batch_size
        positions = m.attention_positions / m.num_layers
        flops = 2.0 * positions * m.query_size / layout.tp * self.tokens
        precision = wide_precision(layout.precision)
        blocks = max(b * heads * m.seq_length / 128 / layout.cp, 1.0)
        fused_s = device.attention_s(blocks, flops, m.head_size, precision)
        if m.fuses_attention(self.machine.software.fused_attention):
            return fused_s
        # Five passes over the scores: product, mask and scaling, softmax, dropout, and product.
        return fused_s + device.stream_s(5 * self._size * heads * positions * self.tokens, 5)

    @cached_property
    def _elementwise_s(self) -> float:
        """Norms, residual sums, activations, rotations, and the sorting of tokens by expert."""
        m, layout = self.model, self.layout
        here = self.residual_bytes / (layout.tp if self._is_cut else 1)
        dense = m.shared_expert_ffn_hidden_size if m.num_experts else m.ffn_hidden_size
        inside = (self._ups + 1) * dense / layout.tp * self.tokens
        inside += 2.0 * (m.query_size + 2 * m.kv_hidden_size) / layout.tp * self.tokens
        kernels = 9
        if m.num_experts:
            width = 3 * m.moe_ffn_hidden_size / layout.etp + 4 * m.hidden_size
            inside += self._expert_rows * width
            kernels += 8
        moved = self.machine.software.elementwise * (8 * here + self._size * inside)
        return self.machine.device.stream_s(moved, kernels)

    @cached_property
    def _row_sums_s(self) -> float:
        """The sum over tp after half a block, or with cut tokens its scatter."""
        cut, collectives = self._is_cut, self.machine.collectives
        sum_s = collectives.scatter_s if cut else collectives.reduce_s
        return sum_s(self._places["tp"], self.residual_bytes)

    @cached_property
    def _gather_s(self) -> float:
        """The gather of cut tokens before half a block."""
        if not self._is_cut:
            return 0.0
        return self.machine.collectives.gather_s(self._places["tp"], self.residual_bytes)

    def _columns_s(self, size_bytes: float) -> float:
        return self.machine.collectives.reduce_s(self._places["tp_columns"], size_bytes)

    @cached_property
    def _column_sums_s(self) -> float:
        """The sums over tensor columns of outputs, each of one product."""
        outputs = (out for is_column, out, _ in self._products if is_column)
        return sum(self._columns_s(self._size * self.tokens * out) for out in outputs)

    @cached_property
    def _norm_sums_s(self) -> float:
        """Statistics of two norms over tensor columns: two numbers a token, of an RMSNorm one."""
        numbers = 1.0 if self.model.family == "llama" else 2.0
        here = self.tokens / (self.layout.tp if self._is_cut else 1)
        return 2 * self._columns_s(4.0 * numbers * here)

    def _context(self, *, backward: bool) -> Floats:
        """What attention exchanges over cp."""
        layout, collectives = self.layout, self.machine.collectives
        if layout.cp == 1:
            return seconds()
        kv = 2 * self._size * self.tokens * self.model.kv_hidden_size / layout.tp
        q = self._size * self.tokens * self.model.query_size / layout.tp
        if layout.cp_comm_type == "a2a":
            return seconds(
                cp=sum(collectives.exchange_s(self._places["cp"], n) for n in (q + kv, q))
            )
        gathered_s = collectives.gather_s(self._places["cp"], kv * layout.cp)
        if layout.cp_comm_type == "all_gather":
            back = collectives.scatter_s(self._places["cp"], kv * layout.cp) if backward else 0.0
            return seconds(cp=gathered_s + back)
        # A ring: all of its steps but one run beside blocks of attention; gradients are in fp32.
        ring_s = gathered_s * (1 + 4 / self._size) if backward else gathered_s
        blocks_s = self._attention_s * (2.5 if backward else 1.0) * (layout.cp - 1) / layout.cp
        return seconds(cp=self.machine.beside_s(ring_s, blocks_s))

    @cached_property
    def _experts(self) -> Floats:
        """Tokens to the ranks of their experts and back, and over etp."""
        collectives = self.machine.collectives
        if not self.model.num_experts:
            return seconds()
        row_bytes = self._size * self.model.hidden_size
        gathered = row_bytes * self._expert_rows / self.model.experts_per_token
        etp = self._places["etp"]
        over_etp = collectives.gather_s(etp, gathered) + collectives.scatter_s(etp, gathered)
        there = collectives.exchange_s(self._places["ep"], row_bytes * self._expert_rows)
        return seconds(ep=2 * there, tp=over_etp)

    @cached_property
    def embedding(self) -> tuple[Floats, Floats]:
        """The look-up of the tokens, forward and backward."""
        moved = self.machine.device.stream_s(2 * self.residual_bytes)
        sums = self._row_sums_s + self._columns_s(self.residual_bytes) / 2
        return seconds(compute=moved, tp=sums), seconds(compute=2 * moved, tp=self._gather_s)

    @cached_property
    def head(self) -> tuple[Floats, Floats, Floats]:
        """The output projection and the loss: forward, backward, and products for weights."""
        layout, device, m = self.layout, self.machine.device, self.model
        precision = wide_precision(layout.precision)
        columns, inner = m.vocab_size / layout.tp_ranks, m.hidden_size
        logits = self.tokens * columns
        forward, backward, weights = (
            device.matmul_s(rows, columns_of, over, precision)
            for rows, columns_of, over in (
                (self.tokens, columns, inner),
                (self.tokens, inner, columns),
                (columns, inner, self.tokens),
            )
        )
        ahead, back = (device.stream_s(moved * logits, 5) for moved in _LOGIT_BYTES)
        # The loss needs the sums of three numbers a token.
        losses = 3 * self.machine.collectives.reduce_s(self._places["tp"], 4.0 * self.tokens)
        gathers = self._gather_s + self._columns_s(self.residual_bytes) / 2
        return (
            seconds(compute=forward + ahead, tp=gathers + losses),
            seconds(compute=backward + back, tp=self._row_sums_s),
            seconds(compute=weights),
        )
