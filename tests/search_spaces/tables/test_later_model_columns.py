"""Columns of models with layers of several kinds, latents and other later fields."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from typing import Any

import pytest

from layout_tuner.errors import TableInvalidError
from layout_tuner.search_spaces.models.model_presets import MODEL_PRESETS
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.search_spaces.tables import read_table, write_table
from layout_tuner.search_spaces.tables.columns import LATER_MODEL_COLUMNS
from layout_tuner.search_spaces.tables.writing import model_values
from tests.search_spaces.tables.tables import make_row, make_text

ONE_DEVICE = {"tp": 1, "pp": 1, "dp": 1, "num_devices": 1, "devices_per_node": 1}


def row_of(model: ModelShape, **changes: Any) -> dict[str, Any]:
    """A failed run of a model, whose figures nobody judges."""
    values = {name: value for name, value in model_values(model).items() if value is not None}
    said = {name: int(value) if value is True else value for name, value in values.items()}
    layout = {**ONE_DEVICE, "micro_batch_size": 1, "num_microbatches": 1, "global_batch_size": 1}
    run = {"cluster": "one-device", "status": "failed", "tokens_per_s": ""}
    return make_row(**(said | layout | run | changes))


def text_of(*rows: dict[str, Any]) -> str:
    """The rows, after one of a small model that completed: a table has such a row."""
    return make_text(make_row(), *rows)


@pytest.mark.parametrize("name", MODEL_PRESETS)
def test_a_table_gives_back_each_preset(name: str) -> None:
    model = replace(MODEL_PRESETS[name], lacks="", rotary_base=1e4)  # no columns
    table = read_table(text_of(row_of(model)))
    assert table.cells[1].model == model
    assert read_table(write_table(table)).cells == table.cells


@pytest.mark.parametrize(
    "fields",
    [
        {"biases": "attention", "norm": "layer", "activation": "geglu", "parallel_block": True},
        {"rotary_fraction": 0.0, "mean_document_length": 64, "attention_output_gate": True},
        {"qk_norm": "width"},
    ],
)
def test_words_and_numbers_are_read_back(fields: dict[str, Any]) -> None:
    model = replace(MODEL_PRESETS["tiny-llama"], **fields)
    assert read_table(text_of(row_of(model))).cells[1].model == model


def test_kinds_in_succession_are_one_word() -> None:
    values = model_values(MODEL_PRESETS["qwen3-next-80b-a3b"])
    assert values["model.layer_kinds"] == "gated_delta_net+experts*3 full+experts"
    assert values["model.num_mtp_layers"] == 1


def test_models_without_the_fields_have_none_of_the_columns() -> None:
    old = read_table(make_text(make_row(), make_row(model="moe", family="llama", num_experts=8,
        experts_per_token=2, moe_ffn_hidden_size=2048, attention_window=64)))  # fmt: skip
    header = next(csv.reader(io.StringIO(write_table(old))))
    assert not {*LATER_MODEL_COLUMNS} & {*header}
    new = read_table(text_of(row_of(MODEL_PRESETS["tiny-mla"])))
    assert {*LATER_MODEL_COLUMNS} & {*next(csv.reader(io.StringIO(write_table(new))))} == {
        f"model.{name}"
        for name in (
            *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
            *("router_score", "router_groups", "router_topk_groups", "router_scaling_factor"),
        )
    }


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("model.kv_lora_rank", "many", "model.kv_lora_rank='many' is not a finite number"),
        ("model.kv_lora_rank", "32.5", "kv_lora_rank=32.5 is not a whole number"),
        ("model.layer_kinds", "full+dense mamba", "'mamba' is not a kind of layer"),
        ("model.layer_kinds", "full+dense*0", "0 of full+dense is not a whole number from 1"),
        ("model.layer_kinds", "full+dense*x", "'x' of full+dense is not a whole number"),
        ("model.router_bias", "perhaps", "model.router_bias='perhaps' is not 1 or 0"),
        ("model.activation", "=swish()", "reads as a formula"),
        ("model.activation", "swish", "'swish' is not one of swiglu"),
        ("qk_norm", "both", "qk_norm='both' is not 1 or 0"),
    ],
)
def test_a_wrong_cell_is_refused_with_line_and_column(column: str, value: str, said: str) -> None:
    row = row_of(MODEL_PRESETS["tiny-mla"], **{column: value})
    with pytest.raises(TableInvalidError) as refused:
        read_table(text_of(row))
    assert "row 2 (line 3)" in str(refused.value)
    assert said in str(refused.value)


def test_plain_words_of_other_tables_stay_aside() -> None:
    row = make_row(activation="gelu", biases=1, kv_lora_rank=64, qk_head_dim=16)
    table = read_table(make_text(row))
    assert table.aside_columns == ("activation", "biases", "kv_lora_rank", "qk_head_dim")
    assert not table.cells[0].model.kv_lora_rank
