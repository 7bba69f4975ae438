"""The passes of one layout: what each stage takes, kernel by kernel and message by message."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from search_spaces.layout import Layout
from search_spaces.model_shape import ModelShape
from tuner.simulation.kernels import element_bytes
from tuner.simulation.machine import Machine
from tuner.simulation.network import GroupPlace

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of one transformer block on one rank, for one micro-batch.

    What a rank computes depends on the layout's tp, micro-batch, sequence parallelism, recomputation
    and precision alone, so that layouts which agree in these may share it.
    """

    layout: Layout
    model: ModelShape
    machine: Machine

    @property
    def _tokens(self) -> int:
        return self.model.seq_length * self.layout.micro_batch_size

    @property
    def _is_cut(self) -> bool:
        return self.layout.sequence_parallel and self.layout.tp > 1

    @cached_property
    def _products(self) -> list[tuple[int, int]]:
        """Output and input features of each product of the block, on one rank."""
        m, t = self.model, self.layout.tp
        gates = 2 if m.family == "llama" else 1
        return [
            ((m.hidden_size + 2 * m.kv_hidden_size) // t, m.hidden_size),
            (m.hidden_size, m.hidden_size // t),
            (gates * m.ffn_hidden_size // t, m.hidden_size),
            (m.hidden_size, m.ffn_hidden_size // t),
        ]

    @cached_property
    def forward_s(self) -> float:
        """The forward pass, with what it sends."""
        own = sum(self._matmul_s(self._tokens, out, inner) for out, inner in self._products)
        return own + self._attention_s + self._elementwise_s + 2 * self._exchange_s

    @cached_property
    def backward_s(self) -> float:
        """The backward pass, with what is computed again.

        Gradients of weights run beside the sum of the input's gradients, which hides where it is
        the shorter one.
        """
        to_inputs = sum(self._matmul_s(self._tokens, inner, out) for out, inner in self._products)
        to_weights = sum(self._matmul_s(out, inner, self._tokens) for out, inner in self._products)
        interfered = self.machine.interference * min(to_weights, 2 * self._exchange_s)
        exposed = max(to_weights, 2 * self._exchange_s) + interfered
        gathered_again = self._gather_s if self._is_cut else 0.0
        own = to_inputs + exposed + 2.4 * self._attention_s + 2 * self._elementwise_s
        return own + 2 * gathered_again + self._recomputed_s

    @property
    def _recomputed_s(self) -> float:
        if self.layout.recompute == "full":
            return self.forward_s
        return self._attention_s if self.layout.recompute == "selective" else 0.0

    def _matmul_s(self, rows: int, columns: int, inner: int) -> float:
        return self.machine.device.matmul_s(rows, columns, inner, precision=self.layout.precision)

    @cached_property
    def _attention_s(self) -> float:
        m, layout = self.model, self.layout
        return self.machine.device.attention_s(
            layout.micro_batch_size,
            m.seq_length,
            max(m.num_heads // layout.tp, 1),
            m.head_size,
            precision=layout.precision,
        )

    @cached_property
    def _elementwise_s(self) -> float:
        """Two norms and two sums over the residual stream, and the feed-forward's activation."""
        stream_s = self.machine.device.stream_s
        size = element_bytes(self.layout.precision)
        here = self._tokens // self.layout.tp if self._is_cut else self._tokens
        residual = stream_s(size * 2.5 * here * self.model.hidden_size)
        gates = 3 if self.model.family == "llama" else 2
        activation = stream_s(
            size * gates * self._tokens * self.model.ffn_hidden_size / self.layout.tp
        )
        return 4 * residual + activation

    @cached_property
    def _exchange_s(self) -> float:
        """What follows half a block: an all-reduce, or a reduce-scatter and an all-gather."""
        if self._is_cut:
            return 2 * self._gather_s
        return self.machine.network.all_reduce_s(self._tp_place, self.activation_bytes)

    @cached_property
    def _gather_s(self) -> float:
        return self.machine.network.share_s(self._tp_place, self.activation_bytes)

    @property
    def _tp_place(self) -> GroupPlace:
        return GroupPlace(size=self.layout.tp, stride=1)

    @property
    def activation_bytes(self) -> float:
        """The residual stream of a whole micro-batch."""
        size = element_bytes(self.layout.precision)
        return float(size * self._tokens * self.model.hidden_size)

    @cached_property
    def head_s(self) -> tuple[float, float]:
        """The output projection and the loss, forward and backward."""
        columns, inner = self.model.vocab_size // self.layout.tp, self.model.hidden_size
        logits_bytes = 4.0 * self._tokens * columns
        loss_s = self.machine.device.stream_s(3 * logits_bytes)
        forward = self._matmul_s(self._tokens, columns, inner)
        backward = self._matmul_s(self._tokens, inner, columns)
        backward += self._matmul_s(columns, inner, self._tokens)
        return forward + loss_s, backward + loss_s

    @cached_property
    def embedding_s(self) -> tuple[float, float]:
        """The look-up of the tokens, forward and backward."""
        moved = self.machine.device.stream_s(2 * self.activation_bytes)
        return moved + self._exchange_s, 2 * moved


def stage_times(times: LayerTimes, layout: Layout) -> tuple[Floats, Floats]:
    """Seconds of a forward and of a backward pass of each stage, before any device is slow."""
    stages = layout.pp * layout.vpp
    layers = times.model.num_layers / stages
    forward = np.full(stages, layers * times.forward_s)
    backward = np.full(stages, layers * times.backward_s)
    for stage, (ahead, back) in ((0, times.embedding_s), (-1, times.head_s)):
        forward[stage] += ahead
        backward[stage] += back
    return forward, backward


def hop_times(times: LayerTimes, layout: Layout) -> Floats:
    """Seconds from each rank of the pipeline to the next one, the last one's next being the first."""
    shares = layout.tp if layout.sequence_parallel else 1
    together = layout.tp * layout.dp
    hops = [
        times.machine.network.hop_s(
            rank * together,
            (rank + 1) % layout.pp * together,
            together,
            times.activation_bytes / shares,
        )
        for rank in range(layout.pp)
    ]
    return np.array(hops) if layout.pp > 1 else np.zeros(1)
