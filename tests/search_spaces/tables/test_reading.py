"""What is read from a measurement table, and that writing it gives it back."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from search_spaces.spec.layout import Layout
from search_spaces.spec.presets.clusters import CLUSTER_PRESETS
from search_spaces.tables import read_table, write_table
from search_spaces.tables.table import own_source, software_of_source
from tests.search_spaces.tables.tables import make_row, make_text


def test_a_row_is_a_layout_and_what_was_measured() -> None:
    table = read_table(make_text(make_row(step_time_s=0.25, zero_stage=1, recompute="full")))
    (cell,) = table.cells
    (row,) = cell.rows
    degrees = {"num_nodes": 2, "tp": 2, "pp": 2, "dp": 2, "num_microbatches": 4, "zero_stage": 1}
    assert row.layout == Layout.from_mapping(degrees | {"recompute": "full", "precision": "bf16"})
    assert (row.status, row.step_time_s, row.tokens_per_s) == ("completed", 0.25, 8 * 512 / 0.25)
    assert row.peak_memory_bytes == 2_000_000_000
    assert (row.number, row.line) == (1, 2)
    key = cell.key
    assert (key.num_devices, key.global_batch_size, key.seq_length) == (8, 8, 512)
    assert cell.model.num_layers == 8
    assert (cell.cluster.num_nodes, cell.cluster.devices_per_node) == (2, 4)
    assert cell.cluster.device_memory_bytes == 16 << 30
    # Numbers as pandas writes a column with gaps are whole.
    gaps = make_row(tp="2.0", zero_stage="1.0", tied_embeddings="True", sequence_parallel="0.0")
    assert read_table(make_text(gaps)).rows[0].layout.tp == 2


def test_rows_that_share_source_cluster_model_sequence_devices_and_batch_are_a_cell() -> None:
    others = (
        {"num_microbatches": 8, "global_batch_size": 16},
        {"seq_length": 256},
        {"source": "elsewhere"},
        {"tp": 4, "pp": 1},
    )
    table = read_table(make_text(make_row(), *(make_row(**changes) for changes in others)))
    assert [len(cell.rows) for cell in table.cells] == [2, 1, 1, 1]
    assert [row.number for row in table.rows] == [1, 2, 3, 4, 5]


def test_the_software_is_the_source_without_names_of_files_and_nothing_for_our_own() -> None:
    for source, software in (
        ("Maker 2024 first_part.csv", "Maker 2024"),
        ("Maker 2024 rest.json", "Maker 2024"),
        ("table.csv", "table.csv"),
        ("layout-tuner campaign first.csv", ""),
        (own_source("mine", "embedded"), ""),
        (own_source("mine", "torch-native"), "torch-native"),
        (own_source("theirs", "imported"), ""),
        ("", ""),
    ):
        assert software_of_source(source) == software, source
        assert read_table(make_text(make_row(source=source))).cells[0].key.software == software


def test_what_a_row_does_not_state_is_assumed_and_noted() -> None:
    row = make_row(sequence_parallel="", zero_stage="")
    table = read_table(make_text(row))
    notes = "\n".join(table.notes)
    assert "zero_stage is not stated: 0 stands in (1 row)" in notes
    assert "sequence_parallel is not stated" in notes
    assert "family is not stated: gpt" in notes
    assert "cluster 'testbox' is not a preset" in notes
    assert table.rows[0].layout.zero_stage == 0

    def family(**changes: object) -> str:
        return read_table(make_text(make_row(**changes))).cells[0].model.family

    assert family() == "gpt"
    assert family(ffn_hidden_size=1408) == "llama"
    assert family(family="llama") == "llama"
    text = make_text(make_row(cluster="h100-sxm", device_memory_gb=80, step_time_s=0.2))
    cluster = read_table(text).cells[0].cluster
    preset = CLUSTER_PRESETS["h100-sxm"]
    assert cluster.peak_flops_per_s == preset.peak_flops_per_s
    assert cluster.inter_node_bandwidth_bytes_per_s == preset.inter_node_bandwidth_bytes_per_s
    assert (cluster.num_nodes, cluster.devices_per_node) == (2, 4)


def test_one_of_throughput_and_step_time_follows_from_the_other() -> None:
    for missing in ("tokens_per_s", "step_time_s"):
        told = make_row(step_time_s=0.5, tokens_per_s=8192) | {missing: ""}
        (row,) = read_table(make_text(told)).rows
        assert (row.step_time_s, row.tokens_per_s) == (0.5, 8192)


def test_writing_gives_back_what_was_read() -> None:
    rows = [
        make_row(zero_stage="", note="warm"),
        make_row(source="elsewhere", zero_replicas=2, zero_stage=1, note="", family="llama"),
        make_row(tp=4, pp=1, status="out_of_memory", note="cold, wet"),
        make_row(tp=1, pp=4, status="failed", pipeline_split="head"),
    ]
    table = read_table(make_text(*rows))
    written = write_table(table)
    again = read_table(written)
    assert again.cells == table.cells
    assert write_table(again) == written
    assert table.aside_columns == ("note",)
    assert [row.aside["note"] for row in again.rows] == ["warm", "", "cold, wet", ""]
    assert written.splitlines()[0].endswith(
        "peak_memory_bytes,family,pipeline_split,zero_replicas,note"
    )
    assert again.rows[0].unstated == ("zero_stage",)
    for sign in ("-", "+", "-0.5", "+3e-2", "+5%", "a=b", "x@y"):
        assert read_table(make_text(make_row(note=sign))).rows[0].aside["note"] == sign


def test_repeats_of_a_layout_count_once_by_their_median_and_rather_as_completed() -> None:
    times = (0.5, 0.6, 0.9)
    table = read_table(make_text(*(make_row(step_time_s=time) for time in times)))
    (merged,) = table.cells[0].merged
    assert merged.step_time_s == 0.6
    assert merged.tokens_per_s == pytest.approx(8 * 512 / 0.6)
    assert len(table.rows) == 3

    def statuses(*rows: dict[str, Any]) -> list[str]:
        return [row.status for row in read_table(make_text(*rows)).cells[0].merged]

    assert statuses(make_row(status="failed"), make_row()) == ["completed"]
    crashed, full = (make_row(tp=4, pp=1, status=status) for status in ("failed", "out_of_memory"))
    assert statuses(make_row(), crashed, full) == ["completed", "out_of_memory"]


@pytest.mark.parametrize("ends", ["\n", "\r\n", "\r", "\r\n\r\n", "mixed"])
def test_lines_of_a_file_may_end_in_any_way_also_in_one_file(tmp_path: Path, ends: str) -> None:
    sizes = (1, 2, 4)
    rows = (make_row(micro_batch_size=size, global_batch_size=8 * size) for size in sizes)
    text = make_text(*rows)
    every = ["\r\n", "\r", "\n"] if ends == "mixed" else [ends]
    path = tmp_path / "table.csv"
    told = "".join(line + every[i % len(every)] for i, line in enumerate(text.splitlines()))
    path.write_bytes(b"\xef\xbb\xbf" + told.encode())
    found, expected = (
        [replace(row, line=0) for row in read_table(table).rows] for table in (path, text)
    )
    assert found == expected
    assert read_table(str(path)) == read_table(path)
