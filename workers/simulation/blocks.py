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
from typing import Final, NamedTuple

import numpy as np

from layout_tuner.array_types import Floats
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.layouts.narrow_formats import NARROW, wide_precision
from layout_tuner.search_spaces.layouts.recomputation import modules_of
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.search_spaces.models.sublayers import Split, dense_width
from layout_tuner.workers.simulation.machine import Machine, element_bytes
from layout_tuner.workers.simulation.placement import ALONE, Axis, Place, Placement

AXES: Final = ("compute", "tp", "cp", "ep", "dp")
COMPUTE, TP, CP, EP, DP = range(5)

_HOST_OPERATIONS: Final = {"gpt": 33.0, "llama": 46.0}
"""Operations of a block's forward pass in eager PyTorch; the backward pass has twice as many."""
_LOGIT_BYTES: Final = (26.0, 16.0)
"""Bytes that are moved for each logit, forward and backward: casts, maximum, exponential, sums."""
_STATE_SIDE: Final = 128.0
"""Inner side of the products by which states are computed: about a head's width and a chunk."""
_ACCUMULATION_BYTES: Final = 8.0
"""The sum of a weight's gradients is read and written in fp32."""


def seconds(**by_axis: float) -> Floats:
    """Seconds by axis; those that are left out are 0."""
    return np.array([by_axis.get(axis, 0.0) for axis in AXES])


class _TokenProduct(NamedTuple):
    """A product of tokens with a matrix on a rank."""

    split: Split
    out: float
    inner: float

    @property
    def is_column(self) -> bool:
        return self.split == "columns"


@dataclass(frozen=True)
class BlockTimes:
    """One layer for one micro-batch, of a model whose layers are of one kind."""

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
    def residual_bytes(self) -> float:
        """The residual stream of a micro-batch on the rank, with all of its tokens."""
        return self._size * self.tokens * self._width

    @cached_property
    def _products(self) -> list[_TokenProduct]:
        """Products of all tokens, those of the mixer first."""
        layout = self.layout
        found = []
        for each in self.model.mixer_parts.matrices:
            out, inner = float(each.columns), float(each.rows)
            if each.split == "columns":
                out, inner = out / layout.tp, inner / layout.tp_columns
            elif each.split == "rows":
                out, inner = out / layout.tp_columns, inner / layout.tp
            found.append(_TokenProduct(each.split, out, inner))
        return found + self._inside

    @property
    def _latent_products(self) -> list[_TokenProduct]:
        """Those that make query, key and value of their latents."""
        m = self.model
        widths = (m.q_lora_rank, m.kv_lora_rank) if m.kv_lora_rank and m.num_query_heads else ()
        return [each for each in self._products if each.is_column and each.inner in widths]

    @cached_property
    def _inside(self) -> list[_TokenProduct]:
        """The products of a dense feed-forward, or of a shared expert."""
        m, t = self.model, self.layout.tp
        if not (width := dense_width(m)):
            return []
        return [
            _TokenProduct("columns", m.num_ups * width / t, self._width),
            _TokenProduct("rows", self._width, width / t),
        ]

    def _rows(self, product: _TokenProduct) -> float:
        """Tokens of a product: of a matrix that tp does not divide, those that the rank holds."""
        cuts = product.split == "whole" and self._is_cut
        return self.tokens / self.layout.tp if cuts else self.tokens

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
        inner, wide = m.moe_ffn_hidden_size / etp, m.routed_width
        return [(m.num_ups * inner, wide), (wide, inner)]

    @cached_property
    def forward(self) -> Floats:
        """The forward pass: its sums over tp, columns and cp are waited for."""
        own = sum(self._matmul_s(self._rows(each), *each[1:]) for each in self._products)
        own += self._grouped_s("forward") + self._attention_s + self._elementwise_s
        own += self._casts_s(of_outputs=False) + self._states_s
        sums = self._row_sums_s(self._width) * sum(p.split == "rows" for p in self._products)
        gathers = sum(self._gather_s(p.inner) for p in self._products if p.is_column)
        forward = seconds(compute=own, tp=sums + gathers + self._column_sums_s + self._norm_sums_s)
        forward += self._context(backward=False) + self._experts
        return self._with_host(forward, passes=1)

    def backward(self, *, weights_later: bool, recomputes: bool = True) -> Floats:
        """The backward pass, with what it recomputes if the layer is one that does.

        The sum of an input's gradient runs beside the products for weights, unless these are put
        off; a gather beside the product for the input.
        """
        compute = self._grouped_s("inputs") + 2.5 * self._attention_s + 2 * self._elementwise_s
        compute += 2 * self._states_s
        compute += self._casts_s(of_outputs=True)
        tensor = self._norm_sums_s
        for product in self._products:
            _, out, inner = product
            to_input = self._matmul_s(self._rows(product), inner, out)
            to_weight = self._matmul_s(out, inner, self._rows(product))
            compute += to_input
            if product.is_column:
                tensor += self.machine.beside_s(self._gather_s(inner), to_input)
                hidden = 0.0 if weights_later else to_weight
                tensor += self.machine.beside_s(self._row_sums_s(inner), hidden)
            elif product.split == "rows":
                tensor += self._gather_s(out)  # of the gradient, under sequence parallelism
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
        if "mla_up_proj" in modules:
            for each in self._latent_products:
                product_s = self._matmul_s(self.tokens, each.out, each.inner)
                again += seconds(compute=product_s, tp=self._gather_s(each.inner))
        if "mlp" in modules and self._inside and not self.model.num_experts:
            _, out, inner = self._inside[0]
            inside = self._size * (1 + 1 / self.model.num_ups) * out * self.tokens
            product_s = self._matmul_s(self.tokens, out, inner)
            sums_s = self._gather_s(inner) + self._columns_s(self._size * self.tokens * out)
            again += seconds(compute=product_s + stream_s(moved * inside), tp=sums_s)
        return again

    @cached_property
    def weights(self) -> Floats:
        """The products for weights alone, as zero bubble puts them off."""
        return seconds(compute=self._weights_s)

    @cached_property
    def _weights_s(self) -> float:
        products = sum(self._matmul_s(p.out, p.inner, self._rows(p)) for p in self._products)
        held = sum(out * inner for _, out, inner in self._products)
        if m := self.model.num_experts:
            held += m / self.layout.ep * sum(out * inner for out, inner in self._expert_products)
        added = self.machine.device.stream_s(_ACCUMULATION_BYTES * held)
        return products + self._grouped_s("weights") + added

    def _with_host(self, passed: Floats, *, passes: int) -> Floats:
        """The host launches kernels ahead of the device, or the device waits for it."""
        count = self.machine.software.host_operations * _HOST_OPERATIONS[self.model.family]
        count *= self.model.num_sublayers / 2
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
    def _states_s(self) -> float:
        """The states of Mamba-2 and delta nets: small products, by chunks of tokens."""
        flops = self.model.mixer_parts.flops_of_token / self.layout.tp
        columns = flops / (2 * _STATE_SIDE)
        return self._matmul_s(self.tokens, columns, _STATE_SIDE) if flops else 0.0

    @cached_property
    def _attention_s(self) -> float:
        """Causal attention; half of the positions that FLOPs are counted over are hidden."""
        m, layout, device = self.model, self.layout, self.machine.device
        if not m.num_query_heads:
            return 0.0
        heads, b = m.num_query_heads / layout.tp, layout.micro_batch_size
        positions = m.attention_positions / m.num_layers
        flops = m.mixer_parts.flops_of_position / 2 * positions / layout.tp * self.tokens
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
        inside = (m.num_ups + 1) * dense_width(m) / layout.tp * self.tokens
        projected = sum(each.columns for each in m.mixer_parts.matrices if each.split == "columns")
        inside += 2.0 * projected / layout.tp * self.tokens
        here *= m.num_sublayers / 2
        kernels = 9
        if m.num_experts:
            width = (m.num_ups + 1) * m.moe_ffn_hidden_size / layout.etp
            width += 4 * m.routed_width
            inside += self._expert_rows * width
            kernels += 8
        moved = self.machine.software.elementwise * (8 * here + self._size * inside)
        return self.machine.device.stream_s(moved, kernels)

    def _row_sums_s(self, width: float) -> float:
        """The sum over tp of features of all tokens, or with cut tokens its scatter."""
        cut, collectives = self._is_cut, self.machine.collectives
        sum_s = collectives.scatter_s if cut else collectives.reduce_s
        return sum_s(self._places["tp"], self._size * self.tokens * width)

    def _gather_s(self, width: float) -> float:
        """The gather of features of cut tokens before half a block."""
        if not self._is_cut:
            return 0.0
        return self.machine.collectives.gather_s(
            self._places["tp"], self._size * self.tokens * width
        )

    def _columns_s(self, size_bytes: float) -> float:
        return self.machine.collectives.reduce_s(self._places["tp_columns"], size_bytes)

    @cached_property
    def _column_sums_s(self) -> float:
        """The sums over tensor columns of outputs, each of one product."""
        outputs = (each.out for each in self._products if each.is_column)
        return sum(self._columns_s(self._size * self.tokens * out) for out in outputs)

    @cached_property
    def _norm_sums_s(self) -> float:
        """Statistics of two norms over tensor columns: two numbers a token, of an RMSNorm one."""
        numbers = 2.0 if self.model.has_layer_norms else 1.0
        here = self.tokens / (self.layout.tp if self._is_cut else 1)
        return self.model.num_layer_norms * self._columns_s(4.0 * numbers * here)

    def _context(self, *, backward: bool) -> Floats:
        """What attention exchanges over cp."""
        layout, collectives = self.layout, self.machine.collectives
        if layout.cp == 1 or not self.model.num_query_heads:
            return seconds()
        m = self.model
        kv_width = m.num_key_heads * (m.head_size + m.value_head_size)
        kv = self._size * self.tokens * kv_width / layout.tp
        q = self._size * self.tokens * m.query_size / layout.tp
        out = self._size * self.tokens * m.num_query_heads * m.value_head_size / layout.tp
        if layout.cp_comm_type == "a2a":
            return seconds(
                cp=sum(collectives.exchange_s(self._places["cp"], n) for n in (q + kv, out))
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
        row_bytes = self._size * self.model.routed_width
        gathered = row_bytes * self._expert_rows / self.model.experts_per_token
        etp = self._places["etp"]
        over_etp = collectives.gather_s(etp, gathered) + collectives.scatter_s(etp, gathered)
        there = collectives.exchange_s(self._places["ep"], row_bytes * self._expert_rows)
        return seconds(ep=2 * there, tp=over_etp)

    @cached_property
    def embedding(self) -> tuple[Floats, Floats]:
        """The look-up of the tokens, forward and backward."""
        moved = self.machine.device.stream_s(2 * self.residual_bytes)
        sums = self._row_sums_s(self._width) + self._columns_s(self.residual_bytes) / 2
        gather_s = self._gather_s(self._width)
        return seconds(compute=moved, tp=sums), seconds(compute=2 * moved, tp=gather_s)

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
        gathers = self._gather_s(self._width) + self._columns_s(self.residual_bytes) / 2
        return (
            seconds(compute=forward + ahead, tp=gathers + losses),
            seconds(compute=backward + back, tp=self._row_sums_s(self._width)),
            seconds(compute=weights),
        )

    @cached_property
    def joined(self) -> tuple[Floats, Floats, Floats]:
        """A depth's projection of hidden state and embedding: forward, backward, and weights."""
        out, inner = self.model.hidden_size / self.layout.tp, 2.0 * self.model.hidden_size
        sides = (self.tokens, out, inner), (self.tokens, inner, out), (out, inner, self.tokens)
        over_tp = self._gather_s(inner) + self._row_sums_s(self._width)
        forward, backward, weights = (seconds(compute=self._matmul_s(*each)) for each in sides)
        return forward + seconds(tp=over_tp), backward + seconds(tp=over_tp), weights
