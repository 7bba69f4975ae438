"""The model: a transformer's shape, its parameters and its floating-point work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any, Final, NamedTuple, Self

from layout_tuner.documents.reading import refuse_all, switch_problem
from layout_tuner.errors import ModelShapeInvalidError
from layout_tuner.search_spaces.models.contradictions import contradictions
from layout_tuner.search_spaces.models.layer_kinds import (
    SHORT_FORMS,
    FeedForward,
    Mixer,
    kinds_of_short_forms,
    repeated,
    shortest_pattern,
    stated_kinds,
    sublayers_of,
    write_layer_kinds,
)
from layout_tuner.search_spaces.models.model_document import read_model_fields
from layout_tuner.search_spaces.models.model_fields import (
    ATTENTION_FIELDS,
    DEFAULTS,
    EXPERT_FIELDS,
    LINEAR_FIELDS,
    MAMBA_FIELDS,
    NAMES,
    OF_FAMILY,
    ROUTING_FIELDS,
    Activation,
    Biases,
    ModelFields,
    wrong_fields,
)
from layout_tuner.search_spaces.models.sublayers import (
    MixerParts,
    dense_width,
    has_kinds,
    mixer_of,
    num_beside_routed_parameters,
    num_dense_parameters,
    num_routed_parameters,
)

_MOST: Final = 1 << 63
"""Parameters and FLOPs per token fit into 64 bits."""


class LayerKind(NamedTuple):
    """Layers of a model that are of one kind."""

    kind: str
    """One of `layer_kinds.LAYER_KINDS`."""
    shape: ModelShape
    """The model with all layers of this kind."""
    layers: tuple[int, ...]
    """Which layers they are, counted from 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape(ModelFields):
    """The shape of a model: all that determines its speed and memory, and its rotary base.

    Properties of one layer are those of a shape whose layers are of one kind (`kinds`); of a model
    with dense first layers they are those of the layers with experts.

    Raises:
        ModelShapeInvalidError: at construction, when the numbers contradict each other.
    """

    def __post_init__(self) -> None:
        fields = asdict(self)
        refuse_all(wrong_fields(fields))
        if self.layer_kinds and self.num_layers % len(self.layer_kinds) == 0:
            own = repeated(self.layer_kinds, self.num_layers)
            is_alone = all(fields[name] == DEFAULTS[name] for name in SHORT_FORMS)
            name = "full_attention_every"  # estimates differ with the other short forms
            short = {name: stated_kinds(own).get(name)} if is_alone else {}
            is_said = tuple(kinds_of_short_forms(fields | short)) == own
            said: dict[str, Any] = {"layer_kinds": () if is_said else shortest_pattern(own)}
            said |= short if is_said else {}
            for name, value in said.items():
                object.__setattr__(self, name, value)
        refuse_all(contradictions(self))
        # Equal shapes are equal.
        same = [
            name for name, word in OF_FAMILY[self.family].items() if getattr(self, name) == word
        ]
        same += ["head_dim"] if self.head_size * self.num_heads == self.hidden_size else []
        for name in same:
            object.__setattr__(self, name, None)
        parameters, flops = self.num_parameters, self.model_flops_per_token
        if max(parameters, flops) >= _MOST:
            raise ModelShapeInvalidError(
                f"the model has {parameters:.3g} parameters and takes {flops:.3g} FLOPs per token; "
                f"at most {_MOST:.3g} of each are accepted"
            )

    @property
    def title(self) -> str:
        return model_title(self.to_mapping())

    @property
    def kind_of_layers(self) -> tuple[str, ...]:
        """The kind of each layer."""
        return _kind_of_layers(self)

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The different kinds of layers, each as a shape of its own."""
        return _kinds(self)

    @property
    def cost_kinds(self) -> tuple[LayerKind, ...]:
        """Kinds of layers that differ in cost; windows that short forms say count on average."""
        return _cost_kinds(self)

    @property
    def mtp_kinds(self) -> tuple[str, ...]:
        """The layers of a depth of multi-token prediction, if there are any: one like the last.

        Where layers have one sublayer they are the attention and feed-forward that come last.
        """
        kinds = self.kind_of_layers if self.num_mtp_layers else ()
        if not kinds or "+" in kinds[-1]:
            return kinds[-1:]
        mixers = [kind for kind in kinds if sublayers_of(kind)[0] in ("full", "window")]
        inner = [kind for kind in kinds if sublayers_of(kind)[0] is None]
        return (*mixers[-1:], *inner[-1:]) or kinds[-1:]

    @property
    def mtp_shapes(self) -> list[ModelShape]:
        """The shapes of these layers."""
        return [self.of_kind(kind) for kind in self.mtp_kinds]

    def of_kind(self, kind: str) -> ModelShape:
        """The shape with all layers of one kind."""
        return _of_kind(self, kind)

    @property
    def mixer(self) -> Mixer | None:
        """What layers mix tokens with; None: they are feed-forwards alone."""
        return sublayers_of(self._one_kind)[0]

    @property
    def feed_forward(self) -> FeedForward | None:
        """The feed-forward of the layers; None: they have none."""
        return sublayers_of(self._one_kind)[1]

    @property
    def _one_kind(self) -> str:
        """Of the layers; without `layer_kinds` of those with experts and without the window."""
        if len(self.layer_kinds) > 1:
            raise ValueError(f"the layers of {self.name} are of several kinds: ask each of `kinds`")
        if self.layer_kinds:
            return self.layer_kinds[0]
        is_windowed = self.attention_window is not None and self.full_attention_every is None
        inner = "experts" if self.num_experts else "dense"
        return f"{'window' if is_windowed else 'full'}+{inner}"

    @property
    def mixer_parts(self) -> MixerParts:
        """The matrices of the mixer, and what else it has."""
        return _mixer_parts(self)

    @property
    def num_sublayers(self) -> int:
        """Mixer and feed-forward of a layer: two, or one of them."""
        return (self.mixer is not None) + (self.feed_forward is not None)

    @property
    def num_layer_norms(self) -> int:
        """Norms of the residual stream in a layer."""
        return 1 if self.parallel_block else self.num_sublayers

    @property
    def norm_parameters(self) -> int:
        """Parameters of one norm of the residual stream."""
        return self.hidden_size * (2 if self.has_layer_norms else 1)

    @property
    def has_layer_norms(self) -> bool:
        """Whether norms are LayerNorms, with means and biases."""
        return (self.norm or OF_FAMILY[self.family]["norm"]) == "layer"

    @property
    def activation_of(self) -> Activation:
        return self.activation or OF_FAMILY[self.family]["activation"]

    @property
    def biases_of(self) -> Biases:
        return self.biases or OF_FAMILY[self.family]["biases"]

    @property
    def is_gated(self) -> bool:
        """Whether a feed-forward multiplies two products, and has three matrices."""
        return self.activation_of in ("swiglu", "geglu")

    @property
    def num_ups(self) -> int:
        """Matrices that lead into a feed-forward."""
        return 2 if self.is_gated else 1

    @property
    def has_softmax_attention(self) -> bool:
        """Whether the layers, of one kind, have attention whose work grows with the sequence."""
        return self.mixer in ("full", "window")

    @property
    def head_size(self) -> int:
        """Width of a query head."""
        if self.kv_lora_rank:
            return self.qk_nope_head_dim + self.qk_rope_head_dim
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def value_head_size(self) -> int:
        """Width of a value head."""
        return self.v_head_dim if self.kv_lora_rank else self.head_size

    @property
    def rotary_size(self) -> int:
        """Features of a head that are rotated."""
        return self.qk_rope_head_dim or round(self.head_size * self.rotary_fraction)

    @property
    def num_query_heads(self) -> int:
        """Query heads of a layer; 0: its layers have no softmax attention."""
        return self._heads(self.num_heads, self.window_num_heads)

    @property
    def num_key_heads(self) -> int:
        """Key and value heads of a layer; 0: its layers have no softmax attention."""
        return self._heads(self.num_kv_heads, self.window_num_kv_heads)

    def _heads(self, usual: int, in_windows: int) -> int:
        mixer = "full" if len(self.layer_kinds) > 1 else self.mixer
        if mixer not in ("full", "window"):
            return 0
        return in_windows if mixer == "window" and in_windows else usual

    @property
    def query_size(self) -> int:
        """Width of all query heads together, and of what attention hands to its projection."""
        return self.num_query_heads * self.head_size

    @property
    def kv_hidden_size(self) -> int:
        """Width of all key heads together (and of all value heads)."""
        return self.num_key_heads * self.head_size

    @property
    def routed_width(self) -> int:
        """Width of the rows that routed experts take."""
        return self.expert_latent_size or self.hidden_size

    @property
    def linear_value_size(self) -> int:
        """Width of all value heads of a gated delta net or KDA."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def mamba_size(self) -> int:
        """Width of all heads of Mamba-2."""
        return self.mamba_num_heads * self.mamba_head_dim

    def fuses_attention(self, by_default: bool) -> bool:
        """Whether attention never stores its scores, under a trainer that does so by default."""
        return by_default if self.attention is None else self.attention == "fused"

    def has_experts(self, layer: int) -> bool:
        """Whether the feed-forward of a layer, counted from 0, is a mixture of experts."""
        return sublayers_of(self.kind_of_layers[layer])[1] == "experts"

    def window_of(self, layer: int) -> int | None:
        """Positions that a token attends to in a layer, counted from 0; None: all up to itself."""
        window = self.attention_window
        if window is None or window >= self.seq_length:
            return None
        return window if sublayers_of(self.kind_of_layers[layer])[0] == "window" else None

    @property
    def dense(self) -> ModelShape:
        """The shape with the dense layers' feed-forward in every layer."""
        return _dense(self)

    @property
    def num_expert_layers(self) -> int:
        if not self.layer_kinds and not self.experts_every:
            return self.num_layers - self.num_dense_layers if self.num_experts else 0
        return sum(sublayers_of(kind)[1] == "experts" for kind in self.kind_of_layers)

    @property
    def num_attention_matrix_parameters(self) -> int:
        """Parameters in the matrices of a layer's mixer."""
        return self.mixer_parts.num_matrix_parameters

    @property
    def num_expert_parameters(self) -> int:
        """Parameters of all routed experts of one layer."""
        return num_routed_parameters(self) if self.num_experts else 0

    @property
    def num_layer_matrix_parameters(self) -> int:
        """Parameters in the matrices of one layer: mixer and feed-forward.

        With experts: of a layer that has them, all of them, their router, latents and gate.
        """
        h, mixer, n = self.hidden_size, self.num_attention_matrix_parameters, self.num_ups + 1
        if self.feed_forward is None:
            return mixer
        whole = mixer + n * h * dense_width(self)
        if self.num_experts:
            whole += n * self.num_experts * self.moe_ffn_hidden_size * self.routed_width
            whole += h * (self.num_experts + 2 * self.expert_latent_size + self.shared_expert_gate)
        return whole

    @property
    def num_layer_parameters(self) -> int:
        """Parameters of one layer, norms and biases included, as the embedded trainer builds it.

        With experts: of a layer that has them.
        """
        own = self.mixer_parts.num_parameters + self.num_layer_norms * self.norm_parameters
        if self.feed_forward is None:
            return own
        routed = self.num_expert_parameters + num_beside_routed_parameters(self)
        return own + routed + num_dense_parameters(self, dense_width(self))

    @property
    def num_embedding_parameters(self) -> int:
        """Parameters of the token embedding, and of the learned positions where there are any."""
        positions = self.seq_length * self.hidden_size if self.family == "gpt" else 0
        return self.vocab_size * self.hidden_size + positions

    @property
    def num_head_parameters(self) -> int:
        """Parameters after the last block: final norm, and the output matrix if not tied."""
        norm = self.norm_parameters
        return norm + (0 if self.tied_embeddings else self.vocab_size * self.hidden_size)

    @property
    def num_mtp_parameters(self) -> int:
        """Parameters of one depth of multi-token prediction.

        Beside its layers they are a projection of 2 H to H and three norms.
        """
        layers = sum(each.num_layer_parameters for each in self.mtp_shapes)
        return layers + 2 * self.hidden_size**2 + 3 * self.norm_parameters

    @property
    def num_main_parameters(self) -> int:
        """Parameters without multi-token prediction, as published totals count."""
        return (
            sum(len(each.layers) * each.shape.num_layer_parameters for each in self.kinds)
            + self.num_embedding_parameters
            + self.num_head_parameters
        )

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model, each counted once."""
        return self.num_main_parameters + self.num_mtp_layers * self.num_mtp_parameters

    @property
    def num_active_parameters(self) -> int:
        """Parameters that one token uses: all but the experts that it does not take.

        The embedding counts as a whole, as in the totals of Mixtral (arXiv:2401.04088) and Qwen3,
        and multi-token prediction does not, as in those of DeepSeek-V3 (arXiv:2412.19437).
        """
        idle = sum(len(each.layers) * each.shape.idle_parameters for each in self.kinds)
        return self.num_main_parameters - idle

    @property
    def idle_parameters(self) -> int:
        """Parameters of a layer's experts that a token does not take."""
        if not self.num_experts:
            return 0
        idle = self.num_experts - self.experts_per_token
        return self.num_expert_parameters // self.num_experts * idle

    @property
    def model_flops_per_token(self) -> int:
        """FLOPs per token of a forward and a backward pass, without recomputation.

        Three times the forward pass: 2 operations per matrix parameter (with the output projection,
        without the embedding look-up, and of the experts only those that a token takes), and 4 s q
        for the two attention products, q being the width of the query heads. For the GPT shape
        with ffn = 4h this is 72 L h^2 (1 + s/(6h) + V/(12 L h)), arXiv:2104.04473 equation 3 less
        its recomputation (and arXiv:2205.05198, appendix A).

        A depth of multi-token prediction adds its layers, 4 H^2 and an output projection.
        """
        forward = self.layers_forward_flops_per_token + self.logit_forward_flops_per_token
        depth = sum(each.forward_flops_of_layer for each in self.mtp_shapes)
        depth += 4 * self.hidden_size**2 + self.logit_forward_flops_per_token
        return 3 * (forward + self.num_mtp_layers * depth)

    @property
    def layers_forward_flops_per_token(self) -> int:
        """Floating-point operations per token of all layers' forward pass."""
        matrices = sum(len(each.layers) * each.shape.matrix_flops_of_layer for each in self.kinds)
        return matrices + self.attention_forward_flops_per_token

    @property
    def matrix_flops_of_layer(self) -> int:
        """Forward operations of a token in a layer's matrices, and in states of its mixer."""
        active = self.num_layer_matrix_parameters
        if self.num_experts:
            idle = self.num_experts - self.experts_per_token
            active -= idle * (self.num_ups + 1) * self.routed_width * self.moe_ffn_hidden_size
        return 2 * active + self.mixer_parts.flops_of_token

    @property
    def forward_flops_of_layer(self) -> int:
        """Forward operations of a token in a layer, of a shape with one kind of layers."""
        window = self.attention_window if self.mixer == "window" else None
        attention = self.mixer_parts.flops_of_position * self._positions(window)
        return self.matrix_flops_of_layer + attention

    @property
    def attention_forward_flops_per_token(self) -> int:
        """Floating-point operations per token of the attention products of all layers."""
        return _attention_flops(self, range(self.num_layers))

    @property
    def attention_positions(self) -> int:
        """Positions that a token's products are counted over, summed over the layers.

        The sequence s without a window w: the half that the causal mask hides counts too, as in
        arXiv:2104.04473. Likewise with a window twice the pairs inside it: (s^2 - (s - w)^2) / s.
        Layers without softmax attention have none. Where documents are packed, s is their length.
        """
        return _attention_positions(self)

    def _positions(self, window: int | None) -> int:
        s = min(self.seq_length, self.mean_document_length or self.seq_length)
        return s if window is None or window >= s else window * (2 * s - window) // s

    @property
    def logit_forward_flops_per_token(self) -> int:
        """Floating-point operations per token of the output projection's forward pass."""
        return 2 * self.hidden_size * self.vocab_size

    def routing_problem(self, balanced_routing: object) -> str | None:
        """Why a probe of this model can't route so, or None."""
        if (problem := switch_problem(balanced_routing)) or balanced_routing or self.num_experts:
            return problem
        return (
            f"false measures how unevenly tokens reach experts, and the model {self.name} has none; "
            "leave it out"
        )

    def hardware_flops_per_token(
        self, recompute: str, layers: Collection[int] | None = None
    ) -> int:
        """Floating-point operations per token with recomputation in some layers; None: in all.

        Full recomputation runs a block's forward pass twice (and the output projection once),
        selective recomputation the two attention products (arXiv:2205.05198), that of `mlp` those
        of a dense feed-forward, as Megatron-LM repeats them; the embedded trainer leaves out the
        last of them, whose output no gradient needs. What is not a product does not count.
        """
        again = range(self.num_layers) if layers is None else layers
        extra = 0
        if recompute in ("full", "selective") or "core_attention" in recompute:
            extra = _attention_flops(self, again)
        for each in self.kinds if recompute == "full" or "mlp" in recompute else ():
            number = len(again) if len(self.kinds) == 1 else len({*again} & {*each.layers})
            if recompute == "full":
                extra += number * each.shape.matrix_flops_of_layer
            elif each.shape.feed_forward == "dense":
                products = self.num_ups + 1
                extra += number * 2 * products * self.hidden_size * self.ffn_hidden_size
        return self.model_flops_per_token + extra

    def to_mapping(self) -> dict[str, Any]:
        """The fields by name, as plain JSON values, without later fields at their defaults."""
        first = NAMES[:_NUM_FIRST_FIELDS]
        said = {n: v for n, v in asdict(self).items() if n in first or v != DEFAULTS[n]}
        if self.layer_kinds:
            said["layer_kinds"] = write_layer_kinds(self.layer_kinds)
        return said

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """Builds a shape from its fields by name.

        `num_kv_heads` defaults to `num_heads`; `ffn_hidden_size` to four times the hidden size for
        gpt; `name` to "custom"; `tied_embeddings` to true for gpt and false for llama;
        `rotary_base` to 10000; `moe_ffn_hidden_size` to `ffn_hidden_size`, and the other way round
        where no layer is dense; what later versions added to "not there".

        Raises:
            ModelShapeInvalidError: a field is unknown, missing, or out of range.
        """
        return cls(**read_model_fields(mapping))


def model_title(stated: Mapping[str, Any]) -> str:
    """The name in a model's document, and in brackets what it states of `ATTENTION_FIELDS`."""
    words = ", ".join(f"{name}={stated[name]}" for name in ATTENTION_FIELDS if name in stated)
    return f"{stated['name']} ({words})" if words else str(stated["name"])


_NUM_FIRST_FIELDS: Final = 11
"""Fields that every document states; those after them are left out at their defaults."""


@lru_cache(maxsize=512)
def _kind_of_layers(model: ModelShape) -> tuple[str, ...]:
    if model.layer_kinds:
        return repeated(model.layer_kinds, model.num_layers)
    return tuple(kinds_of_short_forms(asdict(model)))


@lru_cache(maxsize=512)
def _kinds(model: ModelShape) -> tuple[LayerKind, ...]:
    kinds = model.kind_of_layers
    if len(set(kinds)) == 1:
        return (LayerKind(kinds[0], model, tuple(range(model.num_layers))),)
    return tuple(
        LayerKind(kind, _of_kind(model, kind), tuple(i for i, k in enumerate(kinds) if k == kind))
        for kind in dict.fromkeys(kinds)
    )


@lru_cache(maxsize=512)
def _cost_kinds(model: ModelShape) -> tuple[LayerKind, ...]:
    if has_kinds(model):
        return model.kinds
    dense = model.num_layers - model.num_expert_layers
    both = ((model, range(dense, model.num_layers)), (model.dense, range(dense)))
    return tuple(
        LayerKind(shape._one_kind, shape, tuple(layers)) for shape, layers in both if layers
    )


@lru_cache(maxsize=2048)
def _of_kind(model: ModelShape, kind: str) -> ModelShape:
    """The short forms' values go: a shape of one kind has none."""
    mixer, inner = sublayers_of(kind)
    none: dict[str, Any] = {} if inner == "experts" else _no_experts()
    none |= {"num_mtp_layers": 0, "full_attention_every": None}
    if inner == "experts":
        none |= {"num_dense_layers": 0, "experts_every": 0}
    if inner != "dense":
        none |= {"ffn_hidden_size": model.moe_ffn_hidden_size if inner else 0}
    if mixer != "window":
        none |= {"attention_window": None, "window_num_heads": 0, "window_num_kv_heads": 0}
    for names, mixers in ((LINEAR_FIELDS, ("gated_delta_net", "kda")), (MAMBA_FIELDS, ("mamba2",))):
        none |= {} if mixer in mixers else dict.fromkeys(names, 0)
    return replace(model, layer_kinds=(kind,), **none)


@lru_cache(maxsize=512)
def _dense(model: ModelShape) -> ModelShape:
    return replace(model, **_no_experts()) if model.num_experts else model


def _no_experts() -> dict[str, Any]:
    return {name: DEFAULTS[name] for name in (*EXPERT_FIELDS, *ROUTING_FIELDS)}


@lru_cache(maxsize=2048)
def _mixer_parts(shape: ModelShape) -> MixerParts:
    return mixer_of(shape)


@lru_cache(maxsize=512)
def _attention_positions(model: ModelShape) -> int:
    numbers = Counter(model.kind_of_layers)
    windows = {kind: sublayers_of(kind)[0] for kind in numbers}
    return sum(
        number * model._positions(model.attention_window if windows[kind] == "window" else None)
        for kind, number in numbers.items()
        if windows[kind] in ("full", "window")
    )


def _attention_flops(model: ModelShape, layers: Collection[int]) -> int:
    kinds = model.kinds
    if len(kinds) == 1:
        own = kinds[0].shape
        window = own.attention_window if own.mixer == "window" else None
        return len(layers) * own.mixer_parts.flops_of_position * own._positions(window)
    chosen = {*layers}
    return sum(
        each.shape.mixer_parts.flops_of_position
        * sum(model._positions(model.window_of(i)) for i in each.layers if i in chosen)
        for each in kinds
    )
