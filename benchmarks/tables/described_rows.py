"""Rows of measurement tables as models of latent attention, of several kinds of layers, with MTP.

The published tables name Megatron-LM's settings in columns of their own; these are read here into
the fields of a model and of a layout, and what they say is then not missing from the row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from layout_tuner.search_spaces.layouts.pipeline_layout import SPLIT, layout_text
from layout_tuner.search_spaces.layouts.recomputation import RECOMPUTE_MODULES, read_recompute
from layout_tuner.search_spaces.models.model_fields import Activation
from layout_tuner.search_spaces.models.model_shape import ModelShape

_LATENT: Final[Mapping[str, str]] = {
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_head_dim": "qk_nope_head_dim",
    "qk_rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
}
"""Columns of latent attention, each with the field of a model."""
_MAMBA: Final[Mapping[str, str]] = {
    "mamba_heads": "mamba_num_heads",
    "mamba_head_dim": "mamba_head_dim",
    "mamba_state": "mamba_state_dim",
    "mamba_groups": "mamba_num_groups",
}
_LETTERS: Final[Mapping[str, str]] = {"M": "mamba2", "E": "experts", "*": "full", "-": "dense"}
"""Megatron-LM's letters of a hybrid's layers."""
_MODULES: Final[Mapping[str, str]] = {"core_attn": "core_attention"}
_SAID: Final = {
    "mla": "kv_lora_rank",
    "hybrid": "layer_pattern",
    "mtp": "mtp_layers",
    "ungated_experts": "gated_experts",
    "squared_relu": "activation",
}
"""Words of what a row lacks, each with the column that says it after all."""
_ACTIVATIONS: Final[Mapping[str, Activation]] = {
    "gelu": "gelu",
    "swiglu": "swiglu",
    "squared_relu": "relu2",
}
"""Words of the column `activation` of Megatron-LM's own runs."""
_USUAL_HEAD: Final = 64
"""Width of a head of Mamba-2 in Megatron-LM, whose heads are twice as wide as the residual stream
together, with 8 groups of a state of 128, where a run does not say (transformer_config.py)."""
SAID_NOW: Final = "said_now"
"""A computed column: words of what a row lacked that its other columns say."""
COLUMNS: Final = (
    *(*_LATENT, *_MAMBA, "layer_pattern", "hybrid_pattern", "mtp_layers", "gated_experts"),
    *("activation", "biases", SAID_NOW),
)
"""Columns that the table format does not read."""


def described(row: Mapping[str, str]) -> dict[str, str]:
    """The row with the columns that the table format reads, and without the words of these.

    Latent attention's head width follows from its parts. A recipe of DeepSeek-V3 that states no
    pipeline has equal stages and what is left on the last, as Megatron-Bridge writes it
    (recipes/deepseek/deepseek_v3.py, `set_deepseek_v3_pipeline_model_parallel_layout`).
    """
    found = dict(row) | _stages_of_hybrid(row)
    row, lacks = found, row.get("lacks", "").split()
    lacks = [word for word in lacks if not row.get(_SAID.get(word, ""))]
    if modules := row.get("recompute_modules", "").split():
        names = [_MODULES.get(name, name) for name in modules]
        if set(names) <= set(RECOMPUTE_MODULES):
            found["recompute"] = read_recompute(names)
            lacks = [word for word in lacks if word != "recompute_modules"]
    if row.get("kv_lora_rank"):
        found |= {"head_dim": "", "qk_norm": ""}  # its norms are those of the latents
    if "offload" in lacks:
        found["offload"] = ""  # of some layers alone
    if row.get("states") == "bfloat16":
        found["optimizer_states"] = "bf16"
    if "pipeline_layout" in lacks or row.get("pipeline_layout"):
        found["pipeline_layout"] = _pipeline(row)
        lacks = [word for word in lacks if word != "pipeline_layout"]
    later = [word for word in row.get("lacks", "").split() if word not in lacks]
    return {**found, "lacks": " ".join(lacks), SAID_NOW: " ".join(later)}


def _stages_of_hybrid(row: Mapping[str, str]) -> dict[str, str]:
    """What Megatron-LM's `--hybrid-layer-pattern` says: | between stages, / before each depth."""
    if not (text := row.get("hybrid_pattern")):
        return {}
    layers, *depths = text.split("/")
    parts = layers.split("|")
    found = {"layer_pattern": "".join(parts), "mtp_layers": str(len(depths))}
    return found | ({"vpp": str(len(parts) // int(row["pp"]))} if len(parts) > 1 else {})


def _pipeline(row: Mapping[str, str]) -> str:
    """The stages without the letter of multi-token prediction, which the last stage has."""
    if text := row.get("pipeline_layout"):
        return text.replace("m", "")
    found = even_stages(int(row["num_layers"]), int(row["pp"]) * int(row["vpp"]))
    return found or SPLIT


def even_stages(layers: int, stages: int) -> str | None:
    """A pipeline of equal stages with what is left on the last; None: nothing is left for it."""
    each = -(-layers // stages)
    last = layers - each * (stages - 1)
    return layout_text([each] * (stages - 1) + [last]) if last >= 0 else None


def model_of(base: ModelShape, row: Mapping[str, str]) -> ModelShape:
    """The model that the columns of a row describe, `base` being what the format reads of it."""
    fields: dict[str, Any] = {}
    for columns in (_LATENT, _MAMBA):
        fields |= {field: int(row[name]) for name, field in columns.items() if row.get(name)}
    if row.get(SAID_NOW) and row.get("normalization"):
        fields |= {"family": "llama", "activation": _ACTIVATIONS[row["activation"]]}
        fields["norm"] = "layer" if row["normalization"] == "LayerNorm" else "rms"
        fields["biases"] = "all" if row["biases"] == "1" and not row["kv_lora_rank"] else "none"
    if pattern := row.get("layer_pattern"):
        heads = 2 * base.hidden_size // _USUAL_HEAD
        usual = zip(_MAMBA.values(), (heads, _USUAL_HEAD, 128, 8), strict=True)
        fields = dict(usual) | fields
        fields["layer_kinds"] = tuple(_LETTERS[letter] for letter in pattern)
        fields |= {"rotary_fraction": 0.0}
    if (depths := row.get("mtp_layers")) and depths != "0":
        fields["num_mtp_layers"] = int(depths)
    if row.get("gated_experts") == "0" and "activation" not in fields:
        fields["activation"] = "relu2" if pattern else "gelu"
    return replace(base, **fields) if fields else base
