"""Builds megatron-core's configuration from exports, and prints the layouts.

A file is a JSON list of arguments of Megatron-LM, or the mapping `model` of Megatron-Bridge.
Megatron-LM makes flags of the fields of the configurations (`--a-b` of `a_b`), and fills the fields
from the flags of the same names; before 0.17 megatron-core's package does not have that program.
"""

import json
import typing
import warnings
from dataclasses import fields
from pathlib import Path

import torch
from answers import asked_fields, print_answers, stand_in

# Releases for Python 3.12 are read with 3.11, and without triton.
typing.override = getattr(typing, "override", lambda method: method)
stand_in("megatron.core.transformer.moe.ops.paged_stash")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core.activations import squared_relu
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig
    from megatron.core.transformer.enums import AttnBackend

NAMES = {"norm_epsilon": "layernorm_epsilon", "num_experts": "num_moe_experts"}
"""Fields that have another name than their flag."""


def values_of(words):
    """The values of flags by their names; a flag without one is true."""
    given = {}
    for word in words:
        if word.startswith("--"):
            values = given[word[2:].replace("-", "_")] = []
        else:
            values.append(word)
    lists = {name: values for name, values in given.items() if name in LISTS or len(values) > 1}
    return {name: values[0] if values else True for name, values in given.items()} | lists


LISTS = {"cuda_graph_scope", "cuda_graph_modules"}
"""Flags that take several words."""

PROVIDED = {
    "seq_length",
    "vocab_size",
    "should_pad_vocab",
    "share_embeddings_and_output_weights",
    "position_embedding_type",
    "rotary_base",
    "rotary_percent",
    "hybrid_layer_pattern",
}
"""Fields that Megatron-Bridge's providers add to those of megatron-core."""


def bridged(model):
    known = {name: value for name, value in model.items() if name not in PROVIDED}
    name = known["activation_func"]
    relu2 = name == "squared_relu"
    known["activation_func"] = squared_relu if relu2 else getattr(torch.nn.functional, name)
    # Its mixed precision sets both.
    if known["pipeline_model_parallel_size"] > 1:
        known["pipeline_dtype"] = torch.float32
    if known.get("overlap_moe_expert_parallel_comm"):
        known["bf16"] = True
    return config_class(known)(**known)


def config_class(known):
    return MLATransformerConfig if known.get("multi_latent_attention") else TransformerConfig


def configured(words):
    values = values_of(words)
    types = {field.name for field in fields(config_class(values))}
    known = {}
    for flag, value in values.items():
        name = NAMES.get(flag, flag)
        if name in types:
            known[name] = json.loads(value) if _is_number(value) or _is_list(value) else value
    if "multi_latent_attention" in known:
        known.setdefault("q_lora_rank", None)  # the flag's default, and not the class's
    if "hybrid_layer_pattern" in values:
        known |= of_hybrid(values)
    if isinstance(known.get("recompute_modules"), str):  # nargs="*": one word is a list, too
        known["recompute_modules"] = [known["recompute_modules"]]
    if "num_virtual_stages_per_pipeline_rank" in values:
        stages = int(values["num_virtual_stages_per_pipeline_rank"])
        known["virtual_pipeline_model_parallel_size"] = stages
    if "disable_bias_linear" in values:
        known["add_bias_linear"] = False
    if "attention_backend" in known:
        known["attention_backend"] = AttnBackend[known["attention_backend"]]
    dtype = torch.bfloat16 if "bf16" in values else torch.float16 if "fp16" in values else None
    if known["pipeline_model_parallel_size"] > 1:
        known["pipeline_dtype"] = dtype or torch.float32
    parallel = {field.name for field in fields(ModelParallelConfig)}
    ModelParallelConfig(**{name: value for name, value in known.items() if name in parallel})
    return config_class(known)(**known)


def of_hybrid(values):
    """What `validate_args` makes of a pattern, which overrides the number of layers."""
    main = values["hybrid_layer_pattern"].split("/")[0]
    stages = main.count("|") + 1
    vpp = stages // int(values["pipeline_model_parallel_size"])
    vpp = {"virtual_pipeline_model_parallel_size": vpp} if vpp > 1 else {}
    return {"num_layers": len(main) - stages + 1, "is_hybrid_model": True, **vpp}


def _is_list(value):
    return isinstance(value, str) and value.startswith("[")


def _is_number(value):
    return isinstance(value, str) and value.replace(".", "").replace("e-", "").isdigit()


def layout_of(path, _num_devices):
    said = json.loads(Path(path).read_text())
    config = configured(said) if isinstance(said, list) else bridged(said)
    return {**described(config), **asked_fields(path, config)}


def described(config):
    return {
        "tp": config.tensor_model_parallel_size,
        "pp": config.pipeline_model_parallel_size,
        "ep": config.expert_model_parallel_size,
        "etp": config.expert_tensor_parallel_size,
        "vpp": config.virtual_pipeline_model_parallel_size or 1,
        "sequence_parallel": config.sequence_parallel,
        "recompute": config.recompute_granularity or "none",
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.ffn_hidden_size,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_query_groups,
        "num_experts": config.num_moe_experts or 0,
        "pre_softmax": config.moe_router_pre_softmax,
        "norm_epsilon": config.layernorm_epsilon,
        "init_std": config.init_method_std,
        "dropout": [config.attention_dropout, config.hidden_dropout],
        "attention_backend": config.attention_backend.name,
    }


if __name__ == "__main__":
    print_answers(layout_of, ValueError, AssertionError, TypeError)
