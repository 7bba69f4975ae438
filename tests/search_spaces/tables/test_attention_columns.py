"""Columns of a measurement table about attention and dropout, ours and Megatron-LM's."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from layout_tuner.errors import TableInvalidError
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.search_spaces.tables import read_table, write_table
from layout_tuner.search_spaces.tables.selection import CellFilter, select
from tests.search_spaces.tables.tables import make_row, make_text


def stated(model: ModelShape) -> tuple[str | None, float | None, float]:
    return model.attention, model.attention_dropout, model.hidden_dropout


OURS = {"attention": "unfused", "attention_dropout": "0.1", "hidden_dropout": "0"}


def test_our_columns_are_fields_of_the_model_and_are_written_where_some_row_states_them() -> None:
    table = read_table(make_text(make_row(), make_row(**OURS, step_time_s=2)))
    plain, unfused = table.cells
    assert (stated(plain.model), stated(unfused.model)) == ((None, None, 0), ("unfused", 0.1, 0))
    assert "attention" not in table.rows[1].aside
    text = write_table(table)
    assert read_table(text).cells == table.cells
    assert "hidden_dropout" not in text.splitlines()[0], "no model has any"


def test_rows_that_differ_in_such_a_field_are_cells_of_their_own() -> None:
    """So that twice the time is no contradiction, and a search is of one model."""
    rates = ((0, 1), (0.1, 3))
    rows = [make_row(attention_dropout=rate, step_time_s=time) for rate, time in rates]
    table = read_table(make_text(*rows, make_row(attention="fused", step_time_s=7)))
    assert [stated(cell.model) for cell in table.cells] == [
        (None, 0, 0),
        (None, 0.1, 0),
        ("fused", None, 0),
    ]
    keys = [str(cell.key).partition("global_batch_size=8")[2] for cell in table.cells]
    assert keys == [", attention_dropout=0", ", attention_dropout=0.1", ", attention=fused"]
    assert select(table, [CellFilter.read("attention=fused")]) == table.cells[2:]
    assert all(len(cell.rows) == 1 for cell in table.cells)


@pytest.mark.parametrize(
    ("columns", "attention"),
    [
        ({"attention_backend": "auto"}, None),
        ({"attention_backend": "sdpa"}, "fused"),
        ({"attention_backend": "flash", "transformer_impl": "transformer_engine"}, "fused"),
        ({"attention_backend": "unfused"}, "unfused"),
        ({"attention_backend": "auto", "transformer_impl": "local"}, "unfused"),
        ({"transformer_impl": "transformer_engine"}, None),
        ({"attention_backend": "", "transformer_impl": ""}, None),
    ],
)
def test_options_of_megatron_lm_say_how_attention_was_computed(
    columns: dict[str, str], attention: str | None
) -> None:
    table = read_table(make_text(make_row(**columns, dropout="0.1/0.05")))
    (cell,) = table.cells
    assert stated(cell.model) == (attention, 0.1, 0.05)
    assert cell.rows[0].aside == columns | {"dropout": "0.1/0.05"}, "they are written back"
    note = "attention and dropout follow from columns of Megatron-LM's options (1 row)"
    assert note in table.notes
    again = read_table(write_table(table))
    assert again.cells[0] == replace(cell, rows=again.cells[0].rows)
    assert again.cells[0].rows[0].aside == cell.rows[0].aside


def test_one_number_is_both_dropouts() -> None:
    (cell,) = read_table(make_text(make_row(dropout="0.1"))).cells
    assert stated(cell.model) == (None, 0.1, 0.1)
    (cell,) = read_table(make_text(make_row(dropout="0"))).cells
    assert stated(cell.model) == (None, 0, 0)


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"attention": "flash"}, "attention='flash' is not one of fused, unfused"),
        ({"attention_dropout": "1.5"}, "attention_dropout=1.5 is not a number from 1e-06 to 0.999"),
        ({"hidden_dropout": "x"}, "hidden_dropout='x' is not a finite number"),
        ({"attention_backend": "math"}, "attention_backend='math' is unknown"),
        ({"transformer_impl": "apex"}, "transformer_impl='apex' is unknown"),
        (
            {"dropout": "0.1/"},
            "hidden_dropout in the column dropout, one number or ATTENTION/HIDDEN",
        ),
        ({"dropout": "x/0.1"}, "attention_dropout in the column dropout, one number or"),
        (
            {"attention": "fused", "attention_backend": "unfused"},
            "attention=fused contradicts the columns of Megatron-LM's options, which say "
            "attention=unfused; leave one of them out",
        ),
        ({"attn_pdrop": "0.1"}, "the column 'attn_pdrop' is called 'attention_dropout' here"),
    ],
)
def test_a_wrong_word_is_one_error(columns: dict[str, Any], says: str) -> None:
    with pytest.raises(TableInvalidError, match=re.escape(says)):
        read_table(make_text(make_row(**columns)))
