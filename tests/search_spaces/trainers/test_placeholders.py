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

SHAPE = {"name": "small", "family": "llama", "num_layers": 12, "hidden_size": 64}
SHAPE |= {"ffn_hidden_size": 160, "num_heads": 4, "num_kv_heads": 2, "seq_length": 32}
JOB = TrainerJob(
    model=ModelShape.from_mapping(SHAPE | {"vocab_size": 500}),
    layout=replace(EVERY_KNOB, pp=3, micro_batch_size=5, num_microbatches=6),
    seed=9,
)


def test_every_field_has_a_placeholder_and_derived_numbers_are_those_of_the_arithmetic() -> None:
    values = placeholder_values(JOB)
    stated = {each.name for each in (*fields(Layout), *fields(ModelShape))} - {"name"}
    assert stated < set(values)
    assert tuple(values) == PLACEHOLDERS
    assert all(isinstance(value, str) for value in values.values())
    expected = {
        "num_devices": 2 * 2 * 2 * 3 * 4,
        "ranks_per_node": 48,
        "global_batch_size": 4 * 5 * 6,
        "tokens_per_step": 4 * 5 * 6 * 32,
        "zero_group_size": 4,
        "layers_per_stage": 4,
        "layers_per_virtual_stage": 2,
        "head_size": 16,
        "seed": 9,
        "model": "small",
        "tp": 2,
        "ep": 2,
        "etp": 2,
        "sequence_parallel": "true",
        "compile": "false",
    }
    values, environment = placeholder_values(JOB), environment_values(JOB)
    for name, value in expected.items():
        assert values[name] == environment[f"LAYOUT_{name.upper()}"] == str(value)
    unstated = {each.name for each in fields(ModelShape)} - JOB.model.to_mapping().keys()
    assert len(environment) == len(PLACEHOLDERS) - len(unstated)
    assert "LAYOUT_NUM_EXPERTS" not in environment
    experts = environment_values(replace(JOB, model=model_preset("tiny-moe")))
    assert (experts["LAYOUT_NUM_EXPERTS"], experts["LAYOUT_QK_NORM"]) == ("8", "true")
    of_experts = placeholder_values(replace(JOB, model=model_preset("tiny-moe")))
    assert (of_experts["attention_window"], of_experts["head_dim"]) == ("0", "32")


def test_a_template_is_filled_once_and_other_braces_stay() -> None:
    template = '--tp={tp} {"bf16": {precision}} ${HOME} {} { tp }'
    expected = '--tp=2 {"bf16": bf16} ${HOME} {} { tp }'
    assert filled(template, placeholder_values(JOB)) == expected
    assert filled("{model} {tp}", {"model": "{tp}", "tp": "2"}) == "{tp} 2"
    known = r"\{tpp\} in '--tp \{tpp\}'.* tp, tp_columns, cp, pp, dp"
    with pytest.raises(PlaceholderUnknownError, match=known):
        filled("--tp {tpp}", placeholder_values(JOB))
