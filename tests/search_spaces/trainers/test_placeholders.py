"""Placeholders: every number of a job has a name, which means the same in exports and probes."""

from dataclasses import fields, replace

import pytest

from search_spaces.spec.layout import Layout
from search_spaces.spec.model_shape import ModelShape
from search_spaces.spec.presets.models import model_preset
from search_spaces.trainers.base import TrainerJob
from search_spaces.trainers.placeholders import (
    PLACEHOLDERS,
    PlaceholderUnknownError,
    environment_values,
    filled,
    placeholder_values,
)
from tests.kit.layouts import EVERY_KNOB

JOB = TrainerJob(
    model=ModelShape.from_mapping(
        {
            "name": "small",
            "family": "llama",
            "num_layers": 12,
            "hidden_size": 64,
            "ffn_hidden_size": 160,
            "num_heads": 4,
            "num_kv_heads": 2,
            "seq_length": 32,
            "vocab_size": 500,
        }
    ),
    layout=replace(EVERY_KNOB, pp=3, micro_batch_size=5, num_microbatches=6),
    seed=9,
)


def test_every_field_of_the_layout_and_of_the_model_has_a_placeholder() -> None:
    values = placeholder_values(JOB)
    stated = {each.name for each in (*fields(Layout), *fields(ModelShape))} - {"name"}
    assert stated < set(values)
    assert tuple(values) == PLACEHOLDERS
    assert all(isinstance(value, str) for value in values.values())


def test_derived_numbers_are_those_of_the_arithmetic() -> None:
    values = placeholder_values(JOB)
    assert values["num_devices"] == str(2 * 2 * 2 * 3 * 4)
    assert values["ranks_per_node"] == "48"
    assert values["global_batch_size"] == str(4 * 5 * 6)
    assert values["tokens_per_step"] == str(4 * 5 * 6 * 32)
    assert values["zero_group_size"] == "4"
    assert values["layers_per_stage"] == "4"
    assert values["layers_per_virtual_stage"] == "2"
    assert values["head_size"] == "16"
    assert (values["seed"], values["model"]) == ("9", "small")


def test_switches_are_true_or_false_as_in_json_and_yaml() -> None:
    values = placeholder_values(JOB)
    assert (values["sequence_parallel"], values["compile"]) == ("true", "false")


def test_a_template_is_filled_and_other_braces_stay() -> None:
    template = '--tp={tp} {"bf16": {precision}} ${HOME} {} { tp }'
    expected = '--tp=2 {"bf16": bf16} ${HOME} {} { tp }'
    assert filled(template, placeholder_values(JOB)) == expected


def test_a_value_is_not_filled_again() -> None:
    assert filled("{model} {tp}", {"model": "{tp}", "tp": "2"}) == "{tp} 2"


def test_an_unknown_placeholder_is_answered_with_the_known_ones() -> None:
    with pytest.raises(
        PlaceholderUnknownError, match=r"\{tpp\} in '--tp \{tpp\}'.* tp, tp_columns, cp, pp, dp"
    ):
        filled("--tp {tpp}", placeholder_values(JOB))


def test_environment_variables_have_the_same_values() -> None:
    environment = environment_values(JOB)
    assert environment["LAYOUT_TP"] == "2"
    assert environment["LAYOUT_MICRO_BATCH_SIZE"] == "5"
    assert (environment["LAYOUT_EP"], environment["LAYOUT_ETP"]) == ("2", "2")
    unstated = {each.name for each in fields(ModelShape)} - JOB.model.to_mapping().keys()
    assert len(environment) == len(PLACEHOLDERS) - len(unstated)
    assert "LAYOUT_NUM_EXPERTS" not in environment


def test_a_model_with_experts_has_their_values() -> None:
    job = replace(JOB, model=model_preset("tiny-moe"))
    environment = environment_values(job)
    assert environment["LAYOUT_NUM_EXPERTS"] == "8"
    assert environment["LAYOUT_QK_NORM"] == "true"
    assert placeholder_values(job)["attention_window"] == "0"
    assert placeholder_values(job)["head_dim"] == "32"
