"""The words of a config.json, each read once, and what they call the parts of a decoder."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from layout_tuner.documents.reading import shown, word_of
from layout_tuner.errors import ModelShapeInvalidError
from layout_tuner.search_spaces.models.foreign_words import (
    KINDS_OF_LAYERS,
    MLA,
    NOT_COVERED,
    OF_OTHER_LAYERS,
    OTHER_LAYERS,
    SAME_VALUE,
    WIDTHS,
    WITHOUT_EFFECT,
    WITHOUT_EFFECT_ALIKE,
    alike,
    words_of,
)
from layout_tuner.search_spaces.models.model_fields import LINEAR_FIELDS, MAMBA_FIELDS
from layout_tuner.terminal.plurals import listed


def _ordered(words: str) -> tuple[str, ...]:
    return tuple(words.split())


LAYERS: Final = _ordered("num_hidden_layers n_layer n_layers num_layers")
HIDDEN: Final = _ordered("hidden_size n_embd d_model")
HEADS: Final = _ordered("num_attention_heads n_head n_heads num_heads")
KV_HEADS: Final = _ordered("num_key_value_heads multi_query_group_num kv_n_heads num_kv_heads")
HEAD_DIM: Final = _ordered("head_dim attention_head_dim kv_channels")
WIDTH: Final = _ordered("intermediate_size ffn_hidden_size n_inner ffn_dim")
EXPERTS: Final = _ordered(
    "num_experts num_local_experts n_routed_experts moe_num_experts num_moe_experts"
)
EXPERTS_PER_TOKEN: Final = _ordered(
    "num_experts_per_tok num_experts_per_token experts_per_token moe_topk moe_top_k moe_k"
)
SHARED_WIDTH: Final = _ordered(
    "shared_expert_intermediate_size shared_intermediate_size moe_shared_expert_intermediate_size"
)
SHARED_EXPERTS: Final = _ordered(
    "n_shared_experts num_shared_experts num_shared_expert moe_num_shared_experts"
)
MTP_MODULES: Final = _ordered(
    "num_nextn_predict_layers num_mtp_layers mtp_num_hidden_layers num_mtp_modules"
)
OF_SCORES: Final = _ordered(
    "scoring_func score_func score_function expert_selection_fn moe_router_activation_func"
)
SCALING: Final = _ordered(
    "routed_scaling_factor router_scaling_factor moe_routed_scaling_factor route_scale"
)
OF_LATENTS: Final = _ordered(
    "q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim"
)
OF_LINEAR_LAYERS: Final = {ours: (ours, re.sub("(key|value)_", "", ours)) for ours in LINEAR_FIELDS}
OF_MAMBA: Final = {ours: (ours, *SAME_VALUE[ours].split()) for ours in MAMBA_FIELDS}
"""Words by the field of ours; KDA has as many key heads as value heads."""
TAPS: Final = _ordered(
    "linear_conv_kernel_dim conv_kernel mamba_d_conv linear_short_conv_kernel_size"
)
ACTIVATION: Final = _ordered(
    "hidden_act hidden_activation activation_function activation mlp_hidden_act"
)
POSITIONS: Final = _ordered("n_positions max_position_embeddings")
ROTARY_BASE: Final = _ordered("rope_theta rotary_emb_base")
ATTENTION_DROPOUT: Final = _ordered("attention_dropout attn_pdrop attention_probs_dropout_prob")
HIDDEN_DROPOUT: Final = _ordered(
    "hidden_dropout resid_pdrop residual_dropout hidden_dropout_prob resid_dropout dropout"
)

_OFF: Final = (None, 0, False)
_UNSCALED: Final = (*_OFF, 1)
COSTLESS: Final[Mapping[str, tuple[str, tuple[object, ...]]]] = {
    "softcaps": (
        "attn_logit_softcapping final_logit_softcapping router_logit_softcapping "
        "moe_router_logit_softcapping",
        _OFF,
    ),
    "scaling factors": (
        "attention_multiplier embedding_multiplier residual_multiplier logits_scaling logit_scale "
        "scale_emb scale_depth dim_model_base mup_enabled",
        _UNSCALED,
    ),
    "norms behind attention and feed-forward in place of before": (
        "do_layer_norm_before",
        (None, True),
    ),
    "clipped queries, keys and values": ("clip_qkv", _OFF),
    "a scale of attention by position": ("attn_temperature_tuning", _OFF),
    "the clamped SwiGLU": ("swiglu_limit", _OFF),
    "scores of experts by another function than softmax or sigmoid": (
        " ".join(OF_SCORES),
        (None, "softmax", "sigmoid"),
    ),
    "positions of another kind than rotary ones": ("position_embedding_type", (None, "rope")),
}
"""What costs neither parameters nor matrix products, each with the words that state it, and their
values where it is not there."""

_NOT_SAID: Final[Mapping[str, str]] = {
    **NOT_COVERED,
    **dict.fromkeys(KINDS_OF_LAYERS, OTHER_LAYERS),
    "use_cla": WIDTHS,
    "per_layer_config": WIDTHS,
    **dict.fromkeys(("use_mla", "q_lora_rank", "kv_lora_rank"), MLA),
}
"""Words of layers that no family of the table has, and what they say."""

_ROTARY_PARTS: Final = ("rope_parameters", "rope_scaling")
_ROTARY_KINDS: Final = ("full_attention", "global", "sliding_attention", "local")
_ROTARY_OTHERS: Final = words_of(
    """
    long_factor short_factor mrope_section truncate
    """
)

_HARMLESS: Final = words_of(
    """
    attn_implementation attn_implementation_autoset attn_implementation_internal
    experts_implementation chunk_size_feed_forward gradient_checkpointing use_flash_attn
    use_flash_attention use_bfloat16 torchscript tf_legacy_loss return_dict finetuning_task
    problem_type prefix pruned_heads is_decoder is_encoder_decoder add_cross_attention
    cross_attention_hidden_size tie_encoder_decoder tie_word_embeddings temperature top_k top_p
    typical_p do_sample early_stopping max_length min_length max_new_tokens length_penalty
    repetition_penalty diversity_penalty num_beams num_beam_groups num_return_sequences
    no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids suppress_tokens
    begin_suppress_tokens exponential_decay_length_penalty remove_invalid_values num_labels
    layer_types mlp_layer_types no_rope_layers no_rope_layer_interval sliding_window
    attention_chunk_size use_qk_norm router_jitter_noise input_jitter_noise router_aux_loss_coef
    z_loss_coefficient topk_group rope_interleave rope_interleaved rope_theta rms_norm layernorm
    rmsnorm post_layer_norm cache_implementation hidden_act hidden_activation model_max_length
    seq_length embd_pdrop layerdrop rope_local_base_freq logn_list use_dynamic_ntk use_logn_attn
    fp16 bf16 fp32 no_bias onnx_safe mask_type moe_router_activation_func commit_hash
    enable_moe_fp32_combine attention_softmax_in_fp32 scale_attention_softmax_in_fp32
    apply_query_key_layer_scaling quantization_bit pre_seq_len prefix_projection original_rope
    apply_residual_connection_post_layernorm fp32_residual_connection interleaved_qkv
    scale_attn_by_inverse_layer_idx floor_scale attn_scale scale_embedding extra_positions
    cla_share_factor dense_list norm_type org_vocab_size pool_type use_rotary_pos_emb moe_gate
    moe_loss_weight moe_jitter_eps validate_runner_input inference_runner pre_allocate_kv_cache
    sliding_window_size bias_dropout_fusion vocab_size first_k_dense_replace
    interleave_moe_layer_step decoder_sparse_step moe_layer_freq moe_layer_start_index
    moe_layer_end_index moe_layer_interval ffn_act_fn moe_normalize_expert_weights swiglu_alpha
    layer_rope_theta time_step_limit init_std context_window_size prefill_chunk_size is_composition
    predict_special_tokens is_llama_config use_mixed_mlp_moe interpolate_factor full_attn_mod
    attention_types embed_dropout moe_gate_act moe_capacity moe_norm_min moe_use_aux_free
    mtp_loss_scaling_factor mtp_share_layers use_mtp mtp_transformer_layers rotary_type rope_ratio
    vision_feature_layer moe_intermediate_size shared_intermediate_size
    moe_renormalize use_grouped_topk expand chunk_size
    """
)
"""Words beside those of `foreign_words` that say nothing about a shape, and those that other parts
of this reader look at."""
_OF_TOKENS: Final = re.compile(r"\w+_(id|ids|index)")


class ConfigWords:
    """Values of a file by word, with a note of the words that were asked for."""

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self._values = {word.lstrip("_"): value for word, value in values.items()}
        self._defaults = defaults
        self._asked: set[str] = set()

    def get(self, *words: str) -> Any:
        """The value that the file states under one of the words, or that of the family's class.

        Raises:
            ModelShapeInvalidError: two words state two values.
        """
        self._asked.update(words)
        found = [(word, alike(self._values.get(word))) for word in words]
        if words == ROTARY_BASE:
            found += self._rotary_bases()
        found = [(word, value) for word, value in found if value is not None]
        for word, value in found[1:]:
            if value != found[0][1]:
                raise ModelShapeInvalidError(
                    f"{found[0][0]}={shown(found[0][1])} and {word}={shown(value)} state two values "
                    "of the same field: look up which one is right, and take the other out"
                )
        if found or any(word in self._values for word in words):  # null is a value, too
            return found[0][1] if found else None
        return next((self._defaults[word] for word in words if word in self._defaults), None)

    def whole(self, *words: str) -> int | None:
        """A whole number; None: no word states it."""
        value = self.get(*words)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise self._wrong(words, value, "a whole number")
        return value

    def needed(self, words: Sequence[str]) -> int:
        """A whole number that the file must state."""
        value = self.whole(*words)
        if value is None:
            raise ModelShapeInvalidError(f"the config.json does not state {words[0]}")
        return value

    def number(self, *words: str) -> float | None:
        value = self.get(*words)
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise self._wrong(words, value, "a number")
        return value

    def switch(self, word: str) -> bool:
        """A switch; False: no word states it."""
        value = self.get(word)
        if value is not None and not isinstance(value, bool):
            raise self._wrong((word,), value, "true or false")
        return bool(value)

    def whole_numbers(self, word: str, length: int | None = None) -> list[int] | None:
        """A list of whole numbers, of this length; None: it is not stated, or empty."""
        self._asked.add(word)
        value = self._values.get(word, self._defaults.get(word))
        if value is None or value == []:
            return None
        is_list = isinstance(value, list) and all(isinstance(each, int) for each in value)
        if not is_list or (length is not None and len(value) != length):
            what = "a list of whole numbers" + (
                "" if length is None else f", one of {length} layers"
            )
            raise self._wrong((word,), value, what)
        return list(value)

    def names(self, word: str, length: int) -> list[str] | None:
        """A list of names, one of each layer; None: it is not stated."""
        self._asked.add(word)
        value = self._values.get(word)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != length:
            raise self._wrong((word,), value, f"a list with one of {length} layers")
        return [str(each) for each in value]

    def switched(self, features: Sequence[str]) -> list[str]:
        """The names of features: NAME, NAME:WORD if that is true, NAME!WORD if it is false."""
        found = []
        for each in features:
            name, sign, word = re.fullmatch(r"(\w+)([:!]?)(\w*)", each).groups()  # type: ignore[union-attr]
            if not sign or (self.get(word) is False if sign == "!" else self.get(word)):
                found.append(name)
        return list(dict.fromkeys(found))

    def rotary(self) -> Iterator[str]:
        """What is unusual in rotary positions."""
        parts = [("", self._values), *self._rotary_parts()]
        for _, part in parts[1:]:
            kind = part.get("rope_type", part.get("type"))
            if isinstance(kind, str) and kind != "default":
                yield f"scaled rotary positions ({kind[:40]})"
        bases = {str(part["rope_theta"]) for _, part in parts[1:] if "rope_theta" in part}
        if len(bases) > 1 or self._values.get("rope_local_base_freq") is not None:
            yield "another rotary base in layers with windows"
        unrotated = self.whole_numbers("no_rope_layers")
        interval = self.whole("no_rope_layer_interval") if unrotated is None else None
        if interval or (unrotated is not None and 0 in unrotated):
            yield "layers without rotary positions"

    def rotary_share(self, width: int) -> float:
        """The share of a head of this width that is rotated."""
        words = ("partial_rotary_factor", "rotary_pct")
        self._asked.update((*words, "rotary_dim", *_ROTARY_PARTS))
        parts = [self._values, *(part for _, part in self._rotary_parts()), self._defaults]
        stated = [part.get(word) for part in parts for word in words]
        share = next((each for each in stated if each is not None), None)
        turned = self._values.get("rotary_dim", self._defaults.get("rotary_dim"))
        if share is None and isinstance(turned, int):
            share = min(turned / max(width, 1), 1)
        if share is None:
            return 1.0
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= 1:
            raise self._wrong(words, share, "a number from 0 to 1")
        odd = int(width * share) % 2  # classes turn an even number
        return (int(width * share) - 1) / width if odd else float(share)

    def _rotary_parts(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """The parts about rotary positions; of those by kind of layer that of full ones first."""
        for word in _ROTARY_PARTS:
            part = self._values.get(word)
            if part is None:
                continue
            if not isinstance(part, Mapping):
                raise self._wrong((word,), part, "a mapping")
            by_kind = [each for each in _ROTARY_KINDS if isinstance(part.get(each), Mapping)]
            if not by_kind:
                yield word, part
            for kind in by_kind:
                yield f"{word}.{kind}", part[kind]

    def _rotary_bases(self) -> Iterator[tuple[str, Any]]:
        taken = set()
        for word, part in self._rotary_parts():
            outer = word.partition(".")[0]
            if outer not in taken:
                yield f"{word}.rope_theta", part.get("rope_theta")
            taken.add(outer)

    def unknown(self, kind: str, is_hybrid: bool) -> Iterator[str]:
        """Words that no part of the reader knows; refuses those of layers of another kind."""
        left = []
        for word, value in self._values.items():
            if word in self._asked or not value or word in WITHOUT_EFFECT | _HARMLESS:
                continue
            has_experts = word in EXPERTS and value not in (0, 1)
            of_others = OF_OTHER_LAYERS.fullmatch(word)
            if is_hybrid and of_others:  # as the limits of its time step
                continue
            if has_experts or word in _NOT_SAID or of_others:
                what = "experts" if has_experts else _NOT_SAID.get(word, OTHER_LAYERS)
                raise ModelShapeInvalidError(
                    f"{word}={shown(value)} says {what}, which a {kind} does not have; give the file "
                    "of the model itself"
                )
            is_harmless = WITHOUT_EFFECT_ALIKE.fullmatch(word) or _OF_TOKENS.fullmatch(word)
            if not is_harmless and word not in _ROTARY_OTHERS:
                left.append(word[:80])
        if left:
            yield f"fields whose meaning is not known here: {listed(left, 10)}"

    def stated(self, *words: str) -> str:
        """The word that the file states, or the first."""
        return next((each for each in words if self._values.get(each) is not None), words[0])

    def _wrong(self, words: Sequence[str], value: object, what: str) -> ModelShapeInvalidError:
        word = self.stated(*words)
        said = word_of(value) if isinstance(value, bool) else shown(value)
        return ModelShapeInvalidError(f"{word}={said} is not {what}")
