"""The leaderboard over HTTP: what it lists, in which order, and as what."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from pyarrow import parquet

from search_spaces.spec.layout import Layout
from tests.kit.api import CLUSTER, Api, Command

GIB = 1 << 30
FAST = Layout(tp=2, num_microbatches=8)
CLOSE = Layout(num_microbatches=8)
SMALL = Layout(num_microbatches=4, micro_batch_size=2)
PATH = "/campaigns/first/leaderboard"


@pytest.fixture
def measured(api: Api) -> Api:
    """Four layouts: the close one was measured three times, and the slow one takes two nodes."""
    api.submit(
        objective=["tokens_per_s", "memory_headroom"],
        cluster={**CLUSTER, "num_nodes": 2},
        constraints={"memory_headroom": 0.1},
    )
    worker = api.register(num_nodes=2)
    for layout, speed, peak in (
        (FAST, 1000.0, 6 * GIB),
        (CLOSE, 970.0, 5 * GIB),
        (Layout(pp=2, num_microbatches=8, num_nodes=2), 960.0, 4 * GIB),
        (SMALL, 500.0, 3 * GIB),
    ):
        api.complete(worker, "first", layout, tokens_per_s=speed, peak_memory_bytes=peak)
    for speed in (980.0, 965.0):
        again = api.store.trials.repeat(2)
        lease = api.lease(worker)
        assert lease["trial_id"] == again.id
        api.report_measured(worker, lease, CLOSE, tokens_per_s=speed)
    return api


def test_an_empty_leaderboard_is_a_page_and_a_table_with_columns(
    api: Api, http: TestClient
) -> None:
    api.submit()
    page = api.get(PATH)
    assert (page["trials"], page["total"], page["next_offset"]) == ([], 0, None)
    assert api.get(PATH, within=5, tp=2)["total"] == 0

    answer = http.get(f"/v1{PATH}", params={"format": "parquet"})
    table = parquet.read_table(io.BytesIO(answer.content))
    assert table.num_rows == 0
    assert {"tp", "tokens_per_s", "status"} <= set(table.column_names)


def test_a_filter_narrows_and_a_table_orders_what_is_listed(
    measured: Api, http: TestClient
) -> None:
    whole = {trial["number"]: trial for trial in measured.get(PATH)["trials"]}
    page = measured.get(PATH, tp=1, max_peak_memory_bytes=5 * GIB)
    assert [trial["number"] for trial in page["trials"]] == [2, 3, 4]
    assert page["total"] == 3
    # Each keeps its rank, and stays compared with the first of all, which is not listed.
    for trial in page["trials"]:
        assert trial == whole[trial["number"]]
    assert min(trial["rank"] for trial in page["trials"]) > 1
    second = measured.get(PATH, tp=1, limit=1, offset=1)
    assert ([trial["number"] for trial in second["trials"]], second["next_offset"]) == ([3], 2)
    assert second["trials"][0]["rank"] == whole[3]["rank"]

    query = {"sort": "peak_memory_bytes", "order": "desc", "format": "csv"}
    rows = list(csv.DictReader(io.StringIO(http.get(f"/v1{PATH}", params=query).text)))
    peaks = [float(row["peak_memory_bytes"]) for row in rows]
    assert peaks == sorted(peaks, reverse=True)
    assert len(peaks) == 4


def test_the_cheapest_within_a_share_of_the_best_come_first(measured: Api) -> None:
    page = measured.get(PATH, within=5)
    # The layout on two nodes is within 5 % too, at twice the node-hours a token.
    assert [trial["number"] for trial in page["trials"]] == [1, 2, 3]
    ranks = {trial["number"]: trial["rank"] for trial in measured.get(PATH)["trials"]}
    assert [trial["rank"] for trial in page["trials"]] == [ranks[1], ranks[2], ranks[3]]
    costs = [trial["objectives"]["tokens_per_node_hour"] for trial in page["trials"]]
    assert costs == sorted(costs, reverse=True)
    assert costs[2] < costs[1] / 1.9
    assert [trial["number"] for trial in measured.get(PATH, within=2.9)["trials"]] == [1]
    assert [trial["number"] for trial in measured.get(PATH, within=100)["trials"]] == [1, 2, 4, 3]
    two_nodes = measured.get(PATH, within=5, num_nodes=2)
    assert [trial["number"] for trial in two_nodes["trials"]] == [3]
    per_device = measured.get(PATH, within=40, objective="tokens_per_s_per_device")
    assert [trial["number"] for trial in per_device["trials"]] == [2]


def test_what_was_stopped_early_is_not_recommended_as_the_cheapest(api: Api) -> None:
    api.submit(cluster={**CLUSTER, "num_nodes": 2})
    worker = api.register(num_nodes=2)
    api.complete(worker, "first", Layout(num_microbatches=8, num_nodes=2), tokens_per_s=1000.0)
    short = {"shortened": True, "iterations_asked": 10}
    api.complete(worker, "first", SMALL, tokens_per_s=990.0, **short)
    assert [trial["number"] for trial in api.get(PATH, within=5)["trials"]] == [1]


def test_parquet_has_what_csv_has_with_types(measured: Api, http: TestClient) -> None:
    query = {"intervals": True, "limit": 3, "tp": 1}
    answer = http.get(f"/v1{PATH}", params={**query, "format": "parquet"})
    assert answer.headers["content-type"] == "application/vnd.apache.parquet"
    table = parquet.read_table(io.BytesIO(answer.content))
    text = http.get(f"/v1{PATH}", params={**query, "format": "csv"}).text
    rows = list(csv.DictReader(io.StringIO(text)))
    assert table.column_names == list(rows[0])
    assert len(rows) == 3
    for typed, row in zip(table.to_pylist(), rows, strict=True):
        for name, value in typed.items():
            if isinstance(value, bool):
                assert str(int(value)) == row[name]
            elif value is None:
                assert row[name] == ""
            else:
                assert value == type(value)(row[name])
    assert str(table.schema.field("step_time_s").type) == "double"
    assert str(table.schema.field("tp").type) == "int64"
    assert str(table.schema.field("shortened").type) == "bool"


def test_the_command_line_lists_the_cheapest_and_writes_parquet(
    measured: Api, command: Command, tmp_path: Path
) -> None:
    shown = command("leaderboard", "first", "--within", "5").output
    assert "the cheapest 3 of 3 by tokens_per_s, at most 5 % under the best" in " ".join(
        shown.split()
    )
    target = tmp_path / "board.parquet"
    command("leaderboard", "first", "--parquet", str(target), "--intervals")
    assert parquet.read_table(target).num_rows == 4
