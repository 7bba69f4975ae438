"""The fields of a model that say how its attention is computed, and what is dropped."""

from __future__ import annotations

import re
from typing import Any

import pytest

from layout_tuner.errors import ModelShapeInvalidError
from layout_tuner.search_spaces.models.model_fields import ATTENTION_FIELDS
from layout_tuner.search_spaces.models.model_presets import model_preset, resolve_model
from layout_tuner.search_spaces.models.model_shape import ModelShape

STATED = {"attention": "unfused", "attention_dropout": 0.1, "hidden_dropout": 0.25}


@pytest.mark.parametrize("preset", ["tiny", "tiny-llama", "tiny-moe"])
def test_documents_have_the_fields_that_are_stated(preset: str) -> None:
    model = resolve_model({"preset": preset, **STATED})
    document = model.to_mapping()
    assert {name: document[name] for name in ATTENTION_FIELDS} == STATED
    assert ModelShape.from_mapping(document) == model
    assert model.num_parameters == model_preset(preset).num_parameters
    assert model.title == (
        f"{preset}-custom (attention=unfused, attention_dropout=0.1, hidden_dropout=0.25)"
    )


def test_fields_at_their_defaults_are_left_out_of_documents() -> None:
    said = {"attention": None, "attention_dropout": None, "hidden_dropout": 0.0}
    model = resolve_model({"preset": "tiny", **said, "name": "tiny"})
    assert model == model_preset("tiny")
    assert tuple(said) == ATTENTION_FIELDS
    assert not set(said) & model.to_mapping().keys()
    assert model.title == "tiny"
    none = resolve_model({"preset": "tiny", "attention_dropout": 0})
    assert none.to_mapping()["attention_dropout"] == 0, "not the trainer's default"
    assert ModelShape.from_mapping(none.to_mapping()) == none


@pytest.mark.parametrize("family", ["tiny", "tiny-llama"])
@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("attention", "flash", "attention='flash' is not one of fused, unfused"),
        ("attention", True, "attention=True is not one of fused, unfused"),
        ("attention_dropout", 1, "attention_dropout=1 is not a number from 1e-06 to 0.999"),
        ("attention_dropout", True, "attention_dropout=True is not a number from"),
        ("hidden_dropout", -0.1, "hidden_dropout=-0.1 is not a number from"),
        ("hidden_dropout", "0.1", "hidden_dropout='0.1' is not a number from"),
    ],
)
def test_a_wrong_value_is_one_error(family: str, field: str, value: Any, says: str) -> None:
    with pytest.raises(ModelShapeInvalidError, match=re.escape(says)) as caught:
        resolve_model({"preset": family, field: value})
    assert len(caught.value.parts) == 1


UNFUSED = "(here it is attention=unfused)"
FUSED = "(here it is attention=fused)"


@pytest.mark.parametrize(
    ("word", "value", "says"),
    [
        ("attn_pdrop", 0.1, "(here it is called 'attention_dropout')"),
        ("resid_pdrop", 0.1, "(here it is called 'hidden_dropout')"),
        ("dropout", 0.1, "(here it is hidden_dropout=0.1)"),
        ("embd_pdrop", 0.1, "(it has no effect on layouts: leave it out)"),
        ("resid_pdrop", 0.0, "(it has no effect on layouts: leave it out)"),
        ("attn_implementation", "eager", UNFUSED),
        ("_attn_implementation", "flash_attention_2", FUSED),
        ("--attention-backend", "unfused", UNFUSED),
        ("attention_backend", "auto", "(it has no effect on layouts: leave it out)"),
        ("attn_implementation", "flex_attention", FUSED),
        ("transformer_impl", "local", UNFUSED),
        ("transformer_impl", "transformer_engine", "(it has no effect on layouts: leave it out)"),
        ("use_flash_attn", True, FUSED),
        ("use_flash_attn", False, UNFUSED),
    ],
)
def test_a_word_of_other_software_is_answered_with_ours(word: str, value: Any, says: str) -> None:
    with pytest.raises(ModelShapeInvalidError, match=re.escape(says)):
        resolve_model({"preset": "tiny", word: value})


def test_all_words_of_a_document_are_answered_in_one_sentence() -> None:
    document = {"transformer_impl": "local", "attention_backend": "auto", "attn_pdrop": 0.1}
    with pytest.raises(ModelShapeInvalidError) as caught:
        resolve_model({"preset": "tiny", **document})
    (said,) = caught.value.parts
    assert "write attention=unfused for " in str(said)
    assert "attention_dropout=0.1 for 'attn_pdrop'" in str(said)
