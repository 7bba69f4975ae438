"""The families of decoders whose config.json is read, and those that are refused by name.

A file states neither what its class always has (Qwen2's biases) nor the values that the class takes
for fields that are left out. Both were read in transformers 5.24.0 (`models/*/configuration_*.py`
and `modeling_*.py`); of families that are not in it, in the code of their publishers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from layout_tuner.search_spaces.models.config_words import OF_LATENTS, OF_LINEAR_LAYERS
from layout_tuner.search_spaces.models.foreign_words import OTHER_LAYERS, WIDTHS, words_of


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigFamily:
    """What a `model_type` implies."""

    features: tuple[str, ...] = ()
    """What its layers have beside those of the shape: names of `config_features.FEATURES`, with
    `:WORD` or `!WORD` behind them where a field of the file switches it on or off."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Words of the file, with the values that its class takes where they are left out."""
    windows: str = ""
    """Layers with windows, or of the kind `linear`, where no `layer_types` say it: `all`;
    `full_last` or `full_first`, all but the last or first of `every` n; `from_layer`, those from
    `max_window_layers` on; `rotated` or `unrotated`, those with or without rotary positions;
    `indices`, all but `attn_layer_indices`; `flint`, that family's own; `stated`, and `alone` where
    each is one sublayer: the file must say it."""
    linear: str = ""
    """The kind of the layers that files call `linear_attention` or `mamba`."""
    kind: str = "dense"
    """`dense`; `experts`; `wide`, experts whose width is `intermediate_size`; `gpt`, blocks of the
    shape's family gpt."""


_TABLE: Final = """
# Dense. attn and mlp: biases that `attention_bias` and `mlp_bias` switch.
apertus  hidden_act="xielu" | two_matrices xielu head_norm attn
arcee  hidden_act="relu2" | two_matrices attn mlp
baichuan  |
chatglm  partial_rotary_factor=0.5 | qkv_biases:add_qkv_bias
codegen  activation_function="gelu_new" rotary_dim=64 | two_matrices layernorm parallel mlp_biases \
  head_bias
cohere  tie_word_embeddings=true | layernorm_weights parallel each_norm:use_qk_norm attn
cohere2  tie_word_embeddings=true windows="full_last" sliding_window=4096 every=4 | \
  layernorm_weights parallel attn
cwm  windows="full_first" num_key_value_heads=8 sliding_window=8192 every=4 rope_theta=1e6 \
  head_dim=128 | mlp
emu3  num_key_value_heads=8 attention_dropout=0.1 rope_theta=1e6 |
ernie4_5  num_key_value_heads=2 tie_word_embeddings=true rope_theta=5e5 head_dim=128 | use_bias
exaone  num_key_value_heads=8 rope_theta=5e5 | attn mlp
exaone4  windows="full_last" num_key_value_heads=32 sliding_window=4096 every=4 | head_norm \
  norms_after
gemma  num_key_value_heads=16 tie_word_embeddings=true hidden_act="geglu" head_dim=256 | attn
gemma2  tie_word_embeddings=true hidden_act="geglu" head_dim=256 windows="full_last" \
  num_key_value_heads=4 sliding_window=4096 every=2 final_logit_softcapping=30 \
  attn_logit_softcapping=50 | post_norms attn
gemma3  tie_word_embeddings=true hidden_act="geglu" head_dim=256 windows="full_last" \
  num_key_value_heads=4 sliding_window=4096 every=6 rope_theta=1e6 | post_norms head_norm attn
glm  num_key_value_heads=2 partial_rotary_factor=0.5 attention_bias=true head_dim=128 | qkv
glm4  num_key_value_heads=2 partial_rotary_factor=0.5 attention_bias=true head_dim=128 | \
  post_norms qkv
glm4v  num_key_value_heads=2 partial_rotary_factor=0.5 | post_norms qkv_biases
gpt_neox  rotary_pct=0.25 attention_bias=true use_parallel_residual=true | two_matrices layernorm \
  parallel:use_parallel_residual norm_of_feed_forward:use_parallel_residual attn mlp_biases
gptj  activation_function="gelu_new" rotary_dim=64 | two_matrices layernorm parallel mlp_biases \
  head_bias
granite  | attn mlp
jais2  hidden_act="relu2" attention_bias=true mlp_bias=true | two_matrices layernorm attn mlp
granite_swa  tie_word_embeddings=true windows="full_first" num_key_value_heads=4 \
  sliding_window=128 every=4 | sinks attn mlp
helium  num_key_value_heads=20 head_dim=128 rope_theta=1e5 | qkv mlp
hunyuan_v1_dense  | head_norm attn
hyperclovax  use_post_norm=true | post_norms:use_post_norm attn mlp
internlm  bias=true | qkv_biases:bias o_bias:bias
internlm2  bias=true | qkv_biases:bias o_bias:bias
internlm3  num_key_value_heads=2 head_dim=128 | attn mlp qkv_biases:qkv_bias o_bias:qkv_bias \
  mlp_biases:bias
iquestcoder  num_key_value_heads=8 head_dim=128 | attn mlp
llama  | attn mlp
ministral  windows="all" num_key_value_heads=8 sliding_window=4096 |
ministral3  windows="all" num_key_value_heads=8 rope_theta=1e6 head_dim=128 |
mistral  windows="all" num_key_value_heads=8 sliding_window=4096 |
nanochat  hidden_act="relu2" final_logit_softcapping=15 | two_matrices no_norm_weights l2_norm attn
nemotron  hidden_act="relu2" partial_rotary_factor=0.5 | two_matrices layernorm attn mlp
olmo  | no_norm_weights attn
olmo2  | width_norm norms_after attn
olmo3  windows="full_last" sliding_window=4096 every=4 rope_theta=5e5 | width_norm norms_after \
  attn
orion  | layernorm attn
persimmon  hidden_act="relu2" partial_rotary_factor=0.5 qk_layernorm=true | two_matrices layernorm \
  qkv_biases o_bias mlp_biases head_layernorm:qk_layernorm
phi  hidden_act="gelu_new" partial_rotary_factor=0.5 | two_matrices layernorm parallel qkv_biases \
  o_bias mlp_biases head_bias head_layernorm:qk_layernorm
phi3  windows="all" |
qwen  | qkv_biases
qwen2  windows="from_layer" num_key_value_heads=32 sliding_window=4096 use_sliding_window=false \
  max_window_layers=28 | qkv_biases
qwen3  windows="from_layer" num_key_value_heads=32 sliding_window=4096 use_sliding_window=false \
  max_window_layers=28 head_dim=128 | head_norm attn
seed_oss  num_key_value_heads=8 attention_dropout=0.1 residual_dropout=0.1 attention_bias=true \
  head_dim=128 | qkv o_bias:attention_out_bias mlp
smollm3  tie_word_embeddings=true windows="unrotated" num_key_value_heads=4 \
  use_sliding_window=false no_rope_layer_interval=4 rope_theta=2e6 | attn mlp
stablelm  num_key_value_heads=32 partial_rotary_factor=0.25 | layernorm qkv_biases:use_qkv_bias \
  each_norm:qk_layernorm  parallel:use_parallel_residual
starcoder2  windows="all" num_key_value_heads=2 tie_word_embeddings=true use_bias=true | \
  two_matrices layernorm use_bias
vaultgemma  tie_word_embeddings=true hidden_act="geglu" head_dim=256 windows="full_last" \
  num_key_value_heads=4 sliding_window=4096 every=2 final_logit_softcapping=30 \
  attn_logit_softcapping=50 | attn
xverse  |
# With experts.
afmoe  kind="experts" windows="full_last" sliding_window=1024 every=4 num_dense_layers=1 \
  num_shared_experts=2 head_dim=128 | output_gate head_norm post_norms routing_bias attn sigmoid
aria  kind="wide" moe_num_shared_experts=2 | attn mlp
bailing_moe  kind="experts" | qkv_biases:use_qkv_bias o_bias:use_bias
bailing_moe_v2  kind="experts" | balanced:moe_router_enable_expert_bias qkv_biases:use_qkv_bias o_bias:use_bias head_norm:use_qk_norm
dbrx  kind="wide" kv_n_heads=1 | layernorm_weights
deepseek  kind="experts" n_routed_experts=0 | attn
dots1  kind="experts" windows="from_layer" num_key_value_heads=32 n_routed_experts=0 \
  sliding_window=4096 max_window_layers=62 | head_norm attn free
ernie4_5_moe  kind="experts" num_key_value_heads=4 tie_word_embeddings=true rope_theta=5e5 \
  moe_num_shared_experts=2 moe_layer_start_index=1 moe_layer_end_index=-1 moe_layer_interval=1 | \
  routing_bias use_bias  head_bias:use_bias
exaone_moe  kind="experts" windows="full_last" num_key_value_heads=32 sliding_window=4096 every=4 \
  num_shared_experts=1 first_k_dense_replace=1 | head_norm free
flex_olmo  kind="wide" rope_theta=5e5 | width_norm norms_after attn
flint  kind="experts" windows="flint" num_key_value_heads=4 sliding_window=513 head_dim=128 \
  mlp_only_layers=[0,1] shared_expert_intermediate_size=1024 | sinks head_norm attn sigmoid
glm4_moe  kind="experts" num_key_value_heads=8 n_shared_experts=1 first_k_dense_replace=1 \
  partial_rotary_factor=0.5 num_nextn_predict_layers=1 | qkv head_norm:use_qk_norm free
glm4v_moe  kind="experts" num_key_value_heads=8 n_shared_experts=1 first_k_dense_replace=1 \
  partial_rotary_factor=0.5 attention_bias=true | qkv free
gpt_oss  kind="wide" windows="full_last" num_key_value_heads=8 sliding_window=128 every=2 \
  attention_bias=true head_dim=64 rope_theta=150000 swiglu_limit=7 | sinks expert_biases attn
granitemoe  kind="wide" | attn
granitemoeshared  kind="wide" | attn
granitemoe_swa  kind="wide" windows="full_first" sliding_window=128 every=4 | sinks attn
granitemoehybrid  kind="wide" shared_intermediate_size=1024 num_local_experts=8 linear="mamba2" \
  windows="all" mamba_n_heads=128 mamba_n_groups=1 mamba_d_state=256 is_rotary=false \
  num_experts_per_tok=2 | no_positions!is_rotary attn
hunyuan_v1_moe  kind="wide" num_experts=1 moe_topk=1 num_shared_expert=1 | head_norm attn
hy_v3  kind="experts" num_key_value_heads=8 rope_theta=11158840 num_shared_experts=1 head_dim=128 \
  first_k_dense_replace=1 | head_norm attn mlp free
kolibri1  kind="experts" windows="full_last" num_key_value_heads=4 sliding_window=513 every=5 \
  head_dim=128 shared_expert_intermediate_size=512 | post_norms head_norm free
laguna  kind="experts" num_key_value_heads=8 gating=true sliding_window=512 head_dim=128 \
  rope_theta=5e5 partial_rotary_factor=0.5 shared_expert_intermediate_size=512 \
  first_k_dense_replace=1 | head_gate:gating head_norm routing_bias attn sigmoid
llama4  kind="experts" windows="rotated" num_key_value_heads=8 attention_chunk_size=8192 \
  no_rope_layer_interval=4 use_qk_norm=true rope_theta=5e5 interleave_moe_layer_step=1 \
  num_local_experts=16 num_experts_per_tok=1 head_dim=128 | l2_norm:use_qk_norm attn sigmoid
mellum  kind="experts" num_key_value_heads=4 sliding_window=1024 rope_theta=5e5 head_dim=128 | \
  head_norm attn
minicpm  kind="wide" tie_word_embeddings=true num_experts=0 | attn
minimax_m2  kind="wide" num_key_value_heads=8 rope_theta=5e6 head_dim=128 | width_norm free
mixtral  kind="wide" windows="all" num_key_value_heads=8 rope_theta=1e6 num_local_experts=8 \
  num_experts_per_tok=2 |
olmoe  kind="wide" | width_norm attn
phimoe  kind="wide" windows="all" num_key_value_heads=8 rope_theta=1e6 | layernorm \
  head_bias:lm_head_bias attn
qwen2_moe  kind="experts" num_key_value_heads=16 qkv_bias=true use_sliding_window=false | \
  qkv_biases:qkv_bias shared_gate
qwen3_moe  kind="experts" windows="all" num_key_value_heads=4 use_sliding_window=false \
  num_experts=128 num_experts_per_tok=8 moe_intermediate_size=768 | head_norm attn
sarvam_moe  kind="experts" num_key_value_heads=4 rope_theta=8e6 n_shared_experts=1 \
  first_k_dense_replace=1 use_qk_norm=true head_dim=64 | qkv qkv_biases:use_qkv_bias \
  head_norm:use_qk_norm free
solar_open  kind="experts" num_key_value_heads=8 rope_theta=1e6 n_shared_experts=1 head_dim=128 | \
  qkv free
# With latent attention: ranks of queries and of keys and values, widths of heads.
axk1  kind="experts" latent=[1536,512,128,64,128] n_shared_experts=1 first_k_dense_replace=1 \
  n_group=8 topk_group=4 routed_scaling_factor=2.5 | free norm_of_experts mla
deepseek_v2  kind="experts" latent=[1536,512,128,64,128] n_routed_experts=64 n_shared_experts=2 \
  topk_method="greedy" | mla mlp
deepseek_v3  kind="experts" latent=[1536,512,128,64,128] n_shared_experts=1 \
  first_k_dense_replace=3 n_group=8 topk_group=4 routed_scaling_factor=2.5 \
  num_nextn_predict_layers=1 | free mla
glm4_moe_lite  kind="experts" latent=[768,512,192,64,256] n_shared_experts=1 \
  first_k_dense_replace=1 routed_scaling_factor=1.8 | free mla
minicpm3  tie_word_embeddings=true latent=[768,256,64,32,null] | mla mlp
mistral4  kind="experts" latent=[1024,256,64,64,128] n_shared_experts=1 | mla
sarvam_mla  kind="experts" latent=[null,512,128,64,128] n_shared_experts=1 \
  first_k_dense_replace=1 routed_scaling_factor=2.5 | free mla
youtu  tie_word_embeddings=true latent=[1536,512,128,64,128] | mla
# With layers of other kinds than attention.
bamba  linear="mamba2" windows="indices" num_key_value_heads=8 partial_rotary_factor=0.5 \
  mamba_n_heads=128 mamba_n_groups=1 mamba_d_state=256 | attn mlp
kimi_linear  kind="experts" linear="kda" windows="stated" latent=[null,512,128,64,128] \
  num_shared_experts=1 first_k_dense_replace=1 routed_scaling_factor=2.446 mla_use_nope=true \
  | free unrotated:mla_use_nope mla
lara_mini  kind="experts" linear="gated_delta_net" windows="stated" num_key_value_heads=4 \
  tie_word_embeddings=true head_dim=128 sliding_window=512 shared_expert_intermediate_size=512 \
  delta=[8,16,128,128] | head_norm attn
nemotron_h  kind="experts" linear="mamba2" windows="alone" num_key_value_heads=8 head_dim=128 \
  mlp_hidden_act="relu2" n_routed_experts=8 n_shared_experts=1 num_experts_per_tok=2 \
  mamba_num_heads=128 mamba_head_dim=64 n_groups=8 ssm_state_size=128 | two_matrices \
  no_positions free mlp
olmo_hybrid  linear="gated_delta_net" windows="full_last" every=4 | width_norm norms_after attn
qwen3_5  linear="gated_delta_net" windows="full_last" every=4 num_key_value_heads=4 head_dim=256 \
  partial_rotary_factor=0.25 delta=[16,32,128,128] | output_gate head_norm attn
qwen3_5_moe  kind="experts" linear="gated_delta_net" windows="full_last" every=4 \
  num_key_value_heads=2 head_dim=256 partial_rotary_factor=0.25 delta=[16,32,128,128] \
  shared_expert_intermediate_size=512 num_experts=256 num_experts_per_tok=8 \
  moe_intermediate_size=512 | output_gate head_norm shared_gate attn
qwen3_next  kind="experts" linear="gated_delta_net" windows="full_last" every=4 \
  num_key_value_heads=2 head_dim=256 partial_rotary_factor=0.25 delta=[16,32,128,128] \
  shared_expert_intermediate_size=512 num_experts=512 num_experts_per_tok=10 \
  moe_intermediate_size=512 | output_gate head_norm shared_gate attn
# Blocks of the shape's family gpt.
biogpt  kind="gpt" hidden_dropout_prob=0.1 attention_probs_dropout_prob=0.1 \
  max_position_embeddings=1024 extra_positions=2 |
gpt2  kind="gpt" attn_pdrop=0.1 resid_pdrop=0.1 n_positions=1024 |
gpt_bigcode  kind="gpt" attn_pdrop=0.1 resid_pdrop=0.1 n_positions=1024 multi_query=true |
gpt_neo  kind="gpt" max_position_embeddings=2048 windows="full_first" window_size=256 every=2  | \
  no_qkv_biases
opt  kind="gpt" dropout=0.1 max_position_embeddings=2048 extra_positions=2 \
  activation_function="relu" | no_biases!enable_bias \
  no_layernorm_weights!layer_norm_elementwise_affine
"""
"""A family a line: defaults, and behind the bar its features."""

_SHORT: Final = {
    "qkv": "qkv_biases:attention_bias",
    "attn": "qkv_biases:attention_bias o_bias:attention_bias",
    "mlp": "mlp_biases:mlp_bias",
    "free": "sigmoid balanced",
    "mla": "latent_biases:attention_bias",
    "use_bias": "qkv_biases:use_bias o_bias:use_bias mlp_biases:use_bias",
}

_SIZES: Final = """
emu3 184622 4096 14336 32 32
gemma 256000 3072 24576 28 16
gemma2 256000 2304 9216 26 8
gemma3 262208 2304 9216 26 8
glm4 151552 4096 13696 40 32
granite 32000 4096 11008 32 32
llama 32000 4096 11008 32 32
llama4 202048 5120 8192 48 40
ministral3 131072 4096 14336 34 32
mistral 32000 4096 14336 32 32
mixtral 32000 4096 14336 32 32
phi3 32064 3072 8192 32 32
qwen2 151936 4096 22016 32 32
qwen3 151936 4096 22016 32 32
qwen3_moe 151936 2048 6144 24 32
"""
"""Sizes of the classes of `_SIZE_WORDS`, of families that stand in files of models for pictures: a
`text_config` leaves out what is as in its class."""
_SIZE_WORDS: Final = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)


def _families() -> Iterator[tuple[str, ConfigFamily]]:
    for line in _TABLE.replace("\\\n", "").splitlines():
        before, bar, features = line.partition("|")
        if not bar:
            continue
        name, *words = before.split()
        about = {
            word: json.loads(value) for word, _, value in (each.partition("=") for each in words)
        }
        kind, windows = about.pop("kind", "dense"), about.pop("windows", "")
        linear = about.pop("linear", "")
        about |= zip(OF_LATENTS, about.pop("latent", ()), strict=False)
        about |= zip(OF_LINEAR_LAYERS, about.pop("delta", ()), strict=False)
        if kind == "gpt":
            about["tie_word_embeddings"] = True
        yield (
            name,
            ConfigFamily(
                features=tuple(
                    each for short in features.split() for each in _SHORT.get(short, short).split()
                ),
                defaults=about,
                windows=windows,
                linear=linear,
                kind=kind,
            ),
        )


FAMILIES: Final[Mapping[str, ConfigFamily]] = dict(_families())
"""By `model_type`, without the ending `_text` or `_text_model`."""

NESTED_SIZES: Final[Mapping[str, Mapping[str, int]]] = {
    name: dict(zip(_SIZE_WORDS, map(int, sizes), strict=True))
    for name, *sizes in (line.split() for line in _SIZES.strip().splitlines())
}
"""Sizes that a `text_config` leaves out, by family."""

SAME_FAMILY: Final[Mapping[str, str]] = {
    name: family
    for family, names in {
        "llama": "Yi aquila",
        "cohere2": "cohere_compass",
        "deepseek_v3": "kimi_k2 kimi_k25",
        "persimmon": "fuyu",
        "apertus": "apertus1p5",
        "gpt2": "gpt-sw3",
        "exaone4": "exaone4_5",
        "gemma3": "gemma3_text",
        "glm4v": "glm_ocr",
        "granite": "granite4_vision granite_docling",
        "hunyuan_v1_moe": "hunyuan hunyuan_moe",
        "hunyuan_v1_dense": "hunyuan_dense hunyuan_vl",
        "ernie4_5": "paddleocr_vl",
        "phi3": "phi3_v",
        "qwen2": "mimo qwen2_5_omni qwen2_vl qwen2_5_vl",
        "qwen3": "qwen3_vl",
        "qwen3_moe": "qwen3_omni_moe qwen3_vl_moe",
        "stablelm": "stablelm_epoch",
    }.items()
    for name in names.split()
}
"""Types whose decoder is that of another."""

TEXT_TYPES: Final[Mapping[str, str]] = {
    "gemma3": "gemma3",
    "llama4": "llama4",
    "llava": "llama",
    "llava_next": "llama",
    "mistral3": "mistral",
    "paligemma": "gemma",
}
"""The type of a `text_config` that does not state one, by that of the file."""

_MAMBA: Final = "layers of Mamba-1, or of Mamba and attention at once"
_INDEXED: Final = "attention to indexed or compressed positions"
ENCODER: Final = "an encoder, or other parts than a decoder of text"
ALIBI: Final = "ALiBi positions"


def _refused(types: str, what: str) -> Mapping[str, str]:
    return dict.fromkeys(words_of(types), what)


REFUSED: Final[Mapping[str, str]] = {
    **_refused("falcon_h1 mamba mamba2 zamba zamba2 jamba falcon_mamba codestral_mamba", _MAMBA),
    "bailing_hybrid": "gates of full rank in layers of KDA",
    **_refused(
        """
        deepseek_v32 deepseek_v4 glm_moe_dsa glm5_next axk2 dots3_note qwen4_exp minimax_m3
        minimax_m3_vl mistral_large4
        """,
        _INDEXED,
    ),
    **_refused(
        """
        gemma3n gemma4 gemma4_unified gemma4_assistant gemma4_unified_assistant openelm nemotron-nas
        deci
        """,
        WIDTHS,
    ),
    **_refused("lfm2 lfm2_moe lfm3", "convolution layers"),
    **_refused("inkling inkling2 inkling2_loop zaya", "convolutions of keys and values"),
    "longcat_flash": "experts without weights, and two attentions in a layer",
    **_refused("minimax minimax_text_01 minimax_m1", "lightning attention"),
    "recurrent_gemma": "recurrent layers (RG-LRU)",
    "diffllama": "differential attention",
    "dory": "normalized weights",
    "jetmoe": "mixtures of attention heads",
    "doge": "dynamic masks of attention",
    "bitnet": "ternary weights with norms inside of attention and feed-forward",
    "ernie4_5_vl_moe": "experts of two widths",
    "hrm": "layers that run several times",
    **_refused("beam muse_glimmer muse_spark", "gates or norms of other kinds"),
    "phi4_multimodal": "adapters (LoRA) for pictures and sound in all layers",
    **_refused("step3p5 step3p7", "other numbers of heads in layers with windows"),
    "blt": "patches of bytes",
    "hy_v4": "hyper-connections",
    "kimi_k3": "gates of full rank in layers of KDA, and another activation",
    "mimo_v2_flash": "values of another width than keys, and other key heads in windows",
    "mllama": "cross-attention layers",
    **_refused("rwkv xlstm", OTHER_LAYERS),
    **_refused("falcon RefinedWeb RefinedWebModel", "ALiBi, or heads and norms by its version"),
    "cohere2_moe": "experts whose results are averaged, beside attention",
    "gpt_neox_japanese": "biases of the last layer alone",
    **_refused("bloom mpt", ALIBI),
    **_refused("xglm ctrl openai-gpt", "positions or norms of another kind"),
    **_refused(
        """
        albert bart bert bert-generation big_bird bigbird_pegasus blenderbot blenderbot-small
        camembert clip cpmant data2vec-text deberta deberta-v2 distilbert electra ernie git longt5
        marian mbart megatron-bert modernbert modernbert-decoder moshi mt5 musicgen musicgen_melody
        mvp pegasus plbart prophetnet reformer rembert roberta roberta-prelayernorm roc_bert roformer
        siglip t5 trocr umt5 vit wav2vec2 whisper xlm xlm-roberta xlm-roberta-xl xlnet xmod
        """,
        ENCODER,
    ),
}
"""What the layers of a family have that no field of a shape says."""
