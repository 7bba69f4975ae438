"""nanotron's YAML files, of its releases and of its main branch.

Sources: `config/config.py`, `config/parallelism_config.py`, `config/models_config.py`, `helpers.py`
and `parallel/context.py` of nanotron 0.4 and of main at 2411b022.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from layout_tuner.errors import SearchSpaceError
from layout_tuner.search_spaces.models.layer_kinds import stated_kinds
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.terminal.plurals import listed
from layout_tuner.trainers.found_jobs.found_job import MODEL, FoundJob, Stated
from layout_tuner.trainers.found_jobs.job_file import JobFile
from layout_tuner.trainers.found_jobs.own_scripts.named_values import (
    StatedValues,
    options_by_name,
    stated_beside,
    statements_of,
)
from layout_tuner.trainers.found_jobs.positioned import YAML_SUFFIXES, root_of
from layout_tuner.trainers.found_jobs.program_command import ProgramCommand, options_of
from layout_tuner.trainers.nanotron import ENGINES, stage_blocks

_CONFIG: Final = "model.model_config."
_FAMILIES: Final = ("is_llama_config", "is_qwen2_config")
"""Markers of configurations whose shape is that of family llama."""
_DEFAULTS: Final[Mapping[str, tuple[str, int]]] = {
    "num_hidden_layers": ("num_layers", 32),
    "hidden_size": ("hidden_size", 4096),
    "intermediate_size": ("ffn_hidden_size", 11008),
    "num_attention_heads": ("num_heads", 32),
}
"""Fields of a shape by key, with the defaults of LlamaConfig and Qwen2Config."""
_IGNORED_SECTIONS: Final = (
    *("checkpoints.", "data.", "data_stages", "general.", "lighteval.", "logging.", "profiler."),
    *(
        "metrics_logging.",
        "s3_upload.",
        "tokenizer.",
        "optimizer.",
        "tokens.",
        "model.init_method.",
    ),
    *("model.ddp_bucket_cap_mb", "model.make_vocab", "experiment_logger."),
)
_IGNORED_KEYS: Final = {
    *("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "rms_norm_eps"),
    *("max_position_embeddings", "pretraining_tp", "rope_scaling", "rope_interleaved", "use_cache"),
    *("rope_seq_len_interpolation_factor", "flex_attention_mask", "log_attn_probs"),
    *("z_loss_enabled", "z_loss_coefficient", "_fused_rotary_emb", "_fused_rms_norm"),
    *("_use_qkv_packed", "_use_doc_masking", "ring_attn_heads_k_stride", "_is_using_mup"),
    *("moe_config.router_aux_loss_coef", "moe_config.token_dispatcher_type", *_FAMILIES),
}
"""Keys of a model that leave its shape as it is."""


def read_config(file: JobFile) -> Sequence[FoundJob] | None:
    """The job of a YAML file; None: it is another format.

    Raises:
        JobFileInvalidError: the file is malformed, or a value is none that nanotron takes.
    """
    root = root_of(file, *YAML_SUFFIXES)
    if root is None or not all(root.get(key) for key in ("parallelism", "tokens")):
        return None
    return (_job_of(statements_of(root), file),)


def read_command(command: ProgramCommand, file: JobFile) -> FoundJob | None:
    """The job of a command that starts `run_train.py`; None: it starts another program."""
    path = options_by_name(options_of(command.words[1:])).get("config_file")
    if path is None or "run_train" not in command.program:
        return None
    stated = stated_beside(file, path)
    if stated is None:
        why = path.unknown or "the configuration does not lie beside the script; put it there"
        return _job_of({}, file, replace(path, value=None, unknown=why))
    return _job_of(stated, file)


def _job_of(stated: Mapping[str, Stated], file: JobFile, unread: Stated | None = None) -> FoundJob:
    values = StatedValues(file, stated, trainer="nanotron", unread=unread)
    pp = _degrees(values)
    _batch(values)
    _model(values)
    _types(values)
    _note_stages(values, pp)
    values.check_optimizer("optimizer.optimizer_factory.name")
    has_no_shape = values.findings.is_open(f"{MODEL}family")
    for key, each in values.rest():
        short = key.removeprefix(_CONFIG)
        of_model = short != key and (has_no_shape or short in _IGNORED_KEYS)
        if of_model or key.startswith(_IGNORED_SECTIONS):
            continue
        values.miss(each, "it is not known", *_field_of(key, each.value))
    return values.findings.job(file=file.name, format="nanotron", trainer="nanotron")


def _field_of(key: str, value: Any) -> tuple[str, ...]:
    """The field that a key of a fork may set, which is open where the key is not known."""
    if value is False:
        return ()
    if key.startswith(_CONFIG):
        return (f"{MODEL}family",)
    if not key.startswith("parallelism.") or value in (1, "ddp"):
        return ()
    if key.startswith(("parallelism.dp_", "parallelism.fsdp_")):
        return ("zero_stage",)
    return ("pipeline_split",) if isinstance(value, list) else ("dp",)


def _degrees(values: StatedValues) -> Stated:
    """Notes the layout; returns pp."""
    tp, pp, cp, dp = (
        values.whole(None if name == "dp" else 1, *keys)
        for name, keys in {
            "tp": ("parallelism.tp",),
            "pp": ("parallelism.pp",),
            "cp": ("parallelism.context_parallel_size", "parallelism.cp"),
            "dp": ("parallelism.dp",),
        }.items()
    )
    for name, degree in (("tp", tp), ("pp", pp), ("cp", cp), ("dp", dp)):
        if degree.value is not None or degree.unknown:
            values.put(name, int, degree)
    mode = values.word("ALL_REDUCE", "parallelism.tp_mode")
    shares = str(mode.value).upper() == "REDUCE_SCATTER"
    if not mode.unknown and not shares and str(mode.value).upper() != "ALL_REDUCE":
        values.miss(mode, "it is neither ALL_REDUCE nor REDUCE_SCATTER", "sequence_parallel")
    else:
        values.put("sequence_parallel", lambda _, n: shares and n > 1, mode, tp, shown=[mode])
    overlap = values.switch("parallelism.tp_linear_async_communication", default=shares)
    if tp.value != 1 and not overlap.unknown and overlap.value is not shares:
        values.miss(overlap, "communication of tp beside the products has no knob here")
    _pipeline(values, pp)
    stage = values.whole(0, "optimizer.zero_stage", least=0)
    if not stage.unknown and stage.value > 1:
        values.miss(stage, "nanotron has ZeRO-1 alone", "zero_stage")
    else:
        # Over one replica ZeRO shards nothing.
        values.put("zero_stage", lambda n, a: n if a != 1 else 0, stage, dp, shown=[stage])
        why = "nanotron's ZeRO shards over dp, and not over cp"
        of = (stage, dp, cp)
        values.put(
            "zero_replicas", lambda n, a, b: b if n and a != 1 else 1, *of, shown=(), why=why
        )
    layer = values.switch("parallelism.recompute_layer")
    old = values.word("", "parallelism.recompute_granularity")
    words = {"full": "full", "selective": "selective", "": "none"}
    if old.value and str(old.value).lower() not in words:
        values.miss(old, "it is neither full nor selective", "recompute")
    elif old.value:
        values.put("recompute", lambda word: words[str(word).lower()], old)
    else:
        values.put("recompute", lambda is_full: "full" if is_full else "none", layer)
    gathers_again = values.switch("parallelism.tp_recompute_allgather", default=True)
    if shares and tp.value != 1 and gathers_again.value is False:
        values.miss(gathers_again, "kept activations of all tp ranks have no knob here")
    experts = values.whole(1, "parallelism.expert_parallel_size")
    if experts.unknown or experts.value != 1:
        why = "nanotron's expert parallelism has ranks of its own, which no layout here has"
        values.miss(experts, experts.unknown or why, "ep")
    kind = values.word("flash_attention_2", f"{_CONFIG}_attn_implementation")
    ours = {"llama3_ring_attention": "all_gather", "ring": "p2p", "ring_flash_triton": "p2p"}
    if cp.value != 1:
        why = "such attention has no exchange over cp"
        values.choice("cp_comm_type", kind, ours, why=why)
    return pp


def _pipeline(values: StatedValues, pp: Stated) -> None:
    engine = values.word("afab", "parallelism.pp_engine")
    if pp.value != 1:
        values.choice("schedule", engine, {word: name for name, word in ENGINES.items()})


def _batch(values: StatedValues) -> None:
    for name, key in {
        "micro_batch_size": "micro_batch_size",
        "num_microbatches": "batch_accumulation_per_replica",
        f"{MODEL}seq_length": "sequence_length",
    }.items():
        found = values.whole(None, f"tokens.{key}")
        if found.said or found.unknown:
            values.put(name, int, found)


def _types(values: StatedValues) -> None:
    """The precision. With gradients in fp32, the optimizer keeps fp32 weights, else bf16 alone."""
    dtype = values.word("bfloat16", "model.dtype")
    in_fp32 = values.switch("optimizer.accumulate_grad_in_fp32", default=True)
    names = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    word = str(dtype.value).removeprefix("torch.")
    if in_fp32.value is False and word != "float32":
        values.miss(in_fp32, "states of 16 bits have no counterpart here", "precision")
    elif dtype.unknown or word in names:
        values.put("precision", lambda *_: names[word], dtype, in_fp32, shown=[dtype])
    else:
        values.miss(dtype, f"it is none of {listed(list(names), 4)}", "precision")


def _model(values: StatedValues) -> None:
    markers = [key for key in values.keys_below(_CONFIG) if key.startswith("is_")]
    marker = next(iter(markers), "")
    family = values.find((f"{_CONFIG}{marker}",), True)
    if family.unknown or (markers and marker not in _FAMILIES):
        why = "LayerNorm and rotary positions" if "starcoder" in marker else "such a model"
        values.miss(family, family.unknown or f"no shape here has {why}", f"{MODEL}family")
        return
    why = "nanotron reads such keys as those of Llama"
    values.put(f"{MODEL}family", lambda _: "llama", family, why=why)
    for key, (field, default) in _DEFAULTS.items():
        values.put(f"{MODEL}{field}", int, values.whole(default, f"{_CONFIG}{key}"))
    heads = values.whole(None, f"{_CONFIG}num_key_value_heads", f"{_CONFIG}num_kv_heads")
    all_heads = values.whole(32, f"{_CONFIG}num_attention_heads")
    values.put(f"{MODEL}num_kv_heads", int, heads if heads.value or heads.unknown else all_heads)
    tied = values.switch(f"{_CONFIG}tie_word_embeddings")
    values.put(f"{MODEL}tied_embeddings", bool, tied)
    _vocabulary(values)
    base = values.find((f"{_CONFIG}rope_theta",), 10000.0)
    if not base.unknown and not isinstance(base.value, (int, float)):
        values.refuse(f"{base.said} is not a number")
    values.put(f"{MODEL}rotary_base", float, base)
    act = values.word("silu", f"{_CONFIG}hidden_act", f"{_CONFIG}activation_function")
    if not act.unknown and act.value != "silu":
        values.miss(act, "a feed-forward of family llama has silu", f"{MODEL}family")
    window = values.whole(None, f"{_CONFIG}sliding_window_size")
    if window.said or window.unknown:
        values.put(f"{MODEL}attention_window", int, window)
    _lacks(values, is_windowed=bool(window.value))
    if any(True for _ in values.keys_below(f"{_CONFIG}moe_config.")):
        _experts(values)


def _vocabulary(values: StatedValues) -> None:
    """The vocabulary, padded as in `helpers.py`, _vocab_size_with_padding."""
    stated = values.whole(32000, f"{_CONFIG}vocab_size", least=-1)
    divisor = values.whole(1, "model.make_vocab_size_divisible_by")
    tp = values.whole(1, "parallelism.tp")
    if stated.value is not None and stated.value < 1:
        values.miss(stated, "the data set states it", f"{MODEL}vocab_size")
        return
    values.put(
        f"{MODEL}vocab_size",
        lambda size, each, ranks: -(-size // (each * ranks)) * each * ranks,
        *(stated, divisor, tp),
        shown=[stated],
    )


def _lacks(values: StatedValues, *, is_windowed: bool) -> None:
    biases = values.switch(f"{_CONFIG}attention_bias")
    bare = values.whole(None, f"{_CONFIG}no_rope_layer")
    if is_windowed and (bare.said or bare.unknown):
        # Its layers without positions also have no window, and they are every n-th one.
        values.put(f"{MODEL}full_attention_every", int, bare)
    if biases.value or biases.unknown:
        values.put(f"{MODEL}biases", lambda _: "qkv", biases)
    if bare.value and not bare.unknown:
        values.put(f"{MODEL}lacks", lambda _: "layers without rotary positions", bare)


def _experts(values: StatedValues) -> None:
    """The mixture of experts of MoEConfig."""

    def whole(key: str, default: int) -> Stated:
        return values.whole(default, f"{_CONFIG}moe_config.{key}")

    values.put(f"{MODEL}num_experts", int, whole("num_experts", 8))
    values.put(f"{MODEL}experts_per_token", int, whole("top_k", 2))
    values.put(f"{MODEL}moe_ffn_hidden_size", int, whole("moe_intermediate_size", 1408))
    shared = whole("shared_expert_intermediate_size", 5632)
    is_shared = values.switch(f"{_CONFIG}moe_config.enable_shared_expert")
    values.put(
        f"{MODEL}shared_expert_ffn_hidden_size",
        lambda size, has: size if has else 0,
        *(shared, is_shared),
        shown=[each for each in (shared, is_shared) if is_shared.value],
    )
    layers = values.find((f"{_CONFIG}moe_config.layers",), [-1])
    number = values.findings.value(f"{MODEL}num_layers")
    found = layers.value if isinstance(layers.value, list) else []
    if not all(isinstance(each, int) for each in found):
        values.refuse(f"{layers.said} is not a list of layers")
    if number is None or not found or max(found) >= number:
        why = layers.unknown or "it follows from the number of layers"
        values.miss(layers, why, f"{MODEL}num_dense_layers")
        return
    has_window = values.findings.value(f"{MODEL}attention_window") is not None
    every = values.findings.value(f"{MODEL}full_attention_every") or number + 1
    values.findings.forget(f"{MODEL}full_attention_every")  # it is said of the kinds
    kinds = [
        f"{'window' if has_window and (layer + 1) % every else 'full'}"
        f"+{'experts' if layer in found or found == [-1] else 'dense'}"
        for layer in range(number)
    ]
    for name, stated in stated_kinds(kinds).items():
        values.findings.note(f"{MODEL}{name}", stated, layers.said or "moe_config", layers.place)
    if not any("dense" in kind for kind in kinds):  # their width has no meaning
        values.findings.forget(f"{MODEL}ffn_hidden_size")


def _note_stages(values: StatedValues, pp: Stated) -> None:
    """Names stages that have not equally many layers: nanotron cuts them by matrix elements."""
    findings = values.findings
    found = findings.below(MODEL)
    if pp.unknown or pp.value == 1 or found.get("num_experts"):
        return
    try:
        model = ModelShape.from_mapping(found)
    except SearchSpaceError:
        return
    if pp.value > model.num_layers:  # the layout is refused with the numbers
        return
    stages = stage_blocks(model, pp.value)
    layers = [str(stage.count("layer")) for stage in stages]
    if len(set(layers)) > 1:
        why = "nanotron cuts stages by matrix elements; the layout has equally many layers in each"
        said = f"stages of {listed(layers, 16)} layers"
        values.findings.miss(said, why, line=pp.line)
