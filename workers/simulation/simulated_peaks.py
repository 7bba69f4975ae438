"""Peak memory of simulated ranks: the tensors of each pass, and the allocator's blocks.

Which passes are held at once follows from the trainer's tables (`walk.held_passes`). Tensors take
blocks of the device's allocator, PyTorch's: under 1 MiB they share blocks of 2 MiB, under 10 MiB of
20 MiB, and others are rounded up to 2 MiB. What lies free between blocks is a share of the
activations that differs between layouts.
"""

from __future__ import annotations

import zlib
from collections import Counter
from dataclasses import dataclass
from typing import Final

import numpy as np

from layout_tuner.array_types import Floats
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.layouts.narrow_formats import NARROW
from layout_tuner.search_spaces.layouts.recomputation import modules_of
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.search_spaces.models.sublayers import dense_width
from layout_tuner.workers.simulation.knob_effects import NO_EFFECTS, HiddenEffects
from layout_tuner.workers.simulation.machine import Machine, element_bytes
from layout_tuner.workers.simulation.steps import (
    Held,
    held_parameters,
    layers_by_kind,
    stage_layers,
)
from layout_tuner.workers.simulation.walk import Schedule, held_passes

_FP32: Final = 4.0
_ROUNDED: Final = 2 << 20
_OWN_BLOCK: Final = 10 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """The peak of each rank of a pipeline stage, in bytes."""

    allocated_bytes: float
    """In use by tensors."""
    reserved_bytes: float
    """Held by the allocator."""


def rank_memory(
    layout: Layout,
    model: ModelShape,
    machine: Machine,
    *,
    seed: int,
    effects: HiddenEffects = NO_EFFECTS,
) -> list[RankMemory]:
    """The peaks of each pipeline rank, first stage first; `effects` are those of job knobs."""
    layers = stage_layers(layout, model, by_work=machine.software.splits_by_work)
    held = held_parameters(layout, model, layers)
    is_fused = model.fuses_attention(machine.software.fused_attention)
    shapes = [*(each.shape for each in model.cost_kinds), *model.mtp_shapes]
    of = {shape: _Tensors(layout, shape, is_fused) for shape in shapes}
    first = of[shapes[0]]
    lost = machine.fragmentation * zlib.crc32(f"{seed} {layout.without_job.key}".encode()) / 2**32
    by_knobs = effects.of(layout).memory
    found = []
    for rank, pairs in enumerate(held_passes(Schedule.of(layout))):
        chunks = range(rank, len(layers), layout.pp)
        allocated, reserved = _state_bytes(layout, model, [held[s] for s in chunks])
        by_kind = (layers_by_kind(layout, model, stage, layers[stage]) for stage in chunks)
        counts = sum(by_kind, start=Counter[tuple[ModelShape, bool]]())
        kept, waiting, beside = np.zeros(2), np.zeros(2), np.zeros(2)
        # The layers of a stage that recompute come first: the backward pass ends with them.
        for again in (False, True):
            here = [
                (of[kind], n / layout.vpp) for (kind, which), n in counts.items() if which == again
            ]
            for tensors, _ in here or ([(first, 0.0)] if not counts else []):
                beside = np.maximum(beside, tensors.passing(again) - kept)
            kept = kept + sum((n * tensors.kept(again) for tensors, n in here), np.zeros(2))
            waiting = waiting + sum((n * tensors.late() for tensors, n in here), np.zeros(2))
        outputs = 1 + model.num_mtp_layers
        head = outputs * first.head() if rank == layout.pp - 1 else np.zeros(2)
        beside = np.maximum(beside, head)
        held_at_once = [
            in_flight * kept + late * waiting + (in_flight - 1) * head for in_flight, late in pairs
        ]
        in_use, in_blocks = (by_knobs * (np.max(held_at_once, axis=0) + beside)).tolist()
        found.append(
            RankMemory(
                allocated_bytes=allocated + in_use, reserved_bytes=reserved + in_blocks * (1 + lost)
            )
        )
    return found


def device_bytes(layout: Layout, machine: Machine, rank: RankMemory) -> float:
    """What a rank takes of its device: the driver's and the communicators' buffers included."""
    degrees = (layout.tp, layout.tp_columns, layout.cp, layout.pp, layout.dp, layout.ep)
    groups = sum(degree > 1 for degree in degrees)
    return rank.reserved_bytes + machine.context_bytes + groups * machine.communicator_bytes


def _state_bytes(layout: Layout, model: ModelShape, chunks: list[Held]) -> tuple[float, float]:
    """Weights, fp32 gradients, masters and moments of a rank's stages: in use, and in blocks.

    Of what ZeRO-2 and 3 shard, two whole layers are there beside the own share.
    """
    size, zero = float(element_bytes(layout.precision)), layout.zero_stage
    others, experts = sum(each.others for each in chunks), sum(each.experts for each in chunks)
    own = others / layout.zero_group_size + experts / layout.expert_zero_group_size
    layer = max(
        (kind.num_layer_parameters - kind.num_expert_parameters) / layout.tp_ranks
        + kind.num_expert_parameters / (layout.etp * layout.ep)
        for kind in (each.shape for each in model.cost_kinds)
    )
    whole = others + experts
    masters_and_moments = 8.0 if layout.precision == "fp32" else 12.0
    masters_and_moments -= 4.0 if layout.optimizer_states == "bf16" else 0.0
    weight = size
    if layout.precision in NARROW:
        inside = NARROW[layout.precision].weight_bytes(is_sharded=zero > 0)
        weight = sum(sum(each.weight_bytes(size, inside)) for each in chunks) / max(whole, 1.0)
    window = own + min(2 * layer, whole) if layout.zero_group_size > 1 else whole
    sizes = (
        weight * (window if zero == 3 else whole),
        _FP32 * (window if zero >= 2 else whole),
        masters_and_moments * own,
    )
    return sum(sizes), sum(map(_block, sizes))


def _block(size_bytes: float) -> float:
    """Bytes of the allocator's block for a tensor; smaller ones share theirs."""
    return size_bytes if size_bytes < _OWN_BLOCK else -(-size_bytes // _ROUNDED) * _ROUNDED


@dataclass(frozen=True, eq=False)
class _Tensors:
    """What a layer of one kind, or the head, holds for one micro-batch on one rank.

    Each quantity is a pair of bytes: in use, and in blocks of the allocator.
    """

    layout: Layout
    model: ModelShape
    fused_attention: bool

    @property
    def _tokens(self) -> float:
        return self.model.seq_length * self.layout.micro_batch_size / self.layout.cp

    @property
    def _size(self) -> int:
        return element_bytes(self.layout.precision)

    @property
    def _width(self) -> float:
        return self.model.hidden_size / self.layout.tp_columns

    @property
    def _part(self) -> float:
        """Features of the residual stream for each token of a micro-batch."""
        return self._width / self._cut

    @property
    def _cut(self) -> int:
        """Ranks that tokens are cut over between the products."""
        return self.layout.tp if self.layout.sequence_parallel else 1

    @property
    def _rows(self) -> float:
        """Rows in the rank's experts for each token of a micro-batch."""
        return self.model.experts_per_token * (1 / self._cut) * self.layout.etp

    def _bytes(self, elements: list[float]) -> Floats:
        sizes = [self._size * self._tokens * each for each in elements]
        return np.array((sum(sizes), sum(map(_block, sizes))))

    @property
    def _stored(self) -> float:
        """The kept input of a product, over what it is in the type of activations."""
        narrow = NARROW.get(self.layout.precision)
        return narrow.stored_bytes / self._size if narrow else 1.0

    def _modules(self, again: bool) -> tuple[str, ...]:
        return modules_of(self.layout.recompute) if again else ()

    def _mixer(self, modules: tuple[str, ...]) -> list[float]:
        """Elements per token of each tensor that a mixer keeps, without its normed input."""
        m, t, stored = self.model, self.layout.tp, self._stored
        if not m.num_query_heads:
            parts = m.mixer_parts
            kept = [parts.kept_divided / t, parts.kept_whole / self._cut]
            return [each for each in kept if each]
        values = m.num_query_heads * m.value_head_size / t
        attention = [
            m.query_size / t,
            m.num_key_heads * m.head_size / t,
            m.num_key_heads * m.value_head_size / t,
        ]
        if m.kv_lora_rank and "mla_up_proj" in modules:
            attention = []
        if m.qk_norm:
            attention += attention[:2]
        attention += [m.query_size / t] * (2 * m.attention_output_gate)
        if m.kv_lora_rank:
            attention.append(m.mixer_parts.kept_whole / self._cut)
        statistics = _FP32 / self._size * m.num_query_heads / t
        if self.layout.precision in NARROW:
            attention.append(stored * values)  # beside the one that attention keeps
        if "core_attention" not in modules:
            attention += [values, statistics]
            if not self.fused_attention:
                scores = m.num_query_heads / t * m.seq_length
                attention += [scores, scores, *([scores / self._size] * bool(m.attention_dropout))]
        return attention

    def _layer(self, modules: tuple[str, ...]) -> list[float]:
        """Elements per token of each tensor that a layer keeps, if modules recompute."""
        m, t, part, stored = self.model, self.layout.tp, self._part, self._stored
        attention = self._mixer(modules)
        width, gathered = dense_width(self.model) / t, self._width
        inside = [*[width] * m.num_ups, stored * width]
        if "mlp" in modules and not m.num_experts:
            inside, gathered = [], part
        if m.num_experts:
            came = [stored * self.model.routed_width * self._rows] if self.layout.ep > 1 else []
            inside += [m.moe_ffn_hidden_size / self.layout.etp * self._rows] * 2 + came
        normed = [] if "layernorm" in modules else [stored * self._width, stored * gathered]
        masks = [part / self._size] * (2 if m.hidden_dropout else 0)  # of two sums, a byte each
        # The inputs of two norms, and of two products, which are gathered where tokens are cut.
        ends = [part, part, *normed, *masks]
        if m.num_sublayers == 1:  # or of one
            ends = [part, *normed[m.mixer is None :][:1], *masks[:1]]
            inside = inside if m.mixer is None else []
        return [*ends, *attention, *inside]

    def kept(self, again: bool) -> Floats:
        """Bytes that a layer keeps from its forward to its backward pass."""
        if again and self.layout.recompute == "full":
            return self._bytes([self._part])
        return self._bytes(self._layer(self._modules(again)))

    def late(self) -> Floats:
        """Bytes that products put off need: their inputs, and the gradients of their outputs."""
        m, t, width = self.model, self.layout.tp, self._width
        dense = dense_width(self.model) / t
        inputs, outputs = [], []
        for each in m.mixer_parts.matrices:
            is_row, is_column = each.split == "rows", each.split == "columns"
            inputs.append(each.rows / t if is_row else each.rows / self.layout.tp_columns)
            outputs.append(each.columns / t if is_column else each.columns / self.layout.tp_columns)
        if m.feed_forward is not None:
            inputs += [width, dense]
            outputs += [m.num_ups * dense, width]
        if m.num_experts:
            inner = m.moe_ffn_hidden_size / self.layout.etp
            inputs += [self.model.routed_width * self._rows, inner * self._rows]
            outputs += [m.num_ups * inner * self._rows, self.model.routed_width * self._rows]
        return self._bytes([self._stored * each for each in inputs + outputs])

    def passing(self, again: bool) -> Floats:
        """Bytes of one layer's backward pass beside what is kept.

        The feed-forward is where the most is there: of two norms one is made again by then.
        """
        m, layout = self.model, self.layout
        widest = dense_width(self.model) / layout.tp
        if m.feed_forward is None:
            widest = max(each.columns for each in m.mixer_parts.matrices) / layout.tp
        if m.num_experts:
            widest = max(widest, m.moe_ffn_hidden_size / layout.etp * self._rows)
        made = [self._width, self._width, widest, widest]
        if m.is_gated:
            made.append(widest)
        if layout.cp > 1 and layout.cp_comm_type != "a2a":
            others = 1 if layout.cp_comm_type == "p2p" else layout.cp - 1
            made.append(4 * others * m.kv_hidden_size / layout.tp)
        if layout.pp > 1:
            made += [self._part] * (2 if layout.vpp > 1 else 1)  # under way from and to neighbours
        modules = self._modules(again)
        revived = [self._stored * self._width] if "layernorm" in modules else []
        if "mlp" in modules and m.feed_forward == "dense":
            revived = [self._stored * self._width, *[widest] * m.num_ups, self._stored * widest]
        if again and layout.recompute == "full":
            revived = self._layer(())
        return self._bytes(made + revived)

    def head(self) -> Floats:
        """Bytes of the logits in fp32 and in the precision of the products, and their input."""
        logits = self.model.vocab_size / self.layout.tp_ranks
        copies = [_FP32 / self._size * logits]
        if self._size < _FP32:
            copies.append(logits)
        return self._bytes([*copies, self._part, float(self.model.hidden_size)])
