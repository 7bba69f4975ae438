"""Peak memory of a simulated device: the tensors of each pass, and the allocator's losses."""

from __future__ import annotations

import zlib
from typing import Final

from search_spaces.spec.layout import Layout
from search_spaces.spec.model_shape import ModelShape
from workers.simulation.machine import Machine, element_bytes
from workers.simulation.pipeline import Schedule, most_in_flight
from workers.simulation.steps import stage_parameters

_FP32: Final = 4.0
_BLOCK_BYTES: Final = 2 << 20


def peak_memory_bytes(layout: Layout, model: ModelShape, machine: Machine, *, seed: int) -> float:
    """Bytes that the fullest device reserves, its driver's and its communicators' included."""
    states = stage_parameters(layout, model).reshape(layout.vpp, layout.pp).sum(axis=0)
    schedule = Schedule(pp=layout.pp, vpp=layout.vpp, num_microbatches=layout.num_microbatches)
    held = _stage_activation_bytes(layout, model)
    ranks = []
    for rank, parameters in enumerate(states):
        beside = _layer_transient(layout, model)
        if rank == layout.pp - 1:
            beside = max(beside, _head_bytes(layout, model))
        passing = most_in_flight(schedule, rank) * held + beside
        lost = machine.fragmentation * _share_of(layout, seed) * passing
        ranks.append(_state_bytes(layout, parameters) + passing + lost)
    groups = sum(degree > 1 for degree in (layout.tp, layout.pp, layout.dp))
    fixed = machine.context_bytes + groups * machine.communicator_bytes
    return -(-max(ranks) // _BLOCK_BYTES) * _BLOCK_BYTES + fixed


def _share_of(layout: Layout, seed: int) -> float:
    """A number from 0 to 1 that is fixed for a layout: its share of the fragmentation."""
    return zlib.crc32(f"{seed} {layout.key}".encode()) / 2**32


def _state_bytes(layout: Layout, parameters: float) -> float:
    """Weights, fp32 gradients, and Adam's states, the last shared with ZeRO."""
    size = element_bytes(layout.precision)
    optimizer = 8.0 if layout.precision == "fp32" else 12.0
    return parameters * (size + _FP32 + optimizer / layout.zero_group_size)


def _stage_activation_bytes(layout: Layout, model: ModelShape) -> float:
    """Bytes that one forward pass through one stage leaves for its backward pass."""
    layers = model.num_layers / (layout.pp * layout.vpp)
    if layout.recompute == "full":
        return layers * _residual_bytes(layout, model)
    return layers * _layer_bytes(layout, model)


def _residual_bytes(layout: Layout, model: ModelShape) -> float:
    cut = layout.tp if layout.sequence_parallel else 1
    tokens = model.seq_length * layout.micro_batch_size / cut
    return element_bytes(layout.precision) * tokens * model.hidden_size


def _layer_bytes(layout: Layout, model: ModelShape) -> float:
    """Bytes that a block keeps, with fused attention; sequence-parallel inputs are gathered again.

    Selective recomputation also recomputes the attention's output.
    """
    size, tokens = element_bytes(layout.precision), model.seq_length * layout.micro_batch_size
    on_rank = size * tokens / layout.tp
    inputs = 4 * _residual_bytes(layout, model)
    attention = on_rank * (2 * model.hidden_size + 2 * model.kv_hidden_size)
    if layout.recompute == "selective":
        attention -= on_rank * model.hidden_size
    statistics = _FP32 * tokens * model.num_heads / layout.tp
    tensors = 4 if model.family == "llama" else 2
    return inputs + attention + statistics + tensors * on_rank * model.ffn_hidden_size


def _layer_transient(layout: Layout, model: ModelShape) -> float:
    """Additional bytes of a block's backward pass: its gradients, and recomputed activations."""
    revived = _layer_bytes(layout, model) if layout.recompute == "full" else 0.0
    tokens = model.seq_length * layout.micro_batch_size
    widest = element_bytes(layout.precision) * tokens * model.ffn_hidden_size / layout.tp
    gathered = 2 * element_bytes(layout.precision) * tokens * model.hidden_size
    return revived + 2 * widest + gathered


def _head_bytes(layout: Layout, model: ModelShape) -> float:
    """Logits in the precision of the products, and twice in fp32."""
    logits = model.seq_length * layout.micro_batch_size * model.vocab_size / layout.tp
    return logits * (element_bytes(layout.precision) + 2 * _FP32)
