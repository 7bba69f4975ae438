"""Jobs of Megatron-Bridge: overrides of a recipe, and configurations that it has saved.

The settings are read as the arguments of Megatron-LM of the same meaning. A file of overrides
leaves to the recipe, which is Python, whatever it does not state. Of these fields those are assumed
that recipes alike have, or that the recipe's name says; others are open. A saved `run_config.yaml`
states everything.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from layout_tuner.search_spaces.layouts.layout import RANK_ORDERS, Layout
from layout_tuner.search_spaces.models.foreign_words import words_of
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.trainers.adapter import TrainerJob
from layout_tuner.trainers.found_jobs.completed_job import ONLY_WITH
from layout_tuner.trainers.found_jobs.found_job import (
    JOB,
    MODEL,
    Findings,
    FoundJob,
    JobFileInvalidError,
    Stated,
)
from layout_tuner.trainers.found_jobs.job_file import JobFile
from layout_tuner.trainers.found_jobs.known_models import known_model
from layout_tuner.trainers.found_jobs.megatron.megatron_flags import matters
from layout_tuner.trainers.found_jobs.megatron.megatron_jobs import read_options
from layout_tuner.trainers.found_jobs.megatron.megatron_model import OPTION_FLAGS
from layout_tuner.trainers.found_jobs.megatron.megatron_options import options_of_values, stated_of
from layout_tuner.trainers.found_jobs.own_scripts.named_values import ADAM, NOT_ADAM
from layout_tuner.trainers.found_jobs.positioned import YAML_SUFFIXES, root_of
from layout_tuner.trainers.found_jobs.positioned_node import Positioned
from layout_tuner.trainers.found_jobs.recipes.core_arguments import (
    MOMENTS,
    completed_lists,
    is_preset,
    is_set,
    lever_arguments,
    presets,
)
from layout_tuner.trainers.megatron_bridge import (
    LAYOUT_KEYS,
    MEGATRON_BRIDGE,
    MIXED_PRECISION,
    RECIPE,
    SIZE_KEYS,
)

FORMAT: Final = "megatron-bridge"
SECTIONS: Final = ("model", "train", "ddp", "dist")
"""Sections whose settings have other names than those of other sections."""
OTHER_SECTIONS: Final = (
    *("optimizer", "scheduler", "dataset", "tokenizer", "checkpoint", "logger", "rng", "profiling"),
    *("mixed_precision", "comm_overlap", "validation", "peft", "env_vars", "nvrx_straggler", "ft"),
    *("recipe", "run", "data"),  # of programs that name the recipe in the file
    *("rerun_state_machine", "straggler", "inprocess_restart", "tensor_inspect", "inference", "rl"),
)
_MARKS: Final = re.compile(
    r"model\.(\w+_parallel_size|sequence_parallel|recompute_\w+|seq_length|num_layers)"
    r"|train\.(micro|global)_batch_size|ddp\.use_\w+|ddp\.overlap_\w+"
)
"""Settings of which a file of overrides has one at least."""

_PROVIDER: Final[Mapping[str, Any]] = {
    "add_bias_linear": True,
    "gated_linear_unit": False,
    "should_pad_vocab": False,
    "share_embeddings_and_output_weights": True,
    "normalization": "LayerNorm",
    "position_embedding_type": "learned_absolute",
    "q_lora_rank": 512,
    "kv_lora_rank": 512,
    "micro_batch_size": 2,
    "global_batch_size": 32,
}
"""Where `GPTModelProvider` and `vanilla_gpt_pretrain_config` at 067f987d have another value than
Megatron-LM, or Megatron-LM has none."""
_WHOLE_MODEL: Final = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "vocab_size"),
    *("normalization", "gated_linear_unit", "position_embedding_type"),
)
_RENAMED: Final[Mapping[str, str]] = {
    LAYOUT_KEYS["vpp"]: "num_virtual_stages_per_pipeline_rank",
    "num_moe_experts": "num_experts",
    "gated_linear_unit": "swiglu",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "bucket_size": "ddp_bucket_size",
    "heterogeneous_block_specs": "heterogeneous_layers_config_path",
}
"""Arguments of another name than the setting."""
_NEGATED: Final[Mapping[str, str]] = {
    "share_embeddings_and_output_weights": "untie_embeddings_and_output_weights",
    "add_bias_linear": "disable_bias_linear",
    "should_pad_vocab": "no_pad_vocab_size",
}
"""Arguments of the opposite value."""
_SAME: Final = frozenset(
    (
        *(*LAYOUT_KEYS.values(), *SIZE_KEYS.values()),
        *words_of(
            """
            recompute_granularity recompute_method recompute_num_layers recompute_modules
            cp_comm_type use_tp_pp_dp_mapping pipeline_model_parallel_layout
            account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
            use_distributed_optimizer use_megatron_fsdp data_parallel_sharding_strategy
            use_torch_fsdp2 outer_dp_sharding_strategy make_vocab_size_divisible_by kv_channels
            qk_layernorm rotary_base normalization position_embedding_type attention_dropout
            hidden_dropout attention_backend transformer_impl window_size window_attn_skip_freq
            add_qkv_bias multi_latent_attention mtp_use_repeated_layer rotary_percent
            experimental_attention_variant linear_attention_freq is_hybrid_model
            hybrid_override_pattern hybrid_layer_pattern quick_geglu
            moe_router_topk moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_layer_freq
            moe_expert_capacity_factor rampup_batch_size distribute_saved_activations
            """
        ),
        *(each.removeprefix("--").replace("-", "_") for each in OPTION_FLAGS),
        *(
            path.partition(".")[2]
            for knob in MEGATRON_BRIDGE.knobs
            for writing in knob.writings
            for path in dict(writing.keys)
            if not re.search(r"te_rng|check_for_nan|bucket_size", path)
        ),
    )
)
"""Arguments of the same name and value."""
_WIDE: Final = ("fp32", "float32", "torch.float32")
_SUBORDINATE: Final = re.compile(
    r"num_layers_at_\w+|\w+_fraction|cpu_offloading_\w+|gtp_\w+|mlp_chunks_\w+|microbatch_group_\w+"
)
"""Settings that have values where the setting that they belong to is off, too."""
_MOVED: Final[Mapping[str, str]] = {
    "comm_overlap.tp_comm_overlap": "model.tp_comm_overlap",
    "comm_overlap.overlap_moe_expert_parallel_comm": "model.overlap_moe_expert_parallel_comm",
    "comm_overlap.delay_wgrad_compute": "model.delay_wgrad_compute",
    "comm_overlap.overlap_grad_reduce": "ddp.overlap_grad_reduce",
    "comm_overlap.overlap_param_gather": "ddp.overlap_param_gather",
    "comm_overlap.bucket_size": "ddp.bucket_size",
    "model.cuda_graph_scope": "model.cuda_graph_modules",
    "dataset.sequence_length": "dataset.seq_length",
    "data.sequence_length": "dataset.seq_length",
    "recipe.peft": "peft.name",
}
"""Settings by another path that they are copied to when a job starts (`training/comm_overlap.py`),
or were renamed to."""

_NAMED: Final = re.compile(
    r"(?P<model>[a-z0-9_]+?)_(?P<task>pretrain|sft|peft|finetune|lora|dora)"
    r"(_(?P<devices>[1-9]\d*)gpu_(?P<chip>[a-z0-9]+)_(?P<precision>[a-z0-9]+?))?"
    r"(?P<rest>_\w+?)?(_config)?"
)
"""The name of a recipe (`scripts/training/recipe_metadata.py`)."""
DEVICES_PER_NODE: Final[Mapping[str, int]] = {
    **dict.fromkeys(("h100", "b200", "b300"), 8),
    **dict.fromkeys(("gb200", "gb300", "vr200"), 4),
}
"""Devices of a node by chip (`scripts/performance/argument_parser.py`)."""
_OF_LAYOUTS: Final = re.compile(
    r"seq_length|\w+_parallel(_size)?|recompute_\w+|moe_(token|grouped|router_[dl])\w+"
    r"|(pipeline|num_layers_in)_\w+"
)
"""Settings of `model` that are no part of a model's shape."""
_ABSENT: Final = "only the recipe says it"
_ADAPTERS: Final = "adapters train few of the weights"
_DECIDING: Final[Mapping[str, tuple[str, ...]]] = {
    **{name: (LAYOUT_KEYS[name],) for name in ("tp", "pp", "cp", "ep", "etp")},
    **{name: (name,) for name in ("micro_batch_size", "global_batch_size", "sequence_parallel")},
    "vpp": (_RENAMED[LAYOUT_KEYS["vpp"]],),
    "pipeline_split": (
        *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
        *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
        "pipeline_model_parallel_layout",
    ),
    "zero_stage": ("use_distributed_optimizer", "use_megatron_fsdp"),
    "zero_replicas": (LAYOUT_KEYS["zero_replicas"],),
    "recompute": ("recompute_granularity",),
    "precision": ("bf16",),
    "cp_comm_type": ("cp_comm_type",),
    "rank_order": ("use_tp_pp_dp_mapping",),
    "model.seq_length": ("seq_length",),
}
"""Fields of a job, each with the arguments without which only the recipe says it."""
_DEFAULTS: Final[Mapping[str, Any]] = {
    "vpp": 1,
    "pipeline_split": "layers",
    "zero_replicas": 1,
    "rank_order": RANK_ORDERS[0],
}
"""What a field is where its arguments are null or false, beside what `megatron` assumes."""


def read_config(file: JobFile) -> Sequence[FoundJob] | None:
    """The job of a YAML of overrides or of a saved configuration; None: another format.

    Raises:
        JobFileInvalidError: it is NeMo's, or malformed.
    """
    root = root_of(file, *YAML_SUFFIXES)
    if root is None:
        return None
    if any("nemo." in _class_of(each) for each in (root, *(root.entries or {}).values())):
        raise JobFileInvalidError(
            f"{file.name} is a configuration of NeMo 2, which is not read; give the run_config.yaml "
            "that Megatron-Bridge saves, or state the job in a campaign file"
        )
    if {"trainer", "exp_manager", "model"} <= set(root.keys()):
        raise JobFileInvalidError(
            f"{file.name} is a configuration of NeMo 1, which is not read; state the job in a "
            "campaign file"
        )
    sections, stated = set(root.keys()) - {"_target_", "defaults"}, settings_of(root)
    recipe = _class_of(root.get("recipe")).rpartition(".")[2]
    is_named = _NAMED.fullmatch(recipe) is not None
    if not sections <= {*SECTIONS, *OTHER_SECTIONS} or not (
        is_named or any(map(_MARKS.fullmatch, stated))
    ):
        return None
    is_whole = "megatron.bridge" in _class_of(root.get("model"))
    return [bridge_job(file, stated, is_whole=is_whole, recipe=recipe)]


def _class_of(node: Positioned | None) -> str:
    """The class or function that a section is an object of; empty: it is plain."""
    target = node.get("_target_") if node is not None else None
    return str(target.value) if target is not None else ""


def settings_of(root: Positioned) -> dict[str, Stated]:
    """The settings by path; enumerations, types and functions are texts."""
    return dict(_leaves(root))


def _leaves(node: Positioned) -> Iterator[tuple[str, Stated]]:
    for name, each in (node.entries or {}).items():
        if name.startswith("_") and name != "_target_":
            continue
        if each.entries and (word := _object_word(each)):
            yield each.path, Stated(value=word, said=f"{each.path}: {word}", line=each.line)
        elif each.entries:
            yield from _leaves(each)
        else:
            yield each.path, stated_of(each)


def _object_word(node: Positioned) -> str:
    """What a member of an enumeration, a type or a function is called; empty: it is another."""
    target = _class_of(node)
    name, arguments, is_called = (node.get(key) for key in ("_name_", "_args_", "_call_"))
    if name is not None:
        return str(name.value)
    if target.endswith("getattr") and arguments is not None and arguments.items:
        return str(arguments.items[-1].value)
    is_plain = is_called is not None and is_called.value is False
    return target.rpartition(".")[2] if target and is_plain else ""


def bridge_job(
    file: JobFile, stated: Mapping[str, Stated], *, is_whole: bool = False, recipe: str = ""
) -> FoundJob:
    """The job of settings by path.

    Args:
        file: where they stand.
        stated: by path.
        is_whole: whether a class's own default holds where nothing is stated.
        recipe: the recipe's name; empty: it is not known.
    """
    is_saved, stated = is_whole, _in_effect(stated)
    named = None if recipe == RECIPE else _NAMED.fullmatch(recipe)
    shape = known_model(named["model"]) if named else None
    # Who states all of this overrides a recipe that has no model of its own.
    is_whole = (
        is_whole or recipe == RECIPE or {f"model.{each}" for each in _WHOLE_MODEL} <= {*stated}
    )
    if is_whole:
        begin = presets(_PROVIDER, "Megatron-Bridge's GPTModelProvider")
    else:
        begin = _of_recipe(named, stated, shape)
    core = {
        path.partition(".")[2]: each
        for path, each in stated.items()
        if path.partition(".")[0] in SECTIONS and path.count(".") == 1
    }
    arguments = {
        **_arguments({**begin, **core}),
        **lever_arguments(stated),
        **_precision(stated, named, is_whole=is_whole),
        **_lengths(stated),
        **_vocabulary(stated, named, is_whole=is_whole),
    }
    findings = read_options(options_of_values(arguments), "megatron-lm", file=file)
    if not is_whole:
        _leave_to_recipe(findings, arguments, shape)
        why = "its kernels, dispatcher and graphs are not in the file"
        findings.miss(f"the recipe {recipe}".strip(), why)
    if named and named["task"] in ("peft", "lora", "dora"):
        findings.miss(f"the recipe {recipe}", _ADAPTERS, name=f"{MODEL}lacks")
    if named and shape is not None and not is_whole:
        findings.assume(f"{MODEL}name", shape.name, _source(named))
        if shape.lacks:
            findings.assume(f"{MODEL}lacks", shape.lacks, _source(named))
    _list_others(findings, stated, is_saved=is_saved)
    if named and named["devices"]:
        findings.assume("num_devices", int(named["devices"]), "the name of the recipe")
        if per_node := DEVICES_PER_NODE.get(named["chip"]):
            findings.assume("devices_per_node", per_node, "the name of the recipe")
    for ours, path in (
        ("num_nodes", "run.env.nodes"),
        ("devices_per_node", "run.env.gpus_per_node"),
    ):
        if (each := stated.get(path)) is not None and isinstance(each.value, int):
            findings.note(ours, each.value, each.said, each.place)
    about = {"trainer": MEGATRON_BRIDGE.name, "model_name": named["model"] if named else ""}
    return completed_lists(findings.job(file=file.name, format=FORMAT, **about), arguments)


def _in_effect(stated: Mapping[str, Stated]) -> dict[str, Stated]:
    """The settings at the paths where they have an effect, without those that have none."""
    found = dict(stated)
    for path, target in _MOVED.items():
        if (each := found.pop(path, None)) is not None and each.value is not None:
            found.setdefault(target, each)
    for name in ("use_megatron_fsdp", "use_distributed_optimizer"):
        # Either section turns it on in the other (`training/config.py`, ConfigContainer.validate).
        paths = [f"{section}.{name}" for section in ("ddp", "dist", "optimizer")]
        given = [found.pop(path) for path in paths if path in found]
        if given:
            found[paths[0]] = next((each for each in given if each.value), given[0])
    without = (
        ("model.moe_token_dispatcher_type", "flex", "model.moe_flex_dispatcher_backend"),
        ("model.cross_entropy_loss_fusion", True, "model.cross_entropy_fusion_impl"),
    )
    for path, value, other in without:
        if path in found and found[path].value != value:
            found.pop(other, None)
    return found


def _source(named: re.Match[str]) -> str:
    return f"Megatron-Bridge's model of {named['model']}, as published"


def _of_recipe(
    named: re.Match[str] | None, stated: Mapping[str, Stated], shape: ModelShape | None
) -> dict[str, Stated]:
    """What recipes alike have, and those of this name."""
    # Recipes of Blackwell alone have Megatron-FSDP and HSDP, and not all say so in their names.
    is_plain = named is None or named["chip"] in (None, "h100")
    alike: dict[str, Any] = {"use_tp_pp_dp_mapping": False, "use_torch_fsdp2": False}
    if is_plain:
        alike[LAYOUT_KEYS["zero_replicas"]] = 1
    if is_plain and "ddp.use_distributed_optimizer" in stated:
        alike["use_megatron_fsdp"] = False
    elif is_plain and named is not None and named["task"] in ("pretrain", "sft"):
        alike |= {"use_distributed_optimizer": True, "use_megatron_fsdp": False}
    found = presets(alike, "Megatron-Bridge's recipes alike")
    if named is None or shape is None:
        return found
    # As the adapter writes it, but for what belongs to the layout and to job knobs.
    written = MEGATRON_BRIDGE.layout_values(TrainerJob(model=shape, layout=Layout()))["model"]
    model = {name: each for name, each in written.items() if not _OF_LAYOUTS.fullmatch(name)}
    return found | presets({**model, "cp_comm_type": "p2p"}, _source(named))


def _arguments(core: Mapping[str, Stated]) -> dict[str, Stated]:
    """The arguments of Megatron-LM that settings stand for."""
    found: dict[str, Stated] = {}
    for name, each in core.items():
        is_lever = each.value and matters("--" + name.replace("_", "-"))
        if name == "cpu_offloading" and is_set(core, "cpu_offloading_num_layers"):
            continue  # `lever_arguments` has the number
        if name in _NEGATED:
            found[_NEGATED[name]] = replace(each, value=not each.value)
        elif name in _RENAMED or name in _SAME or (is_lever and not _SUBORDINATE.fullmatch(name)):
            found[_RENAMED.get(name, name)] = _argument(name, each)
    if (function := core.get("activation_func")) is not None:
        is_gate = is_set(core, "gated_linear_unit") and function.value in ("gelu", "quick_gelu")
        name = "quick_geglu" if is_gate else "squared_relu"
        found[name] = replace(function, value=is_gate or function.value == name, place=None)
    if is_set(found, "num_query_groups"):
        found["group_query_attention"] = replace(found["num_query_groups"], value=True, place=None)
    if "num_layers" in found and not is_set(found, "num_experts"):
        found = {name: each for name, each in found.items() if not name.startswith("moe_")}
    return found


def _argument(name: str, stated: Stated) -> Stated:
    """A value as the command line has it: lists of numbers are one text."""
    value = stated.value
    if name == "pipeline_model_parallel_layout" and isinstance(value, (list, dict)):
        return replace(stated, value=None, unknown="a pipeline layout of its own")
    if isinstance(value, list) and (name == "window_size" or name.endswith("_freq")):
        text = ",".join(map(str, value))
        return replace(stated, value=text if name == "window_size" else f"[{text}]")
    return stated


def _lengths(stated: Mapping[str, Stated]) -> dict[str, Stated]:
    """The length of sequences, of the model and of the dataset."""
    paths = ("model.seq_length", "dataset.seq_length")
    found = [stated[path] for path in paths if path in stated]
    if not found:
        return {}
    if any(each.value != found[0].value for each in found):
        said = "; ".join(each.said for each in found)
        return {"seq_length": Stated(value=None, said=said, unknown="the two must agree")}
    return {"seq_length": found[0]}


def _vocabulary(
    stated: Mapping[str, Stated], named: re.Match[str] | None, *, is_whole: bool
) -> dict[str, Stated]:
    """The vocabulary where it is the tokenizer's; empty: it is that of the model.

    So it is in the library's recipes of pretraining (`recipes/common.py`), but not in those for
    measuring performance, whose names are alike; those of Blackwell's chips belong to these.
    """
    follows = stated.get("tokenizer.use_tokenizer_vocab_size")
    may_follow = named is not None and named["task"] == "pretrain"
    is_library = named is not None and named["chip"] in (None, "h100")
    # perf_recipes/gpt_oss/common.py has another vocabulary than the published one.
    is_other = named is not None and named["model"].startswith("gpt_oss")
    is_open = follows is None and may_follow and (is_library or is_other)
    if not is_set(stated, "tokenizer.use_tokenizer_vocab_size") and (is_whole or not is_open):
        return {}
    size = stated.get("tokenizer.vocab_size")
    if size is not None and isinstance(size.value, int):
        return {"vocab_size": size, "no_pad_vocab_size": replace(size, value=False)}
    said = follows.said if follows is not None else "vocab_size"
    return {} if is_whole else {"vocab_size": Stated(value=None, said=said, unknown=_TOKENIZER)}


_TOKENIZER: Final = "the recipe's tokenizer may decide it"
_FP8_RECIPES: Final = {
    "bf16_with_fp8_current_scaling_mixed": "tensorwise",
    "bf16_with_fp8_delayed_scaling_mixed": "delayed",
    "bf16_with_fp8_subchannel_scaling_mixed": "blockwise",
    "bf16_with_mxfp8_mixed": "mxfp8",
}
"""Names of `training/mixed_precision.py`."""
_FP8_ENDINGS: Final = {
    "fp8": "tensorwise",
    "fp8cs": "tensorwise",
    "fp8ds": "delayed",
    "fp8sc": "blockwise",
    "fp8mx": "mxfp8",
}
"""Those in the names of recipes."""


def _precision(
    stated: Mapping[str, Stated], named: re.Match[str] | None, *, is_whole: bool
) -> dict[str, Stated]:
    """The arguments of precision; empty: only the recipe says it."""
    if (found := stated.get("mixed_precision")) is not None:
        flags = _flags_of(found.value)
        if found.unknown or flags is None:
            why = found.unknown or "a precision that is not known here"
            return {"bf16": replace(found, value=None, unknown=why)}
        return {name: replace(found, value=value) for name, value in flags.items()}
    by_name = _precision_by_name(named)
    names = ("bf16", "fp16", "fp8", "fp8_recipe", "fp4")
    for section in ("mixed_precision", "model"):
        paths = {name: f"{section}.{name}" for name in names}
        flags = {name: stated[path] for name, path in paths.items() if path in stated}
        if flags and (is_whole or by_name or any(is_set(flags, each) for each in flags)):
            # A recipe with fp8 has bf16 beside it.
            return {"bf16": Stated(value=False, said=f"{section}.bf16: false"), **by_name, **flags}
    return by_name


def _precision_by_name(named: re.Match[str] | None) -> dict[str, Stated]:
    """What the name of a recipe says; empty: nothing."""
    if named is None or re.search(r"low_precision|mx|nv|fp", named["rest"] or ""):
        return {}
    kind = named["precision"] or "bf16"
    flags: dict[str, Any] = {"bf16": kind != "fp16", "fp16": kind == "fp16"}
    if kind in _FP8_ENDINGS:
        flags |= {"fp8": "hybrid", "fp8_recipe": _FP8_ENDINGS[kind]}
    elif kind not in ("bf16", "fp16"):
        flags["fp4"] = "e2m1" if kind == "nvfp4" else kind
    return presets(flags, "Megatron-Bridge's name of the recipe")


def _flags_of(name: Any) -> dict[str, Any] | None:
    """The flags of a name of a precision; None: it is not known."""
    if name is not None and not isinstance(name, str):
        return None
    if name in _FP8_RECIPES:
        return {"bf16": True, "fp8": "hybrid", "fp8_recipe": _FP8_RECIPES[name]}
    if name == MIXED_PRECISION["nvfp4"]:
        return {"bf16": True, "fp4": "e2m1"}
    known = {each: ours for ours, each in MIXED_PRECISION.items()}
    if name not in known:
        return None
    return {"bf16": known[name] == "bf16", "fp16": known[name] == "fp16"}


def _leave_to_recipe(
    findings: Findings, arguments: Mapping[str, Stated], shape: ModelShape | None
) -> None:
    """Leaves open what neither a file nor the name of the recipe says."""
    for name in [*findings.assumed]:
        if name.startswith((JOB, "num_microbatches")) or (name.startswith(MODEL) and shape is None):
            del findings.assumed[name]
    findings.not_understood = [
        each for each in findings.not_understood if "needs it" not in each.why
    ]
    if shape is None:
        for ours in ("ep", "etp"):  # the model may have experts
            if (each := arguments.get(LAYOUT_KEYS[ours])) and isinstance(each.value, int):
                findings.note(ours, each.value, each.said, each.place)
    if findings.value("recompute") == "selective" and "recompute_modules" not in arguments:
        said = arguments["recompute_granularity"].said
        findings.miss(said, f"{_ABSENT}, which modules", name="recompute")
    is_dense = shape is not None and not shape.num_experts
    for ours, names in _DECIDING.items():
        # What is assumed of a field without effect in this layout stays.
        is_moot = ours in ONLY_WITH and findings.value(ONLY_WITH[ours]) == 1
        is_moot = is_moot or (is_dense and ours in ("ep", "etp"))
        if not findings.is_open(ours) and not is_moot:
            _decide(findings, ours, [arguments[each] for each in names if each in arguments])


def _decide(findings: Findings, ours: str, given: Sequence[Stated]) -> None:
    """Notes, assumes or opens a field whose arguments are null, false or not there."""
    value = findings.value(ours)
    if value is None:
        value = _DEFAULTS.get(ours)
    if value is None and ours == "cp_comm_type" and given:
        value = given[0].value  # it is not read where cp is 1
    if unknown := next((each for each in given if each.unknown), None):
        findings.miss(unknown.said, unknown.unknown, name=ours, line=unknown.line)
    elif ours in findings.read:
        pass
    elif len(given) < len(_DECIDING[ours]):
        findings.miss(given[0].said if given else ours, _ABSENT, name=ours)
    elif not all(map(is_preset, given)):
        said = "; ".join(each.said for each in given if not is_preset(each))
        findings.note(ours, value, said)
    else:
        findings.assume(ours, value, given[0].said)


_SILENT: Final = re.compile(
    r"model\.(_target_|\w*(fusion|dtype|init|zero_centered|epsilon|rope|rotary|yarn|mscale|loss|balancing|score|"
    r"bias|coeff|activation|hf_|spec|accumul|deallocate|masked|persist|fp32|cuda_graph|impl|apply|"
    r"backend|router|grouped|tokenizer|dispatcher|overlap|scatter|parallel_output|memory)\w*)"
    r"|ddp\.\w*(nan|fp32|average|check|pad|overlap|bucket|cache|align)\w*"
    r"|dist\.\w*(timeout|backend|local|gloo|lazy|init|sharp|nccl)\w*"
    r"|train\.\w*(iters|interval|eval|gc|exit|step|log|samples|sync)\w*"
)
"""Settings of the four sections that change neither layout nor shape."""


def _list_others(findings: Findings, stated: Mapping[str, Stated], *, is_saved: bool) -> None:
    """Lists settings that may change time or memory, and have no counterpart here.

    A saved configuration states hundreds, most at their defaults: of these only the known ones.
    """
    known = {
        *_SAME,
        *_RENAMED,
        *_NEGATED,
        "cpu_offloading",
        "cpu_offloading_num_layers",
        "bf16",
        "fp16",
        "fp8",
        "fp8_recipe",
        "fp4",
    }
    optimizer = stated.get("optimizer.optimizer")
    if optimizer is not None and not ADAM.fullmatch(str(optimizer.value)):
        findings.miss(optimizer.said, optimizer.unknown or NOT_ADAM, line=optimizer.line)
    parts = dict[str, Stated]()
    for path, each in stated.items():
        name = path.partition(".")[2]
        is_off = not each.value and matters("--" + name.replace("_", "-"))
        if path.startswith("optimizer.") and name in MOMENTS:
            if each.value and each.value not in _WIDE and not findings.value("optimizer_states"):
                findings.miss(each.said, "optimizer states here are fp32 or bf16", line=each.line)
        elif is_saved or path.partition(".")[0] not in SECTIONS or name in known or is_off:
            continue
        elif "." in name:  # a section of its own, as of another model
            parts.setdefault(name.partition(".")[0], each)
        elif not _SILENT.fullmatch(path):
            findings.miss(each.said, "it is not known here", line=each.line)
    for name, each in parts.items():
        findings.miss(f"model.{name}: {each.said}", "it is not known here", line=each.line)
    peft = [each for path, each in stated.items() if path.partition(".")[0] == "peft"]
    if any(each.value for each in peft):
        findings.miss(peft[0].said, _ADAPTERS, name=f"{MODEL}lacks", line=peft[0].line)
