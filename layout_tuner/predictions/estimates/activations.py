"""Activations that a layer holds on one rank for each token of a micro-batch, in elements.

With sequence parallelism tp divides the tokens between layers, and tensor columns divide their
features there. A mixture of experts takes tokens as they are, gathered over etp.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from layout_tuner.array_types import Floats, Ints
from layout_tuner.predictions.estimates.trainer_storage import TrainerStorage
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns, code_of, of_narrow
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.search_spaces.models.sublayers import dense_width

FP32_BYTES: Final = 4.0
HALF_BYTES: Final = 2.0
_ROUTING_BYTES: Final = 32.0
"""Of a token and expert: three indices, and its weight with the token and with the row."""
_RECEIVED_BYTES: Final = 8.0
"""Of a row from another rank: its place by expert."""

_FP32: Final = code_of("precision", "fp32")
_FULL: Final = code_of("recompute", "full")
_SELECTIVE: Final = code_of("recompute", "selective")
_P2P: Final = code_of("cp_comm_type", "p2p")
_A2A: Final = code_of("cp_comm_type", "a2a")
_GPIPE: Final = code_of("schedule", "gpipe")


def element_bytes(columns: LayoutColumns) -> Floats:
    """Bytes of an activation, and of a weight in a matrix multiplication."""
    return np.where(columns.precision == _FP32, FP32_BYTES, HALF_BYTES)


def weight_bytes(
    columns: LayoutColumns, storage: TrainerStorage, of_layers: Floats, every: Floats
) -> Floats:
    """Mean bytes of a stage's weights, of which a format may narrow those of the layers.

    Norms and routers, which are in bf16, are a thousandth of a layer, and not told apart.
    """
    element, precision = element_bytes(columns), columns.precision
    whole = of_narrow(precision, lambda of: of.weight_bytes(is_sharded=False) - HALF_BYTES)
    if not (storage.stores_narrow and whole.any()):
        return element
    own = of_narrow(precision, lambda of: of.weight_bytes(is_sharded=True) - HALF_BYTES)
    return element + np.where(columns.zero_stage > 0, own, whole) * of_layers / every


def kept_elements(columns: LayoutColumns, model: ModelShape, storage: TrainerStorage) -> Floats:
    """Elements per token that a layer keeps for the backward pass, without gathered inputs.

    Here and below all layers of `model` are of one kind (`rank_stages.layer_shapes`).
    """
    kept = _layer_elements(columns, model, storage) - _repeated(columns, model, storage)
    return np.where(columns.recompute == _FULL, residual_elements(columns, model), kept)


def _repeated(
    columns: LayoutColumns, model: ModelShape, storage: TrainerStorage, norms: float = 2.0
) -> Floats:
    """Elements per token of a layer that recomputation of its parts makes again.

    Beside those of `_selectively_repeated`: the inside of a dense feed-forward; of experts what
    they keep beside the input of the activation; query, key and value of latent attention; and the
    outputs of its norms, of `norms` at most.
    """
    repeated = np.where(
        columns.recompute == _SELECTIVE, _selectively_repeated(columns, model, storage), 0.0
    )
    if not columns.recomputes_modules.any():
        return repeated
    part, parts = residual_elements(columns, model), _inside_parts(model, storage)
    by_module = {
        "core_attention": _score_elements(columns, model, storage),
        "layernorm": min(norms, float(model.num_layer_norms)) * part,
    }
    if latent := _latent_elements(model):
        by_module["mla_up_proj"] = latent / columns.tp
    if not model.num_experts:
        by_module["mlp"] = parts * model.ffn_hidden_size / columns.tp
    else:
        rows, again = _expert_rows(columns, model, part), _expert_parts(model, storage)
        again -= float(model.num_ups)
        by_module["moe_act"] = rows * again * model.moe_ffn_hidden_size / columns.etp
    for module, elements in by_module.items():
        is_here = columns.repeats(module) & columns.recomputes_modules
        repeated = repeated + np.where(is_here, elements, 0.0)
    return repeated


def _inside_parts(model: ModelShape, storage: TrainerStorage) -> float:
    """Widths of a feed-forward that it keeps of its inside.

    Without a gate they are the input of the activation and its output.
    """
    if not model.is_gated:
        return 2.0
    return 3.0 if storage.fused_swiglu else 4.0


def _expert_parts(model: ModelShape, storage: TrainerStorage) -> float:
    """The same of a routed expert.

    Without a gate its output is there with and without the token's weight, which no fusion of
    Megatron-LM's takes in by default (core/transformer/moe/experts.py at d98e8a6, `bias_act_func`).
    """
    if storage.sorts_experts_again:
        return float(model.num_ups)
    return _inside_parts(model, storage) if model.is_gated else 3.0


def _selectively_repeated(
    columns: LayoutColumns, model: ModelShape, storage: TrainerStorage
) -> Floats:
    """Elements per token of a layer that selective recomputation makes again.

    They are the attention scores (arXiv:2205.05198, section 5). By operator (torchtitan 0.3.0,
    distributed/activation_checkpoint.py) they are all but the layer's input and the outputs of
    attention, of every second matrix product (query, value, gate, down), and of communication: the
    two scattered sums of tensor parallelism, and the exchanged rows of experts.
    """
    if not storage.selective_by_operator:
        return _score_elements(columns, model, storage)
    h, part, wide = _features(columns, model), residual_elements(columns, model), columns.tp > 1
    halves = model.mixer_parts.matrices[:-1:2]
    inside = float(_output_size(model) + dense_width(model))
    inside += sum(each.columns for each in halves if each.split == "columns")
    inside -= 0 if model.kv_lora_rank else model.kv_hidden_size  # one matrix is those of q, k, v
    kept = part + inside / columns.tp + np.where(dense_width(model) > 0, h, 0.0)
    if model.kv_lora_rank:
        whole = sum(each.columns for each in halves if each.split == "whole")
        kept = kept + whole * _token_share(columns)
    kept = kept + np.where(wide, float(model.num_sublayers) * part, 0.0)
    if model.num_experts:
        rows = _expert_rows(columns, model, part) * model.routed_width
        kept = kept + np.where(columns.ep > 1, 2.0 * rows, 0.0)
    return np.maximum(_layer_elements(columns, model, storage) - kept, 0.0)


def _output_size(model: ModelShape) -> int:
    """Features of a token that the mixer hands to its last matrix; 0: there is no mixer."""
    matrices = model.mixer_parts.matrices
    return matrices[-1].rows if matrices else 0


def _latent_elements(model: ModelShape) -> float:
    """Elements of a token of query, key and value that latent attention makes of its latents."""
    is_latent = model.kv_lora_rank and model.has_softmax_attention
    return float(model.mixer_parts.kept_divided - _output_size(model)) if is_latent else 0.0


def _score_elements(columns: LayoutColumns, model: ModelShape, storage: TrainerStorage) -> Floats:
    """Elements per token of the attention scores that a layer keeps.

    Attention that is not fused keeps the softmax of the scores. Dropout of scores adds a mask of
    one byte each and what is left of them: at 16 bits 5 a s bytes together (arXiv:2205.05198,
    equation 2). Fused attention keeps neither: it draws the mask again from the seed.
    """
    if model.fuses_attention(storage.fused_attention):
        return np.zeros(())
    dropped = 1.0 + 1.0 / element_bytes(columns) if _drops_scores(model, storage) else 0.0
    return np.asarray(
        (1.0 + dropped) * model.num_query_heads * model.seq_length / columns.tp, dtype=np.float64
    )


def _drops_scores(model: ModelShape, storage: TrainerStorage) -> bool:
    stated = model.attention_dropout
    return storage.drops_scores if stated is None else stated > 0


def gathered_elements(columns: LayoutColumns, model: ModelShape) -> Floats:
    """Elements per token that a layer keeps of the gathered inputs of its matrices."""
    return np.where(columns.recompute == _FULL, 0.0, _inputs_beyond(columns, model)) - (
        _gathered_again(columns, model)
    )


def _gathered_again(columns: LayoutColumns, model: ModelShape, norms: float = 2.0) -> Floats:
    """Of those, what recomputation of modules gathers again: after norms, or for a feed-forward."""
    if not columns.recomputes_modules.any():
        return np.zeros(())
    has_norms, norms = columns.repeats("layernorm"), min(norms, float(model.num_layer_norms))
    of_input, of_latents = _beyond_of_mixer(columns, model)
    beyond = _inputs_beyond(columns, model) - of_latents
    again = np.where(has_norms, norms * (beyond / max(float(model.num_layer_norms), 1.0)), 0.0)
    if not model.num_experts:
        of_feed_forward = _features(columns, model) - residual_elements(columns, model)
        of_feed_forward = of_feed_forward * float(dense_width(model) > 0)
        again = np.where(columns.repeats("mlp") & ~has_norms, of_feed_forward, again)
    if model.kv_lora_rank:
        of_mixer = of_latents + np.where(has_norms, 0.0, of_input)
        again = again + np.where(columns.repeats("mla_up_proj"), of_mixer, 0.0)
    return np.where(columns.recomputes_modules, again, 0.0)


def _inputs_beyond(columns: LayoutColumns, model: ModelShape) -> Floats:
    """Elements per token by which gathered inputs of column-parallel matrices exceed a part.

    Over tp there is one of the mixer, and one of a dense feed-forward or shared expert. Experts
    gather theirs over etp. Both matrices of a parallel block gather and keep the one normed input.
    """
    beyond = sum(_beyond_of_mixer(columns, model), start=_beyond_of_feed_forward(columns, model))
    if model.num_experts:
        beyond = beyond + (columns.etp - 1.0) * residual_elements(columns, model)
    return np.asarray(beyond, dtype=np.float64)


def _beyond_of_feed_forward(columns: LayoutColumns, model: ModelShape) -> Floats:
    """Of those, the input of a dense feed-forward or shared expert."""
    h, part = _features(columns, model), residual_elements(columns, model)
    beyond = np.where(part < h, h, 0.0) if model.parallel_block else h - part
    return beyond * float(dense_width(model) > 0)


def _beyond_of_mixer(columns: LayoutColumns, model: ModelShape) -> tuple[Floats, Floats]:
    """Of those, what the mixer gathers of the normed input, and of latents.

    Without a latent of queries both are gathered, and the rank's part of the input is kept too.
    """
    h, part, mixer = _features(columns, model), residual_elements(columns, model), model.mixer_parts
    if not mixer.latents:
        return np.asarray(float(mixer.gathered > 0) * (h - part), dtype=np.float64), np.zeros(())
    share = _token_share(columns)
    of_input = np.where((share < 1.0) & (model.q_lora_rank == 0), h, 0.0)
    return of_input, mixer.latents * (1.0 - share)


def _layer_elements(columns: LayoutColumns, model: ModelShape, storage: TrainerStorage) -> Floats:
    """Elements per token that one layer keeps for its backward pass.

    Korthikanti et al. (arXiv:2205.05198, equation 2) count s b h (10 + 24/t + 5 a s / (h t)) bytes
    at 16 bits for GPT. In elements: the inputs of two norms and of two
    column-parallel matrices are replicated over tp (4 h), or split over tp with sequence
    parallelism, and always over tensor columns (`gathered_elements` adds matrix inputs that stay
    gathered). Query, key, value and the attention's output are split over tp, and so is the inside
    of the feed-forward: 2 f for GELU's input and output; 4 f for SwiGLU's gate, its activation, up,
    and their product, or 3 f without the activation. Norms of queries and keys keep their inputs.
    Dropout before the two residual sums keeps masks of one byte a feature.

    A token has k rows inside its experts, of the tokens that tp leaves a rank and etp gathers. The
    embedded trainer keeps their 2 f, and 32 bytes a row that say where it belongs; where rows came
    from other ranks (ep > 1), their inputs and 8 bytes too. Others keep the sorted inputs and the
    output of the activation. Some keep the inputs of narrow products as they are quantised. Where
    experts work on latents these are kept before and after them; a gated shared expert keeps its
    output.

    What other mixers keep `sublayers` says; latents are of the tokens of a rank's part.
    """
    part, mixer = residual_elements(columns, model), model.mixer_parts
    inputs = 2.0 * model.num_layer_norms * part
    if model.hidden_dropout:
        inputs = inputs + float(model.num_sublayers) * part / element_bytes(columns)
    if mixer.kept_whole:
        inputs = inputs + mixer.kept_whole * _token_share(columns)
    if mixer.latents:  # attention keeps its output before it is exchanged, its matrix after
        exchanged = (columns.cp > 1) & (columns.cp_comm_type == _A2A)
        inputs = inputs + np.where(exchanged, _output_size(model) / columns.tp, 0.0)
    parts = _inside_parts(model, storage)
    feed_forward = parts * dense_width(model)
    if model.num_experts:
        width = model.routed_width
        beside = 2.0 * model.expert_latent_size * _token_share(columns)
        beside = beside + (part if model.shared_expert_gate else 0.0)
        came, again = columns.ep > 1, storage.sorts_experts_again
        index = _ROUTING_BYTES + np.where(came, _RECEIVED_BYTES, 0.0)
        row = index / element_bytes(columns) + np.where(came | (not again), width, 0.0)
        inside = _expert_parts(model, storage) * model.moe_ffn_hidden_size / columns.etp
        inputs = inputs + _expert_rows(columns, model, part) * (row + inside) + beside
    elements = inputs + (mixer.kept_divided + feed_forward) / columns.tp
    elements = elements + _score_elements(columns, model, storage)
    if storage.stores_narrow:
        saved = of_narrow(columns.precision, lambda of: 1.0 - of.stored_bytes / HALF_BYTES)
        elements = elements - saved * _product_inputs(columns, model, part)
    return np.asarray(elements, dtype=np.float64)


def _product_inputs(columns: LayoutColumns, model: ModelShape, part: Floats) -> Floats:
    """Elements per token that go into the matrix products of a layer."""
    inputs = part + _output_size(model) / columns.tp if model.mixer else np.zeros(())
    if latents := model.mixer_parts.latents:
        inputs = inputs + latents * _token_share(columns)
    if not model.num_experts:
        inputs = inputs + part if model.feed_forward else inputs
        return np.asarray(inputs + model.ffn_hidden_size / columns.tp, dtype=np.float64)
    row = model.routed_width + model.moe_ffn_hidden_size / columns.etp
    shared = model.shared_expert_ffn_hidden_size / columns.tp
    if latent := model.expert_latent_size:
        shared = shared + latent * _token_share(columns)  # into the matrix that leads out of it
    return np.asarray(inputs + shared + _expert_rows(columns, model, part) * row, dtype=np.float64)


def late_elements(columns: LayoutColumns, model: ModelShape) -> Floats:
    """Elements per token that a layer keeps until the products of its weight gradients run.

    They are both factors of each product: its inputs, gathered where a column-parallel matrix
    gathers them, and the gradients of its outputs.
    """
    h, part, ups = _features(columns, model), residual_elements(columns, model), model.num_ups
    inputs = _product_inputs(columns, model, part) + _inputs_beyond(columns, model)
    shares = {"rows": 1.0 / columns.tp_columns, "columns": 1.0 / columns.tp}
    mixer: Floats = np.zeros(())
    for matrix in reversed(model.mixer_parts.matrices):
        mixer = mixer + matrix.columns * shares.get(matrix.split, _token_share(columns))
    if not model.num_experts:
        inner = h if model.feed_forward else np.zeros(())
        if model.parallel_block:  # the input, and where it is whole the gradient, are the mixer's
            inner = np.where(part < h, h, 0.0) - part
        late = inputs + mixer + inner + ups * float(model.ffn_hidden_size) / columns.tp
        return np.asarray(late, dtype=np.float64)
    row = model.routed_width / columns.tp_columns + ups * model.moe_ffn_hidden_size / columns.etp
    experts = part + _expert_rows(columns, model, part) * row  # the router has the tokens unsorted
    if latent := model.expert_latent_size:
        experts = experts + part + latent * _token_share(columns)
    if width := model.shared_expert_ffn_hidden_size:
        experts = experts + (h + ups * float(width) / columns.tp)
    return np.asarray(inputs + mixer + experts, dtype=np.float64)


def backward_elements(columns: LayoutColumns, model: ModelShape, storage: TrainerStorage) -> Floats:
    """Elements per token that one layer's backward pass holds in addition to the kept ones.

    The peak is inside the feed-forward: the gradients of the layer's output, of the activation's
    output, and of the activation's input, which by then replaces that output. This is h + f for
    GELU, and h + 3 f for SwiGLU, whose input is twice as wide and whose activation is recomputed.
    With full recomputation the layer's activations are added, except for its input, which was kept;
    with recomputation of parts those that it makes again, of one norm at a time.

    With k experts a token there are k rows of each: of h the sorted gradient, and later the input's
    gradient before and after it is put in order, and where it comes from other ranks; of f the
    activation's output, its gradient and the product of the two, or the gradient of its input of
    2 f and a product.

    Latent attention, mixers with a state and layers without a feed-forward may have the peak in the
    mixer: the gradients of what it keeps and what it makes again, when the feed-forward is free.
    """
    f, part = model.ffn_hidden_size, residual_elements(columns, model)
    made = _features(columns, model) + (3.0 if model.is_gated else 1.0) * f / columns.tp
    if model.num_experts:
        count = _expert_rows(columns, model, part)
        width, inside = model.routed_width, count * model.moe_ffn_hidden_size / columns.etp
        rows, ups = count * width, float(model.num_ups)
        one_is_fp32 = (columns.precision != _FP32) & model.is_gated  # a product of two
        wide = np.where(one_is_fp32, 6.0, 3.0)
        put_back = part * (width / model.hidden_size)
        combined = np.where(columns.ep > 1, rows, columns.etp * put_back)
        made = part + np.maximum(
            np.maximum(rows + wide * inside, 2.0 * ups * inside),
            ups * inside + 2.0 * rows + combined,
        )
    if not model.fuses_attention(storage.fused_attention):
        # The gradients of the scores, and of what dropout left of them.
        scores = model.num_query_heads * model.seq_length / columns.tp
        scores = scores * (2.0 if _drops_scores(model, storage) else 1.0)
        freed = _freed_by_feed_forward(columns, model)
        made = np.maximum(made, _features(columns, model) + scores - freed)
    if (columns.cp > 1).any() and model.has_softmax_attention:
        made = np.maximum(made, _context_elements(columns, model))
    whole = _layer_elements(columns, model, storage)
    mixer = model.mixer_parts
    if model.mixer and (mixer.latents or mixer.remade or not model.feed_forward):
        own = (
            2.0 * part + mixer.kept_divided / columns.tp + mixer.kept_whole * _token_share(columns)
        )
        own = own + _score_elements(columns, model, storage)
        gradients = (mixer.kept_divided + mixer.remade) / columns.tp
        later = columns.repeats("mla_up_proj") & columns.recomputes_modules
        made = made - np.where(later, _latent_elements(model) / columns.tp, 0.0)
        made = np.maximum(made, _features(columns, model) + gradients + own - whole)
    whole = whole + storage.gathered_share * _inputs_beyond(columns, model)
    again = _repeated(columns, model, storage, norms=1.0)
    again = again + storage.gathered_share * _gathered_again(columns, model, norms=1.0)
    revived = np.where(columns.recompute == _FULL, whole - part, again)
    under_way = np.where(columns.vpp > 1, 2.0 * part, 0.0)
    if (columns.splits_backward).any():
        # Of the layer that comes last, attention may have the peak: the rest has freed nothing.
        # Beside it are the gradients of two blocks' inputs, and an activation that has come.
        q, kv = model.query_size / columns.tp, model.kv_hidden_size / columns.tp
        late, own = columns.splits_backward, _features(columns, model) + 3.0 * q + 4.0 * kv + part
        if mixer.latents:  # the factors of its own late products are not there yet
            kept = gathered_elements(columns, model) * storage.gathered_share
            kept = kept + kept_elements(columns, model, storage)
            still = np.maximum(late_elements(columns, model) - kept, 0.0)
            plain = _features(columns, model) + part + mixer.kept_divided / columns.tp - still
            own = np.where(columns.recompute == _FULL, own, plain)
        made = np.where(late, np.maximum(made, own), made)
        under_way = np.where(late, 3.0 * part, under_way)
    return np.asarray(made + revived + under_way, dtype=np.float64)


def mtp_elements(
    columns: LayoutColumns, model: ModelShape, storage: TrainerStorage
) -> tuple[Floats, Floats, Floats]:
    """Elements per token that multi-token prediction keeps, gathers, and has in a backward pass.

    A depth keeps its layers, the embedding before its norm, and both normed inputs side by side,
    which the projection gathers; the hidden state before its norm is the input of a head, which
    counts there. The last stage has one micro-batch in flight, and with GPipe all of them.
    """
    shapes = model.mtp_shapes
    part = residual_elements(columns, model)
    kept = sum((kept_elements(columns, shape, storage) for shape in shapes), start=3.0 * part)
    beyond = 2.0 * (_features(columns, model) - part)
    gathered = sum((gathered_elements(columns, shape) for shape in shapes), start=beyond)
    backward = [backward_elements(columns, shape, storage) for shape in shapes]
    depths = model.num_mtp_layers * np.where(
        columns.schedule == _GPIPE, columns.num_microbatches, 1.0
    )
    return depths * kept, depths * gathered, np.max(np.broadcast_arrays(*backward), axis=0)


def _context_elements(columns: LayoutColumns, model: ModelShape) -> Floats:
    """Elements per token that attention's backward pass holds where ranks share sequences.

    Of the first rank, to whose tail half all other keys are later: keys and values of all ranks,
    their gradients, and those that a block makes, which are in fp32 on a CPU, for each query head.
    A ring holds those of one rank, and what is on its way. An exchange of tokens for heads takes no
    more than attention without it.
    """
    long = FP32_BYTES / element_bytes(columns)  # an fp32 number, in elements
    value = _output_size(model) if model.kv_lora_rank else model.kv_hidden_size
    heads = (value if model.kv_lora_rank else model.hidden_size) / columns.tp
    keys = float(model.kv_hidden_size + value) / columns.tp
    expanded = 2.0 * heads * (model.num_kv_heads < model.num_heads)
    others = columns.cp - 1.0
    held = keys * (3.0 * others + 3.0) + others * (expanded + 2.0 * heads * long)
    passed = keys * (3.0 + 2.0 * long) + expanded + 2.0 * heads * long
    own = _features(columns, model) + heads * (1.0 + 1.5 * long) + keys * long
    by_type = np.where(columns.cp_comm_type == _P2P, passed, held)
    is_shared = (columns.cp > 1) & (columns.cp_comm_type != _A2A)
    made = by_type + own - _freed_by_feed_forward(columns, model)
    return np.asarray(np.where(is_shared, made, 0.0), dtype=np.float64)


def _freed_by_feed_forward(columns: LayoutColumns, model: ModelShape) -> Floats:
    """Elements per token that a layer's feed-forward has freed before attention's backward pass."""
    inside = (3.0 if model.is_gated else 2.0) * model.ffn_hidden_size / columns.tp
    return np.asarray(2.0 * residual_elements(columns, model) + inside, dtype=np.float64)


def residual_elements(columns: LayoutColumns, model: ModelShape) -> Floats:
    """Elements per token of the residual stream on one rank."""
    return np.asarray(_features(columns, model) / _sequence_shares(columns), dtype=np.float64)


def _sequence_shares(columns: LayoutColumns) -> Ints:
    """Parts of the tokens between layers, of which each rank of tp has one."""
    return np.where(columns.sequence_parallel == 1, columns.tp, 1)


def _token_share(columns: LayoutColumns) -> Floats:
    return np.asarray(1.0 / _sequence_shares(columns), dtype=np.float64)


def _features(columns: LayoutColumns, model: ModelShape) -> Floats:
    """Features of a token on one rank, between layers: tensor columns divide them."""
    return np.asarray(model.hidden_size / columns.tp_columns, dtype=np.float64)


def _expert_rows(columns: LayoutColumns, model: ModelShape, part: Floats) -> Floats:
    """Rows that a rank's experts have for each token that the rank holds, if routing is balanced.

    `part` of a token's residual stream is on the rank: tp divides the tokens with sequence
    parallelism. etp gathers them; ep gives as many rows away as it brings.
    """
    return model.experts_per_token / model.hidden_size * part * columns.etp


def held_tokens(columns: LayoutColumns, model: ModelShape) -> Floats:
    """Tokens that a rank holds of a micro-batch."""
    return np.asarray(model.seq_length * columns.micro_batch_size / columns.cp, dtype=np.float64)
