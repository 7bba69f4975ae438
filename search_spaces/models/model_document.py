"""Reads the document of a model: its fields by name, with defaults that follow from others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING
from typing import Any

from layout_tuner.documents.not_covered import known_word
from layout_tuner.documents.reading import Problems, read_mapping, unknown_names
from layout_tuner.errors import ModelShapeInvalidError
from layout_tuner.search_spaces.models.foreign_model import read_foreign
from layout_tuner.search_spaces.models.layer_kinds import read_layer_kinds, sublayers_of
from layout_tuner.search_spaces.models.model_fields import DEFAULTS, NAMES, wrong_fields


def read_model_fields(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a model by name, of its document; see `ModelShape.from_mapping`."""
    given = read_mapping(mapping, ModelShapeInvalidError, "the model")
    foreign = read_foreign(given, NAMES)
    values = dict(foreign.fields)  # what they state is not missing
    values |= {name: value for name, value in given.items() if name in NAMES}
    values.setdefault("name", "custom")
    values.setdefault("num_kv_heads", values.get("num_heads"))
    values.setdefault("tied_embeddings", values.get("family") == "gpt")
    if values.get("num_experts") and "ffn_hidden_size" in values:
        values.setdefault("moe_ffn_hidden_size", values["ffn_hidden_size"])
    elif values.get("num_experts") and not _has_dense_layers(values):
        values["ffn_hidden_size"] = values.get("moe_ffn_hidden_size")
    optional = {name: value for name, value in DEFAULTS.items() if value is not MISSING}
    values = optional | values
    if values.get("family") == "gpt" and isinstance(values.get("hidden_size"), int):
        values.setdefault("ffn_hidden_size", 4 * values["hidden_size"])
    problems = Problems()
    missing = [
        name
        for name in NAMES
        if values.get(name) is None
        and optional.get(name, "") is not None
        and (name != "num_kv_heads" or name in given)
    ]
    if foreign.is_whole_model:
        problems.add(ModelShapeInvalidError(foreign.sentence(missing, given)))
    else:
        problems.add(
            *unknown_names(
                given,
                NAMES,
                ModelShapeInvalidError,
                "model field",
                known_as=lambda name: foreign.hint(name) or known_word(name),
            )
        )
        for name in missing:
            said = f"the model's {name} is missing"
            problems.add(ModelShapeInvalidError.of_field(name, said))
    stated = {name: value for name, value in values.items() if given.get(name) is not None}
    problems.add(*wrong_fields(stated))
    if given.get("layer_kinds") == []:  # as documents with all fields write it
        values["layer_kinds"] = ()
    elif isinstance(kinds := read_layer_kinds(given.get("layer_kinds")), tuple):
        values["layer_kinds"] = kinds
        if not any(sublayers_of(kind)[1] for kind in kinds):
            said = f"no layer of layer_kinds has a feed-forward: write for example {kinds[0]}+dense"
            problems.add(ModelShapeInvalidError.of_field("layer_kinds", said))
    problems.refuse()
    return values


def _has_dense_layers(values: Mapping[str, Any]) -> bool:
    kinds = read_layer_kinds(values.get("layer_kinds"))
    stated = isinstance(kinds, tuple) and any(sublayers_of(kind)[1] == "dense" for kind in kinds)
    return bool(stated or values.get("num_dense_layers") or values.get("experts_every"))
