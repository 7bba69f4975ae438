"""The shape of a model from the options of Megatron's family.

Where an option is absent the trainer's default counts (megatron/training/arguments.py and
megatron/core/transformer/transformer_config.py at d98e8a64; Megatron-DeepSpeed's
megatron/arguments.py at f4157bea). What a shape cannot say goes into its `lacks` where it is at
most `MOST_LACKING` of the parameters, and else is not understood.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

from layout_tuner.documents.numbers import core_value
from layout_tuner.errors import SearchSpaceError
from layout_tuner.search_spaces.models.foreign_words import ATTENTION_KINDS
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.trainers.found_jobs.found_job import MODEL
from layout_tuner.trainers.found_jobs.megatron.megatron_layers import (
    KINDS,
    OTHER_KINDS,
    PATTERN_FLAGS,
    pattern_of,
    read_kinds,
)
from layout_tuner.trainers.found_jobs.megatron.megatron_options import Arguments
from layout_tuner.trainers.found_jobs.megatron.megatron_vocabulary import read_vocabulary
from layout_tuner.trainers.megatron_lm import MODEL_FLAGS

MOST_LACKING: Final = 0.005
"""Share of the parameters that a shape may lack."""
_DROPOUT: Final = 0.1
"""Of attention and of features, in both trainers, where no option states it."""
_FAMILY: Final = "model.family"
_OPTIONS: Final[Mapping[str, str]] = {
    "latent": "q-lora-rank kv-lora-rank=32 qk-head-dim:qk-nope-head-dim=128 "
    "qk-pos-emb-head-dim:qk-rope-head-dim=64 v-head-dim=128",
    "experts": "moe-latent-size:expert-latent-size moe-router-score-function:router-score=sigmoid "
    "moe-router-topk-scaling-factor:router-scaling-factor=1.0 "
    "moe-router-enable-expert-bias:router-bias=true moe-shared-expert-gate:shared-expert-gate=true",
    "groups": "moe-router-num-groups:router-groups moe-router-group-topk:router-topk-groups",
    "gated_delta_net": "linear-num-key-heads=16 linear-num-value-heads=32 linear-key-head-dim=128 "
    "linear-value-head-dim=128",
    "mamba2": "mamba-head-dim=64 mamba-num-heads mamba-state-dim=128 mamba-num-groups=8",
    "llama": "attention-output-gate=true softmax-type:attention-sinks=learnable "
    "mtp-num-layers:num-mtp-layers",
}
"""Options by what has them, with the field of another name behind `:`, and behind `=` the default
of a size, or the value of a word or a switch that counts. Without `--q-lora-rank` queries have no
latent: 512 is the default of the class alone (arguments.py, _add_mla_args)."""
OPTION_FLAGS: Final = tuple(
    f"--{re.split('[:=]', each)[0]}" for part in _OPTIONS.values() for each in part.split()
)

_OTHERS: Final = "models other than decoders"
_NOT_COVERED: Final[Mapping[str, tuple[str, str]]] = {
    f"--{flag}": (name, what)
    for flags, name, what in (
        ("multi-head-latent-attention", "model.kv_lora_rank", "latent attention of a fork"),
        ("mtp-use-repeated-layer", "model.num_mtp_layers", "depths that share one layer's weights"),
        ("num-experts-switch", "model.num_experts", "experts of SwitchMLP"),
        ("is-hybrid-model hybrid-attention-ratio hybrid-mlp-ratio", KINDS, OTHER_KINDS),
        ("spec", _FAMILY, "a module of the user's builds the layers"),
        (
            "heterogeneous-layers-config-path heterogeneous-layers-config-encoded-json",
            "model.num_layers",
            "layers of different shapes",
        ),
        ("enable-mhc-connections", _FAMILY, "several residual streams"),
        ("retro-add-retriever", _FAMILY, "a retriever beside the decoder"),
        ("encoder-num-layers decoder-num-layers vision-pretraining", _FAMILY, _OTHERS),
        ("language-model-type vision-model-type", _FAMILY, "a tower beside the decoder"),
        ("mos kd", _FAMILY, "a teacher beside the model"),
    )
    for flag in flags.split()
}
"""Options of what no shape says, each with the field that is open then."""

_USUAL_SPECS: Final = re.compile("(gpt|mamba|hybrid)_layer_specs|attention_variant_module_specs")
"""Megatron's own modules, which build the layers that the other options say."""

_OTHER_PROGRAMS: Final = re.compile(
    r"(pretrain|finetune|train)_(bert|t5|ict|retro|vision|vlm|mimo|bark|siglip|clip)\w*\.py"
)
_HYBRID_PROGRAMS: Final = re.compile(r"pretrain_(mamba|hybrid)\w*\.py")


def read_model(arguments: Arguments) -> None:
    """Notes the fields of the model; the vocabulary needs `tp`."""
    sizes = [flag for name, flag in MODEL_FLAGS.items() if name != "seq_length"]
    is_stated = arguments.is_given(*sizes)
    for name, flag in MODEL_FLAGS.items():
        if name != "ffn_hidden_size":
            others = ("--encoder-seq-length",) if name == "seq_length" else ()
            _needed(arguments, f"{MODEL}{name}", flag, *others)
    _read_family(arguments)
    arguments.is_given("--topk", "--expert-interval", "--mlp-type")
    arguments.is_given(*OPTION_FLAGS)
    if arguments.is_given("--num-experts"):
        _read_experts(arguments)
    _read_heads(arguments)
    _read_layers(arguments)
    _read_training(arguments)
    read_vocabulary(arguments)
    _note_lacking(arguments)
    _note_not_covered(arguments)
    if not is_stated:
        arguments.findings.forget(MODEL, keeps="model.seq_length")


def _note_not_covered(arguments: Arguments) -> None:
    for flag, (name, what) in _NOT_COVERED.items():
        if (option := arguments.switch(name, flag)) is None:
            continue
        is_known: object = name == KINDS and arguments.findings.value(KINDS)
        if is_known or (option.values and option.values[0].text in ("0", "local")):
            continue
        if flag == "--spec" and _USUAL_SPECS.search(option.said):
            arguments.miss(option, "it builds the layers, and the other options count here")
            continue
        arguments.miss(option, f"{what}: no shape of a model says it yet", name)
    for programs, name, what in (
        (_OTHER_PROGRAMS, _FAMILY, _OTHERS),
        (_HYBRID_PROGRAMS, KINDS, OTHER_KINDS),
    ):
        is_known = arguments.findings.is_open(name) or (name == KINDS and pattern_of(arguments))
        if programs.fullmatch(arguments.program) and not is_known:
            why = f"{what}: no shape of a model says it yet"
            arguments.findings.miss(arguments.program, why, name=name)


def _needed(arguments: Arguments, name: str, *flags: str) -> int | None:
    found = arguments.whole(name, *flags)
    if found is None and not arguments.findings.is_open(name):
        why = f"{arguments.trainer} needs it, and the command does not have it"
        arguments.findings.miss(f"no {flags[0]}", why, name=name)
    return found


def _read_family(arguments: Arguments) -> None:
    """`gpt` is GPT-2's model alone: with learned positions, two matrices and no experts."""
    option = arguments.switch(_FAMILY, "--swiglu", "--quick-geglu")
    flags = ["--num-experts", "--multi-latent-attention", *PATTERN_FLAGS]
    if _positions(arguments) != "learned_absolute":
        flags += ["--use-rotary-position-embeddings", "--position-embedding-type"]
    option = option or arguments.switch(_FAMILY, *flags)
    if option is not None and option.said != "--num-experts 1":
        arguments.note(_FAMILY, "llama", option)
    else:
        arguments.assume(_FAMILY, "gpt", "--swiglu: two matrices and GELU")


def _read_options(arguments: Arguments, part: str) -> None:
    """Notes the fields of one part of `_OPTIONS`."""
    for word in _OPTIONS[part].split():
        names, _, text = word.partition("=")
        flag, _, name = names.partition(":")
        flag, ours = f"--{flag}", f"{MODEL}{(name or flag).replace('-', '_')}"
        match core_value(text):
            case True:
                if (option := arguments.switch(ours, flag)) is not None:
                    arguments.note(ours, True, option)
            case float():
                arguments.number(ours, flag)
            case str(expected) if expected:
                found = arguments.word(ours, flag)
                if found is not None and found[1].text == expected:
                    arguments.note(ours, expected if "score" in ours else True, *found)
            case default:
                if arguments.whole(ours, flag) is None and default:
                    arguments.assume(ours, default, flag)


def _positions(arguments: Arguments) -> str:
    """The kind of positions: learned_absolute, rope (also of its relatives), or another."""
    rotary = arguments.is_given("--use-rotary-position-embeddings")
    is_none = arguments.is_given("--no-position-embedding")
    is_kind = arguments.is_given("--position-embedding-type")
    if rotary or not is_kind:  # the kind counts over --no-position-embedding
        return "rope" if rotary else "none" if is_none else "learned_absolute"
    kind = arguments.text(_FAMILY, "--position-embedding-type") or "learned_absolute"
    if kind in ("relative", "alibi"):
        option = arguments.options["--position-embedding-type"]
        arguments.miss(option, f"{kind} positions: no shape of a model says them", _FAMILY)
    return "rope" if kind in ("rope", "mrope", "yarn") else kind


def _read_experts(arguments: Arguments) -> None:
    name = "model.num_experts"
    num_experts = arguments.whole(name, "--num-experts")
    is_deepspeed = arguments.trainer == "Megatron-DeepSpeed"
    if num_experts is None or (is_deepspeed and num_experts == 1):
        arguments.findings.read.pop(name, None)
        return
    top = arguments.whole("model.experts_per_token", "--moe-router-topk", "--topk")
    if top is None:
        default = 1 if is_deepspeed else 2
        arguments.assume("model.experts_per_token", default, "--moe-router-topk")
    arguments.whole("model.moe_ffn_hidden_size", "--moe-ffn-hidden-size")
    shared = "model.shared_expert_ffn_hidden_size"
    arguments.whole(shared, "--moe-shared-expert-intermediate-size")
    if is_deepspeed:
        _read_interval(arguments)
    _read_options(arguments, "experts")
    groups = arguments.text("", "--moe-router-num-groups")
    if arguments.is_given("--moe-router-group-topk") and groups != "1":
        _read_options(arguments, "groups")


def _read_interval(arguments: Arguments) -> None:
    """Megatron-DeepSpeed has experts in every second layer, unless the option says otherwise."""
    name, flag = "model.experts_every", "--expert-interval"
    if arguments.whole(name, flag) == 1:
        arguments.findings.forget(name)
    else:
        arguments.assume(name, 2, flag)


def _read_heads(arguments: Arguments) -> None:
    name, is_deepspeed = "model.num_kv_heads", arguments.trainer == "Megatron-DeepSpeed"
    is_latent = "+" in pattern_of(arguments) or arguments.is_given("--multi-latent-attention")
    if is_latent:
        _read_options(arguments, "latent")
        arguments.is_given("--group-query-attention", "--num-query-groups")
    elif is_deepspeed:
        arguments.whole(name, "--num-key-value-heads")
    elif arguments.switch(name, "--group-query-attention") is not None:
        if arguments.whole(name, "--num-query-groups") is None:
            arguments.assume(name, 1, "--num-query-groups")
    else:
        arguments.asked.add("--num-query-groups")
    heads = arguments.findings.value("model.num_heads")
    if heads is not None:
        without = "--num-key-value-heads" if is_deepspeed else "--group-query-attention"
        arguments.assume(name, heads, without)
    arguments.whole("model.head_dim", "--kv-channels", notes=not is_latent)
    norm = arguments.switch("model.qk_norm", "--qk-layernorm")
    if norm is not None and not is_latent and arguments.findings.value(_FAMILY) == "llama":
        arguments.note("model.qk_norm", True, norm)
    if arguments.findings.value(_FAMILY) == "llama":
        flags = ("--rotary-base", "--rotary-position-embeddings-theta")
        arguments.number("model.rotary_base", *flags)
        arguments.assume("model.rotary_base", 10_000.0, flags[int(is_deepspeed)])
    else:
        arguments.is_given("--rotary-base", "--rotary-position-embeddings-theta")


def _read_layers(arguments: Arguments) -> None:
    """The kinds of the layers, with what each kind has."""
    kinds, value = read_kinds(arguments), arguments.findings.value
    for mixer in ("gated_delta_net", "mamba2"):
        if any(kind.startswith(mixer) for kind in kinds):
            _read_options(arguments, mixer)
    if width := value("model.mamba_head_dim"):
        # mamba_mixer.py: the inner width is twice that of the features.
        heads = 2 * (value("model.hidden_size") or 0) // width
        arguments.assume("model.mamba_num_heads", heads, "--mamba-num-heads")
    has_dense = not kinds or any("dense" in kind for kind in kinds)
    _read_widths(arguments, has_dense=has_dense or value("model.experts_every"))
    if value(_FAMILY) == "llama":
        _read_blocks(arguments)


def _read_blocks(arguments: Arguments) -> None:
    """Norms, activation, biases and positions of family llama."""
    norm = arguments.text("model.norm", "--normalization")
    if norm is None:
        arguments.assume("model.norm", "layer", "--normalization")
    elif norm.lower() != "rmsnorm":
        arguments.note("model.norm", "layer", arguments.options["--normalization"])
    for flag, kind in (("--squared-relu", "relu2"), ("--quick-geglu", "geglu")):
        if (option := arguments.switch("model.activation", flag)) is not None:
            arguments.note("model.activation", kind, option)
    if not arguments.is_given("--swiglu"):
        arguments.assume("model.activation", "gelu", "--swiglu")
    _read_options(arguments, "llama")
    if arguments.findings.value("model.kv_lora_rank"):
        return
    qkv = arguments.switch("model.biases", "--add-qkv-bias")
    if arguments.switch("model.biases", "--disable-bias-linear") is None:
        arguments.assume("model.biases", "all", "--disable-bias-linear")
    elif qkv is not None:
        arguments.note("model.biases", "qkv", qkv)
    if _positions(arguments) == "none":
        arguments.assume("model.rotary_fraction", 0.0, "positions")
    else:
        arguments.number("model.rotary_fraction", "--rotary-percent")


def _read_widths(arguments: Arguments, *, has_dense: bool) -> None:
    value = arguments.findings.value
    ours, flag = "model.ffn_hidden_size", MODEL_FLAGS["ffn_hidden_size"]
    arguments.whole(ours, flag)
    hidden = value("model.hidden_size")
    if hidden and value(_FAMILY) == "llama" and arguments.is_given("--swiglu"):
        # arguments.py, validate_args: two thirds of 4 h, down to a multiple of 64.
        arguments.assume(ours, int(4 * hidden * 2 / 3 / 64) * 64, flag)
    elif hidden and value(_FAMILY):
        arguments.assume(ours, 4 * hidden, flag)
    if not value("model.num_experts") or value(ours) is None:
        return
    arguments.assume("model.moe_ffn_hidden_size", value(ours), "--moe-ffn-hidden-size")
    if not has_dense:  # no layer has it
        arguments.findings.forget(ours)


def _read_training(arguments: Arguments) -> None:
    tied = "model.tied_embeddings"
    untied = arguments.switch(tied, "--untie-embeddings-and-output-weights")
    if untied is not None:
        arguments.note(tied, False, untied)
    arguments.assume(tied, True, "--untie-embeddings-and-output-weights")
    for name in ("attention_dropout", "hidden_dropout"):
        flag = f"--{name.replace('_', '-')}"
        if arguments.number(f"{MODEL}{name}", flag) is None:
            arguments.assume(f"{MODEL}{name}", _DROPOUT, flag)
    _read_attention(arguments)


_FLASH: Final = tuple(
    f"--use-flash-attn{each}" for each in ("", "-v1", "-v2", "-triton", "-builder")
)


def _read_attention(arguments: Arguments) -> None:
    """Whether scores are kept; Megatron-LM's default takes a fused kernel where one can be."""
    name = "model.attention"
    flash = arguments.switch(name, *_FLASH)
    backend = arguments.word(name, "--attention-backend")
    local = arguments.text(name, "--transformer-impl") == "local"
    kernels = [arguments.environment.get(f"NVTE_{each}_ATTN") for each in ("FLASH", "FUSED")]
    if kernels == ["0", "0"] and not local:
        said = "NVTE_FLASH_ATTN=0 NVTE_FUSED_ATTN=0"
        arguments.findings.note(name, "unfused", said)
    elif flash is not None:
        arguments.note(name, "fused", flash)
    elif local:
        arguments.note(name, "unfused", arguments.options["--transformer-impl"])
    elif backend is not None:
        word = backend[1].text or ""
        kind = "fused" if word == "auto" else ATTENTION_KINDS.get(word)
        if kind:
            arguments.note(name, kind, *backend)
        else:
            arguments.miss(backend[0], "a kernel that is not known", name)
    elif arguments.trainer == "Megatron-DeepSpeed":
        arguments.assume(name, "unfused", "--use-flash-attn-v2")


_Lacking = Iterator[tuple[str, str, int]]
"""What the model has otherwise than the shape: an option, words, and parameters that differ."""


def _note_lacking(arguments: Arguments) -> None:
    """Small differences go into `lacks`; the family is open where one is large."""
    is_gated = arguments.findings.value(_FAMILY) == "llama"
    found = [*(_beside_llama if is_gated else _beside_gpt)(arguments), *_beside_both(arguments)]
    total, small = _parameters(arguments), []
    for said, what, parameters in found:
        share = parameters / total if total else 0.0
        if share > MOST_LACKING:
            why = f"{what}: {share:.1%} of the parameters, more than a shape may lack"
            arguments.findings.miss(said, why, name=_FAMILY)
        else:
            small.append((said, what))
    if small and not arguments.findings.is_open(_FAMILY):
        said = ", ".join(each for each, _ in small)
        arguments.findings.note("model.lacks", ", ".join(what for _, what in small), said)


def _beside_llama(arguments: Arguments) -> _Lacking:
    hidden, layers, rows, _ = _sizes(arguments)
    if _positions(arguments) == "learned_absolute":
        yield "no --position-embedding-type rope", "learned positions", rows * hidden
    if arguments.findings.value("model.kv_lora_rank"):
        if arguments.switch(_FAMILY, "--disable-bias-linear") is None:
            yield "no --disable-bias-linear", "biases", _biases(arguments, 2)
        if arguments.switch(_FAMILY, "--qk-layernorm") is None:
            yield "no --qk-layernorm", "no norms of latents", layers * hidden


def _beside_gpt(arguments: Arguments) -> _Lacking:
    hidden, layers, rows, seq = _sizes(arguments)
    if (arguments.text(_FAMILY, "--normalization") or "").lower() == "rmsnorm":
        said = "--normalization RMSNorm"
        yield said, "RMSNorm in place of LayerNorm", (2 * layers + 1) * hidden
    positions = _positions(arguments)
    if positions != "learned_absolute":
        what = "rotary positions" if positions == "rope" else "no positions"
        yield f"positions of the kind {positions}", f"{what} in place of learned ones", seq * hidden
    elif rows != seq:
        said = f"--max-position-embeddings {rows}"
        yield said, f"learned positions of {rows} tokens", abs(rows - seq) * hidden
    if (option := arguments.switch(_FAMILY, "--disable-bias-linear")) is not None:
        yield option.said, "no biases", _biases(arguments, 1)
    if (option := arguments.switch(_FAMILY, "--squared-relu")) is not None:
        yield option.said, "squared ReLU in place of GELU", 0
    if (option := arguments.switch(_FAMILY, "--qk-layernorm")) is not None:
        yield option.said, "norms of queries and keys", 4 * layers * hidden


def _beside_both(arguments: Arguments) -> _Lacking:
    value, (hidden, layers, _, _) = arguments.findings.value, _sizes(arguments)
    heads, read = value("model.num_heads") or 0, {e.said for e in arguments.findings.read.values()}
    width = heads * (value("model.head_dim") or hidden // max(heads, 1))
    for flag, what, each in (
        ("--apply-residual-connection-post-layernorm", "residual sums behind the norms", 0),
        ("--softmax-type", "attention sinks", heads),
        ("--attention-output-gate", "a gate of attention's output", hidden * width),
        ("--no-rope-freq", "layers without rotation of positions", 0),
    ):
        option = arguments.switch(_FAMILY, flag)
        if option is not None and option.said not in read and "vanilla" not in option.said:
            yield option.said, what, each * layers
    arguments.is_given("--squared-relu", "--rotary-percent")


def _sizes(arguments: Arguments) -> tuple[int, int, int, int]:
    """Width, layers, rows of learned positions, and tokens of a sequence; 0: not known."""
    names = ("hidden_size", "num_layers", "seq_length")
    hidden, layers, seq = (arguments.findings.value(f"{MODEL}{name}") or 0 for name in names)
    rows = arguments.whole(_FAMILY, "--max-position-embeddings", notes=False)
    return hidden, layers, rows or seq, seq


def _biases(arguments: Arguments, num_inner: int) -> int:
    """Biases of all products, with `num_inner` of the feed-forward's inner width."""
    value = arguments.findings.value
    hidden, layers, _, _ = _sizes(arguments)
    experts = value("model.num_experts") or 1
    width = value("model.moe_ffn_hidden_size") or value("model.ffn_hidden_size") or 0
    return layers * (4 * hidden + experts * (num_inner * width + hidden))


def _parameters(arguments: Arguments) -> int:
    """Those of the shape as far as it is read; 0: too little is."""
    try:
        return ModelShape.from_mapping(
            {"vocab_size": 32_000, **arguments.findings.below(MODEL)}
        ).num_parameters
    except SearchSpaceError:
        return 0
