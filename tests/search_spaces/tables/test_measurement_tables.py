"""What is read from a measurement table, and how a wrong one is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from layout_tuner.predictions.belief.known_measurements import knowledge_of
from layout_tuner.search_spaces.clusters.cluster_presets import CLUSTER_PRESETS
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.tables import TableInvalidError, TableRow, read_table, write_table
from layout_tuner.search_spaces.tables import reading as reading_module
from layout_tuner.search_spaces.tables.columns import COLUMNS, EXTRA_COLUMNS, OPTIONAL_COLUMNS
from layout_tuner.search_spaces.tables.table import own_source, software_of_source
from tests.search_spaces.tables.tables import make_row, make_text


def refusal_of(text: str) -> str:
    with pytest.raises(TableInvalidError) as caught:
        read_table(text)
    return str(caught.value)


def refusal(*rows: dict[str, Any], drop: tuple[str, ...] = ()) -> str:
    return refusal_of(make_text(*rows, drop=drop))


def test_a_table_without_the_columns_that_it_needs_is_refused_by_their_names() -> None:
    for column in COLUMNS:
        if column in OPTIONAL_COLUMNS:
            read_table(make_text(drop=(column,)))
        else:
            assert f"the columns {column} are missing from the header" in refusal(drop=(column,))
    assert "the columns tp, dp are missing" in refusal(drop=("tp", "dp"))


@pytest.mark.parametrize(
    ("column", "ours"),
    [
        ("num_local_experts", "num_experts"),
        ("num_experts_per_tok", "experts_per_token"),
        ("cp_size", "cp"),
        ("context_parallel_degree", "cp"),
        ("EP", "ep"),
        ("pipeline_schedule", "schedule"),
    ],
)
def test_a_column_that_is_called_otherwise_here_is_not_left_out_in_silence(
    column: str, ours: str
) -> None:
    said = refusal(make_row(**{column: 2}))
    assert f"the column {column!r} is called {ours!r} here: rename it" in said
    read_table(make_text(make_row(dtype="bf16", tensor_parallel=2)))


def test_ranks_that_divide_experts_need_experts() -> None:
    assert "ep=2 divides experts, and num_experts states none" in refusal(make_row(ep=2))
    dense = make_row(num_key_value_heads=2)
    assert read_table(make_text(dense)).cells[0].model.num_kv_heads == 8
    assert "'num_kv_heads' here: rename it" in refusal(dense, drop=("num_kv_heads",))


def test_the_name_of_a_column_is_checked_as_values_are() -> None:
    formula, unprintable = "reads as a formula", "is not a line of printable text"
    for name, reason in (
        ("=cmd|' /C calc'!A0", f"{formula}; write it without '='"),
        ("@SUM(A1)", formula),
        ("\uff1d1+1", f"{formula}; write it without '\uff1d'"),
        ("\uff20SUM(A1)", formula),
        ("-2+3+x", formula),
        ("note\x1b[2J", unprintable),
        ("note\u202e", unprintable),
    ):
        said = refusal(make_row(**{name: "1"}))
        assert f"the name of a column={name!r}" in said
        assert reason in said


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tp": 4}, "tp*pp*dp=4*2*2=16 is not num_devices=8"),
        ({"num_microbatches": 3}, "num_microbatches=2*1*3=6 is not global_batch_size=8"),
        ({"tp": ""}, "tp is empty"),
        ({"tp": "two"}, "tp='two' is not a finite number in plain digits"),
        ({"tp": "2.5"}, "tp='2.5' is not a whole number of at least 1"),
        ({"zero_stage": 4}, "zero_stage=4 is not one of 0, 1, 2, 3"),
        ({"recompute": "some"}, "recompute='some' is unknown"),
        ({"precision": "fp4"}, "precision='fp4' is unknown"),
        ({"status": "OOM"}, "status='OOM' is unknown"),
        ({"tied_embeddings": 2}, "tied_embeddings='2' is not 1 or 0"),
        ({"step_time_s": "nan"}, "step_time_s='nan' is not a finite number"),
        ({"source": "=1+1"}, "source='=1+1' reads as a formula; write it without '='"),
        ({"note": "-2+3+cmd|' /C calc'!A0"}, "reads as a formula"),
        ({"note": "\uff1d1+1"}, "reads as a formula"),
        ({"source": "\uff0b1+x"}, "reads as a formula"),
        ({"source": "\uff0d1+x"}, "reads as a formula"),
        ({"note": "\t\u3000=1+1"}, "reads as a formula"),
        ({"step_time_s": -1}, "step_time_s='-1' is not a number over 0"),
        ({"step_time_s": "", "tokens_per_s": ""}, "status is completed and tokens_per_s is empty"),
        ({"status": "failed", "step_time_s": 0.5}, "status is failed and step_time_s is 0.5"),
        ({"num_heads": 7}, "hidden_size=512 is not divisible by num_heads=7"),
        ({"model": "x" * 65}, "is not a string of 1 to 64 characters"),
        ({"num_devices": 8, "devices_per_node": 0}, "devices_per_node='0' is not a whole number"),
    ],
)
def test_a_wrong_field_is_refused_with_the_row_and_the_numbers(
    changes: dict[str, Any], reason: str
) -> None:
    message = refusal(make_row(tp=4, pp=1), make_row(**changes))
    assert message.startswith("the table: row 2 (line 3): ")
    assert reason in message


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"step_time_s": 500, "tokens_per_s": 8192}, "is step_time_s in milliseconds?"),
        ({"step_time_s": 0.5, "tokens_per_s": 8.192}, "is tokens_per_s in thousands a second?"),
        ({"step_time_s": 0.5, "tokens_per_s": 9000}, "is 4500 tokens, and global_batch_size"),
        # No unit explains these, and their product is 0 or more than a float holds.
        ({"step_time_s": 1e-320, "tokens_per_s": 1e-320}, "tokens_per_s=9.99989e-321 times"),
        ({"step_time_s": 1e300, "tokens_per_s": 1e300}, "tokens_per_s=1e+300 times"),
        ({"step_time_s": 1e-320, "tokens_per_s": ""}, "tokens_per_s=inf is not"),
        ({"step_time_s": "", "tokens_per_s": 1e-320}, "step_time_s=inf is not"),
        # The two agree with each other, and neither with any machine.
        ({"cluster": "h100-sxm", "step_time_s": 2e-5}, "at twice their peak; are the units off"),
        ({"step_time_s": 2e-6}, "at twice their peak; are the units off by a thousand?"),
        ({"peak_memory_bytes": 2_000_000}, "is it in kilobytes or megabytes?"),
        ({"peak_memory_bytes": 2e12}, "more than twice the device's 16 GiB"),
        ({"device_memory_gb": 16 << 10 << 10}, "is it in megabytes or bytes?"),
        ({"device_memory_gb": 16 << 30}, "is it in megabytes or bytes?"),
    ],
)
def test_units_off_by_a_thousand_are_refused_with_the_row(
    changes: dict[str, Any], reason: str
) -> None:
    message = refusal(make_row(source="another"), make_row(**changes))
    assert "row 2 (line 3): " in message
    assert reason in message


def test_a_peak_and_the_times_of_a_cell_that_no_device_has_are_refused() -> None:
    sharded = {"num_devices": 128, "tp": 1, "pp": 1, "dp": 128, "global_batch_size": 512}
    sharded |= {"num_layers": 64, "peak_memory_bytes": 60_000_000}
    read_table(make_text(make_row(**sharded, zero_stage=3)))
    assert "is it in kilobytes or megabytes?" in refusal(make_row(**sharded, zero_stage=2))
    assert "is it in kilobytes" in refusal(
        make_row(**sharded | {"peak_memory_bytes": 60_000}, zero_stage=3)
    )
    model = {"num_layers": 32, "hidden_size": 4096, "ffn_hidden_size": 16384, "num_heads": 32}
    big = {**model, "cluster": "a100-sxm", "device_memory_gb": 80, "peak_memory_bytes": ""}
    right = make_row(**big, step_time_s=0.4)
    assert read_table(make_text(right)).rows[0].step_time_s == 0.4
    message = refusal(make_row(**big, step_time_s=900), make_row(**big, step_time_s=800))
    assert "row 2 (line 3): step_time_s=800 is the fastest of its cell" in message
    assert "off by a thousand?" in message


def test_rows_that_contradict_each_other_are_refused_with_both() -> None:
    message = refusal(make_row(), make_row(tp=4, pp=1), make_row(status="out_of_memory"))
    assert "row 1 (line 2) and row 3 (line 4) contradict each other" in message
    assert "completed in one and out_of_memory in the other" in message
    read_table(make_text(make_row(step_time_s=0.5), make_row(step_time_s=0.9)))
    message = refusal(make_row(step_time_s=0.5), make_row(step_time_s=1.0))
    assert "row 1 (line 2) and row 2 (line 3) contradict each other" in message
    assert "takes 0.5 s in one and 1 s in the other" in message
    for name, value in (("num_layers", 9), ("device_memory_gb", 32), ("devices_per_node", 8)):
        message = refusal(make_row(), make_row(tp=4, pp=1, **{name: value}))
        assert "row 2 (line 3): contradicts row 1 (line 2): " in message
        assert name.removesuffix("_gb") in message


def test_a_table_in_which_nothing_completed_is_refused_and_so_is_such_a_row() -> None:
    message = refusal(make_row(status="failed"), make_row(tp=4, pp=1, status="out_of_memory"))
    assert "no row is completed, of 2" in message
    assert "no row is completed, of 0" in refusal_of(make_text().splitlines()[0] + "\n")
    with pytest.raises(TableInvalidError, match="status is completed and tokens_per_s is empty"):
        TableRow(layout=Layout(), status="completed", step_time_s=1.0)
    with pytest.raises(TableInvalidError, match="status='lost' is not one of"):
        TableRow(layout=Layout(), status="lost")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is empty"),
        ("\n\n", "is empty"),
        (make_text().replace(",", ";"), "columns are separated by commas"),
        (make_text().replace("source,cluster", "cluster,cluster"), "'cluster' more than once"),
        (make_text().replace("made up,", "made up,,"), "row 1 (line 2): has 30 fields, and the"),
        (make_text().replace("made up,", ""), "has 28 fields, and the header has 29"),
        (make_text().replace("made up", '"made up'), "a quote opens a field there, and none close"),
        (make_text().replace("made up", '"made" up'), "line 2: is not CSV: text follows the quote"),
        (make_text().replace("made up", "x" * 200_000), "a field is longer than 131072 characters"),
        (make_text().replace("source,", "source ,"), "spaces around 'source '"),
    ],
)
def test_a_text_that_is_no_table_is_refused(text: str, reason: str) -> None:
    assert reason in refusal_of(text)


def test_a_file_that_is_no_text_or_not_there_is_refused_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "table.csv"

    def reason(content: bytes) -> str:
        path.write_bytes(content)
        message = refusal_of(str(path))
        assert message.startswith(f"{path}: ")
        return message

    assert "line 2 is not UTF-8 (byte 0xe9)" in reason(
        make_text().encode().replace(b"made up", b"made \xe9")
    )
    assert "line 1 is not UTF-8 (byte 0xff)" in reason(make_text().encode("utf-16"))
    assert "zero bytes" in reason(make_text().encode("utf-32-le"))
    missing = "cannot be read: No such file or directory"
    assert missing in refusal_of(str(tmp_path / "none.csv"))
    assert "cannot be read: Is a directory" in refusal_of(str(tmp_path))
    monkeypatch.setattr(reading_module, "MAX_TABLE_BYTES", 1 << 20)
    assert "is larger than 1 MiB" in reason(b"x" * ((1 << 20) + 1))


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


@pytest.mark.parametrize(
    ("stated", "recompute"),
    [("layernorm+core_attention", "core_attention+layernorm"), ("core_attention", "selective")],
)
def test_modules_may_stand_in_any_order(stated: str, recompute: str) -> None:
    assert read_table(make_text(make_row(recompute=stated))).rows[0].layout.recompute == recompute


def test_numbers_as_pandas_writes_a_column_with_gaps_are_whole() -> None:
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


@pytest.mark.parametrize(
    ("stated", "family"),
    [({}, "gpt"), ({"ffn_hidden_size": 1408}, "llama"), ({"family": "llama"}, "llama")],
)
def test_the_family_of_a_model_is_stated_or_follows_from_its_feed_forward_layers(
    stated: dict[str, Any], family: str
) -> None:
    assert read_table(make_text(make_row(**stated))).cells[0].model.family == family


def test_a_cluster_that_is_a_preset_has_its_constants_on_the_nodes_of_the_row() -> None:
    text = make_text(make_row(cluster="h100-sxm", device_memory_gb=80, step_time_s=0.2))
    cluster = read_table(text).cells[0].cluster
    preset = CLUSTER_PRESETS["h100-sxm"]
    assert cluster.peak_flops_per_s == preset.peak_flops_per_s
    assert cluster.inter_node_bandwidth_bytes_per_s == preset.inter_node_bandwidth_bytes_per_s
    assert (cluster.num_nodes, cluster.devices_per_node) == (2, 4)


ON_H100 = make_row(cluster="h100-sxm", device_memory_gb=80)
PRESET_OF_DEVICE = {
    "H800": "h800",
    "nvidia h100 96GB HBM2e, 2.4 TB/s, 500 W": "h100-hbm2e",
    "A100-PCIE-80GB": "a100-pcie",
}


@pytest.mark.parametrize("device", PRESET_OF_DEVICE)
def test_a_device_of_another_preset_has_its_speeds(device: str) -> None:
    (cell,) = read_table(make_text({**ON_H100, "device": device})).cells
    cluster, preset = cell.cluster, CLUSTER_PRESETS[PRESET_OF_DEVICE[device]]
    names = (
        *("device", "peak_flops_per_s", "memory_bandwidth_bytes_per_s"),
        *("intra_node_bandwidth_bytes_per_s", "shared_intra_node_path"),
    )
    speeds, of_preset = (
        {name: getattr(each, name) for name in names} for each in (cluster, preset)
    )
    assert speeds == of_preset


@pytest.mark.parametrize("device", PRESET_OF_DEVICE)
def test_a_device_of_another_preset_keeps_name_size_and_network(device: str) -> None:
    cluster = read_table(make_text({**ON_H100, "device": device})).cells[0].cluster
    assert (cluster.name, cluster.devices_per_node) == ("h100-sxm", 4)
    assert cluster.inter_node_bandwidth_bytes_per_s == 50e9


@pytest.mark.parametrize("device", PRESET_OF_DEVICE)
def test_a_device_of_another_preset_is_noted_and_written_back(device: str) -> None:
    table = read_table(make_text({**ON_H100, "device": device}))
    said = f"the speeds are those of device='{device}'"
    assert any(note.startswith(said) for note in table.notes)
    assert table.cells[0].rows[0].aside["device"] == device


@pytest.mark.parametrize("device", ["H100", "a card of 500 W"])
def test_a_device_that_no_preset_is_for_has_the_clusters_speeds(device: str) -> None:
    table = read_table(make_text({**ON_H100, "device": device}))
    assert table.cells[0].cluster.device == CLUSTER_PRESETS["h100-sxm"].device
    assert any(f"no preset is for device='{device}'" in note for note in table.notes)


def test_a_clusters_own_device_leaves_its_links_as_they_are() -> None:
    """Also where another preset has the same device."""
    four = make_row(cluster="a100-sxm-4", device_memory_gb=40)
    device = CLUSTER_PRESETS["a100-sxm"].device
    (cell,) = read_table(make_text({**four, "device": device})).cells
    near = CLUSTER_PRESETS["a100-sxm-4"].intra_node_bandwidth_bytes_per_s
    assert cell.cluster.intra_node_bandwidth_bytes_per_s == near


def test_a_device_has_its_speeds_in_a_cluster_without_a_preset() -> None:
    own = read_table(make_text(make_row(device="H800")))
    assert own.cells[0].cluster.peak_flops_per_s == CLUSTER_PRESETS["h800"].peak_flops_per_s


def test_rows_of_one_cluster_with_two_devices_are_refused() -> None:
    other = {**ON_H100, "micro_batch_size": 2, "num_microbatches": 2}
    with pytest.raises(TableInvalidError, match="'h100-sxm' has device=NVIDIA H100"):
        read_table(make_text({**ON_H100, "device": "H800"}, other))


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


def test_rows_that_differ_in_an_unknown_column_stay_apart_and_the_column_is_named() -> None:
    rows = (
        make_row(technique="eager", step_time_s=0.6, node="n1"),
        make_row(technique="compile", step_time_s=0.5, node="n1"),
        make_row(technique="eager", step_time_s=0.64, node="n1 "),
        make_row(technique="eager", tp=4, pp=1, node="n2"),
    )
    table = read_table(make_text(*rows))
    (cell,) = table.cells
    assert [row.step_time_s for row in cell.merged] == [0.62, 0.5, 0.5]
    (note,) = [note for note in table.notes if "differ" in note]
    assert note == (
        "rows of one layout differ in 'technique' ('eager', 'compile'), which the format does not "
        "know: they are kept apart (3 rows)"
    )
    assert [sample.step_time_s for sample in knowledge_of(table.cells)] == [0.62, 0.5, 0.5]
    assert read_table(write_table(table)) == table


def test_runs_that_an_unknown_column_parts_do_not_contradict_each_other() -> None:
    full = make_row(technique="eager", status="out_of_memory")
    table = read_table(make_text(full, make_row(technique="compile"), make_row(step_time_s=9)))
    assert [row.status for row in table.cells[0].merged] == ["out_of_memory", *["completed"] * 2]
    with pytest.raises(TableInvalidError, match=r"row 2 .* and row 1 .* contradict each other"):
        read_table(make_text(full, make_row(technique=" eager")))


def test_columns_of_results_and_of_row_numbers_part_no_repeats() -> None:
    for name in ("others_share", "rank", "predicted_fits", "", "Unnamed: 0"):
        rows = (make_row(**{name: place}) for place in (1, 2))
        table = read_table(make_text(*rows))
        assert len(table.cells[0].merged) == 1, name
        assert not [note for note in table.notes if "differ" in note]


def test_a_note_about_many_columns_names_some() -> None:
    columns = ("a", "b", "c", "d", "e")
    rows = [make_row(**dict.fromkeys(columns, f"{place}")) for place in range(3)]
    notes = "\n".join(read_table(make_text(*rows)).notes)
    assert "differ in 'a', 'b', 'c' and 2 more, which the format does not know" in notes


def test_every_column_of_the_format_is_in_its_reference() -> None:
    page = Path("docs/reference/measurement-tables.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert [c for c in (*COLUMNS, *EXTRA_COLUMNS) if not any(f"`{c}`" in row for row in rows)] == []
