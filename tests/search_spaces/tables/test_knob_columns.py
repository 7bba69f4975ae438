"""Columns of a measurement table that are job knobs."""

from typing import Any

import pytest

from layout_tuner.errors import SpaceInvalidError
from layout_tuner.search_spaces.jobs.job_knob import JobKnob, KnobEffect
from layout_tuner.search_spaces.layouts.job_settings import JobSettings
from layout_tuner.search_spaces.tables import TableInvalidError, read_table, write_table
from layout_tuner.search_spaces.tables.knob_columns import TableKnobs
from layout_tuner.trainers.embedded import EMBEDDED
from layout_tuner.trainers.registry import knobs_of_software
from layout_tuner.tuner.replay.cell_layouts import CellLayouts
from tests.search_spaces.tables.tables import make_row, make_text

EXCHANGE = {
    "kind": "word",
    "values": ["plain", "fast"],
    "default": "plain",
    "when": "tp > 1",
    "effects": [{"value": "fast", "touches": ["tp"], "factor": 0.7, "log_sd": 0.2}],
}


def read(*rows: dict[str, Any], knobs: str = "", declared: object = None) -> Any:
    (cell,) = read_table(
        make_text(*rows), TableKnobs.read([knobs] if knobs else [], declared)
    ).cells
    return cell


def jobs(*rows: dict[str, Any], knobs: str = "", declared: object = None) -> list[dict[str, Any]]:
    cell = read(*rows, knobs=knobs, declared=declared)
    return [row.layout.job.to_mapping() for row in cell.rows]


def refusal(*rows: dict[str, Any], knobs: str = "", declared: object = None) -> str:
    with pytest.raises(TableInvalidError) as caught:
        read(*rows, knobs=knobs, declared=declared)
    return str(caught.value)


def test_rows_of_one_layout_that_differ_in_a_knob_are_jobs_of_a_search() -> None:
    rows = [make_row(exchange=each, step_time_s=s) for each, s in (("old", 2.0), ("new", 0.5))]
    cell = read(*rows, knobs="exchange")
    found = CellLayouts(cell)
    assert [found.layout(at).job for at in range(len(found))] == [
        JobSettings({"exchange": each}) for each in ("new", "old")
    ]
    assert cell.job.values("exchange") == ("old", "new")
    assert not any(cell.differences().values())
    assert {row.layout.without_job for row in cell.rows} == {cell.rows[0].layout.without_job}


def test_the_kind_of_a_knob_follows_from_all_values_of_its_column() -> None:
    rows = [
        make_row(overlap=overlap, sms=sms, graphs=graphs)
        for overlap, sms, graphs in (("1", "16", "none"), ("0", "1", "attn: moe"), ("True", "", ""))
    ]
    assert jobs(*rows, knobs="overlap, sms,graphs") == [
        {"graphs": "none", "overlap": True, "sms": 16},
        {"graphs": "attn_moe", "overlap": False, "sms": 1},
        {"overlap": True},
    ]
    knobs = read(*rows, knobs="overlap,sms,graphs").job.knobs
    assert {name: knob.kind for name, knob in knobs.items()} == {
        "graphs": "word",
        "overlap": "switch",
        "sms": "count",
    }


def test_the_catalogue_of_the_trainer_that_a_source_names_declares_its_knobs() -> None:
    mine = "layout-tuner campaign one"
    name = "overlap_scatter"
    rows = [make_row(**{name: each}, source=mine) for each in (1, 0)]
    cell = read(*rows, knobs=name)
    assert [row.layout.job.to_mapping() for row in cell.rows] == [{}, {name: False}]
    assert cell.job.knobs[name] == EMBEDDED.job_knobs[name]
    assert jobs(make_row(**{name: 1}, source="another trainer"), knobs=name) == [{name: True}]
    assert knobs_of_software("Somebody's megatron") == {}


def test_a_declaration_brings_defaults_conditions_words_and_effects() -> None:
    rows = [make_row(a2a="fast"), make_row(a2a="plain"), make_row(a2a="")]
    rows.append(make_row(a2a="Rapid (new)", tp=4, pp=1))
    rows.append(make_row(a2a="fast", tp=1, dp=4, num_microbatches=2))
    declared = {"exchange": {**EXCHANGE, "words": {"Rapid (new)": "fast"}}}
    table = read_table(make_text(*rows), TableKnobs.read(["a2a=exchange"], declared))
    (cell,) = table.cells
    fast = {"exchange": "fast"}
    assert [row.layout.job.to_mapping() for row in cell.rows] == [fast, {}, {}, fast, {}]
    assert "exchange=fast is left out where its condition does not hold (1 row)" in table.notes
    assert cell.job.knobs["exchange"].effect("fast") == KnobEffect(
        touches=("tp",), factor=0.7, log_sd=0.2
    )
    assert cell.job.values("exchange") == ("fast", "plain")


def test_a_table_is_written_with_a_column_of_each_knob_and_read_back() -> None:
    rows = [
        make_row(overlap=1, sms=0, graphs="attn moe"),
        make_row(overlap=0, sms=1, graphs="none", tp=4, pp=1),
        make_row(overlap=0, sms="", graphs="", tp=1, pp=4),
    ]
    (cell,) = read_table(make_text(*rows), TableKnobs.read(["overlap,sms=count,graphs"])).cells
    table = read_table(make_text(*rows), TableKnobs.read(["overlap,sms=count,graphs"]))
    text = write_table(table)
    header, first, *_ = text.splitlines()
    assert header.endswith(",job.count,job.graphs,job.overlap")
    assert first.endswith(",false,attn_moe,true")
    again = read_table(text)
    assert again.aside_columns == ()
    assert [row.layout for row in again.rows] == [row.layout for row in table.rows]
    assert cell.job.knobs["count"].kind == "switch"
    assert "job." not in write_table(read_table(make_text()))


@pytest.mark.parametrize(
    ("values", "knobs", "said"),
    [
        (("1.5",), "x", "row 1 (line 2): x='1.5' is no value of a job knob"),
        (("1f1b",), "x", "declare `words` for it"),
        (("é",), "x", "declare `words` for it"),
        (("a b", "a_b"), "x", "row 2 (line 3): x='a_b' and 'a b' of an earlier row would be one"),
        (("a",), "y", "there is no column 'y', which is declared a job knob"),
        (("a",), "tp", "the column tp is one of the format, and no job knob"),
        (("a",), "x=X", "the column 'x' cannot be a job knob of that name: 'X' is not a name"),
    ],
)
def test_a_column_that_cannot_be_a_knob_is_refused(
    values: tuple[str, ...], knobs: str, said: str
) -> None:
    places = ({}, {"tp": 4, "pp": 1})
    rows = [make_row(x=value, **place) for value, place in zip(values, places, strict=False)]
    assert said in refusal(*rows, knobs=knobs)


def test_a_value_outside_a_declaration_is_refused_with_its_row() -> None:
    said = refusal(make_row(exchange="slow"), declared={"exchange": EXCHANGE})
    assert "row 1 (line 2): exchange='slow': 'slow' is not one of plain, fast" in said
    assert "several columns are the job knob x" in refusal(make_row(x=1, y=1), knobs="x,y=x")


@pytest.mark.parametrize(
    ("columns", "declared", "said"),
    [
        (["x,x"], None, "'x' is declared twice"),
        (["x,"], None, "names no column"),
        ([], {"x": {"kind": "word"}}, "x.values: the field is missing"),
        ([], {"x": {**EXCHANGE, "words": {"A": "slow"}}}, "x.words.'A': 'slow' is not one of"),
        ([], [], "the knobs"),
    ],
)
def test_a_wrong_declaration_is_refused(columns: list[str], declared: object, said: str) -> None:
    with pytest.raises(SpaceInvalidError) as caught:
        TableKnobs.read(columns, declared)
    assert said in str(caught.value)


def test_a_declared_knob_keeps_its_declaration() -> None:
    knobs = TableKnobs.read([], {"exchange": EXCHANGE})
    assert knobs.declared["exchange"] == JobKnob.from_mapping("exchange", EXCHANGE)
