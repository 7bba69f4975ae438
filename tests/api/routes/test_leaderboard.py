"""The leaderboard over HTTP and in the terminal: what it lists, in which order, and as what."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from layout_tuner.search_spaces.layouts.layout import Layout
from tests.kit.api import CLUSTER, Api, Command
from tests.kit.store import failed

GIB = 1 << 30
OBJECTIVES = ["tokens_per_s", "memory_headroom"]
TP, PLAIN, PP = (Layout(**degree, num_microbatches=8) for degree in ({"tp": 2}, {}, {"pp": 2}))
SMALL = Layout(num_microbatches=4, micro_batch_size=2)


@pytest.fixture(scope="module")
def api(module_api: Api) -> Api:
    """Three campaigns.

    first: four layouts of two nodes; the second was measured three times, the third takes both.
    goals: the second is beaten in both objectives, and the first breaks the constraint.
    single: two were measured, the second twice; one shared its devices, and one failed.
    """
    api, two_nodes = module_api, {**CLUSTER, "num_nodes": 2}
    worker = api.register(num_nodes=2)
    on_two = Layout(pp=2, num_microbatches=8, num_nodes=2)
    runs = ((TP, 1000.0, 6), (PLAIN, 970.0, 5), (on_two, 960.0, 4), (SMALL, 500.0, 3))
    goals = {"objective": OBJECTIVES, "constraints": {"memory_headroom": 0.1}}
    api.submit(**goals, cluster=two_nodes)
    measure(api, worker, "first", *runs)
    repeat(api, worker, 2, 980.0, 965.0)
    api.submit(name="goals", objective=OBJECTIVES, constraints={"memory_headroom": 0.25})
    measure(api, worker, "goals", (PLAIN, 9000.0, 7), (TP, 1000.0, 6), (PP, 2000.0, 5))
    campaign = api.submit(name="single")
    measure(api, worker, "single", (PLAIN, 120.0, 5), (TP, 100.0, 5))
    repeat(api, worker, api.get("/campaigns/single/trials")["trials"][1]["id"], 130.0)
    api.complete(worker, "single", PP, tokens_per_s=9e6, oversubscribed=True)
    api.store.trials.add(campaign["id"], Layout(tp=2, pp=2, num_microbatches=8))
    api.report(worker, api.lease(worker), failed("out_of_memory"))
    return api


def measure(api: Api, worker: str, campaign: str, *runs: tuple[Layout, float, int]) -> None:
    for layout, speed, gib in runs:
        api.complete(worker, campaign, layout, tokens_per_s=speed, peak_memory_bytes=gib * GIB)


def repeat(api: Api, worker: str, trial: int, *speeds: float) -> None:
    for speed in speeds:
        again = api.store.trials.repeat(trial)
        lease = api.lease(worker)
        assert lease["trial_id"] == again.id
        api.report_measured(worker, lease, again.layout, tokens_per_s=speed)


def page_of(api: Api, campaign: str = "first", **query: Any) -> Any:
    return api.get(f"/campaigns/{campaign}/leaderboard", **query)


def numbers(api: Api, campaign: str = "first", **query: Any) -> list[int]:
    return [trial["number"] for trial in page_of(api, campaign, **query)["trials"]]


def rows_of(api: Api, campaign: str = "first", **query: Any) -> list[dict[str, str]]:
    return api.table(f"/campaigns/{campaign}/leaderboard", format="csv", **query)


def test_the_runs_of_a_layout_are_pooled(api: Api) -> None:
    page = page_of(api, "single")
    assert (page["objective"], page["total"], page["next_offset"]) == ("tokens_per_s", 2, None)
    found = [(each["rank"], each["number"], each["num_runs"]) for each in page["trials"]]
    assert found == [(1, 1, 1), (2, 2, 2)]
    pooled = pytest.approx(2 / (1 / 100.0 + 1 / 130.0))
    second = page["trials"][1]
    assert second["value"] == second["objectives"]["tokens_per_s"] == pooled
    slower = second["measurement"]["step_time_s"] / second["step_time_s"]
    assert second["measurement"]["tokens_per_s"] * slower == pooled
    other = page_of(api, "single", objective="tokens_per_node_hour")["trials"][1]
    assert other["objectives"]["tokens_per_s"] == pooled
    assert api.get("/campaigns/single")["progress"]["best"] == pytest.approx(120.0)


def test_a_row_says_how_sure_its_value_is(api: Api) -> None:
    best, second = page_of(api, "single")["trials"]
    assert second["value_low"] < second["value"] < second["value_high"]
    assert best["tied_with_first"]
    assert second["tied_with_first"], "its two runs are further apart than that"


def test_a_row_says_where_the_time_of_its_step_went(api: Api) -> None:
    measured = page_of(api, "single")["trials"][0]["measurement"]
    assert sum(measured["breakdown"].values()) == pytest.approx(measured["step_time_s"])
    assert measured["warmup_settled"] is True
    assert measured["skipped_steps"] == 0


def test_tables_contain_the_pooled_runs(api: Api) -> None:
    best, second = rows_of(api, "single", intervals="true")
    assert (best["tp"], best["tokens_per_s"], best["status"]) == ("1", "120.0", "completed")
    assert (second["num_runs"], second["shortened"], second["tied_with_first"]) == ("2", "0", "1")
    assert float(second["tokens_per_s"]) == pytest.approx(2 / (1 / 100.0 + 1 / 130.0))


def test_a_parquet_table_has_the_columns_and_values_of_the_csv_table(api: Api) -> None:
    query = {"intervals": True, "limit": 3, "tp": 1}
    path = "/v1/campaigns/first/leaderboard"
    answer = api.http.get(path, params={**query, "format": "parquet"})
    assert answer.headers["content-type"] == "application/vnd.apache.parquet"
    table = parquet.read_table(io.BytesIO(answer.content))
    rows = rows_of(api, **query)
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


def test_a_filter_narrows_and_a_table_orders_what_is_listed(api: Api) -> None:
    whole = {trial["number"]: trial for trial in page_of(api)["trials"]}
    page = page_of(api, tp=1, max_peak_memory_bytes=5 * GIB)
    assert [trial["number"] for trial in page["trials"]] == [2, 3, 4]
    assert page["total"] == 3
    # Each keeps its rank, and stays compared with the first of all, which is not listed.
    assert page["trials"] == [whole[number] for number in (2, 3, 4)]
    assert min(trial["rank"] for trial in page["trials"]) > 1
    second = page_of(api, tp=1, limit=1, offset=1)
    assert (second["trials"], second["next_offset"]) == ([whole[3]], 2)
    rows = rows_of(api, sort="peak_memory_bytes", order="desc")
    assert [float(row["peak_memory_bytes"]) / GIB for row in rows] == [6, 5, 4, 3]


def test_the_cheapest_within_a_share_of_the_best_come_first(api: Api) -> None:
    page = page_of(api, within=5)
    # The layout on two nodes is within 5 % too, at twice the node-hours a token.
    assert [trial["number"] for trial in page["trials"]] == [1, 2, 3]
    ranks = {trial["number"]: trial["rank"] for trial in page_of(api)["trials"]}
    assert [trial["rank"] for trial in page["trials"]] == [ranks[1], ranks[2], ranks[3]]
    costs = [trial["objectives"]["tokens_per_node_hour"] for trial in page["trials"]]
    assert costs == sorted(costs, reverse=True)
    assert costs[2] < costs[1] / 1.9
    assert numbers(api, within=2.9) == [1]
    assert numbers(api, within=100) == [1, 2, 4, 3]
    assert numbers(api, within=5, num_nodes=2) == [3]
    assert numbers(api, within=40, objective="tokens_per_s_per_device") == [2]


def test_several_objectives_are_ranked_by_the_first(api: Api) -> None:
    campaign = api.get("/campaigns/goals")
    assert (campaign["objective"], campaign["objectives"]) == ("tokens_per_s", OBJECTIVES)
    assert campaign["spec"]["objective"] == OBJECTIVES
    page = page_of(api, "goals")
    found = [(each["number"], each["rank"], each["on_front"]) for each in page["trials"]]
    assert found == [(3, 1, True), (2, 2, False)]
    assert page["trials"][0]["objectives"] == {"tokens_per_s": 2000.0, "memory_headroom": 0.375}


def test_what_breaks_a_constraint_is_kept_and_not_ranked(api: Api) -> None:
    page = page_of(api, "goals")
    assert (page["total"], page["constrained"], page["objectives"]) == (2, 1, OBJECTIVES)
    best = api.get("/campaigns/goals")["progress"]["best_trial"]
    assert best == 3, "the fastest breaks the constraint"
    kept = api.get("/campaigns/goals/trials")["trials"][0]
    assert kept["measurement"]["tokens_per_s"] == 9000.0, "what breaks it is kept and shown"
    assert api.get("/campaigns/goals/exports", format="trainer")["trial"] == 3


def test_the_front_is_listed_alone_where_that_is_asked_for(api: Api) -> None:
    front = page_of(api, "goals", front=True)
    assert ([each["number"] for each in front["trials"]], front["total"]) == ([3], 1)
    assert len(rows_of(api, "goals", front=True)) == 1


def test_layouts_are_ranked_by_another_objective_where_that_is_asked_for(api: Api) -> None:
    page = page_of(api, "goals", objective="tokens_per_node_hour")
    assert page["objective"] == "tokens_per_node_hour"
    assert page["trials"][0]["objectives"]["tokens_per_node_hour"] == 2000.0 * 3600


def test_the_command_lists_every_objective_and_counts_what_breaks_a_constraint(
    command: Command,
) -> None:
    shown = command("leaderboard", "goals").output.splitlines()
    assert shown[0] == "goals: the best 2 of 2 by tokens_per_s"
    heads = shown[1].split()
    shown_heads = heads[heads.index("tokens/s") : heads.index("step")]
    assert shown_heads == ["tokens/s", "memory", "headroom", "front"]
    assert all(word in shown[3] for word in ("2,000", "37.5%", " * "))
    assert " * " not in shown[4]
    assert shown[-1] == "not ranked, for they break the campaign's constraints: 1 completed trial"


def test_the_command_lists_the_front_in_every_format(command: Command) -> None:
    table = command("leaderboard", "goals", "--front").output
    assert table.startswith("goals: of the front, the best 1 of 1 by tokens_per_s")
    assert len(command("leaderboard", "goals", "--front", "--csv").output.splitlines()) == 2
    page = json.loads(command("leaderboard", "goals", "--front", "--json").output)
    assert [trial["number"] for trial in page["trials"]] == [3]


def test_the_command_lists_the_cheapest_within_a_share_of_the_best(command: Command) -> None:
    cheapest = " ".join(command("leaderboard", "first", "--within", "5").output.split())
    assert "the cheapest 3 of 3 by tokens_per_s, at most 5 % under the best" in cheapest


def test_the_command_writes_every_layout_into_a_parquet_file(
    command: Command, tmp_path: Path
) -> None:
    target = tmp_path / "board.parquet"
    command("leaderboard", "first", "--parquet", str(target), "--intervals")
    assert parquet.read_table(target).num_rows == 4


def test_without_pyarrow_only_parquet_is_refused(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # as if it were not installed
    path = "/v1/campaigns/first/leaderboard"
    refused = api.http.get(path, params={"format": "parquet"})
    assert refused.status_code == 501
    assert refused.json()["detail"] == (
        "`format=parquet` needs pyarrow, which is not installed; run: pip install "
        "'layout-tuner[service]' where the service runs; or take format=csv"
    )
    assert api.http.get(path, params={"format": "csv"}).status_code == 200


def test_an_empty_board_has_columns_and_what_was_stopped_early_is_no_recommendation(
    api: Api,
) -> None:
    api.submit(name="short", cluster={**CLUSTER, "num_nodes": 2})
    page = page_of(api, "short")
    assert (page["trials"], page["total"], page["next_offset"]) == ([], 0, None)
    assert page_of(api, "short", within=5, tp=2)["total"] == 0
    path = "/v1/campaigns/short/leaderboard"
    answer = api.http.get(path, params={"format": "parquet"})
    table = parquet.read_table(io.BytesIO(answer.content))
    assert table.num_rows == 0
    assert {"tp", "tokens_per_s", "status"} <= set(table.column_names)

    worker = api.register("w2", num_nodes=2)
    short = {"shortened": True, "iterations_asked": 10}
    api.complete(worker, "short", SMALL, tokens_per_s=990.0, **short)
    (only,) = page_of(api, "short")["trials"]
    assert (only["shortened"], only["measurement"]["iterations_asked"]) == (True, 10)
    assert api.get("/campaigns/short")["progress"]["best"] is None
    on_two = Layout(num_microbatches=8, num_nodes=2)
    api.complete(worker, "short", on_two, tokens_per_s=1000.0)
    assert numbers(api, "short", within=5) == [2]
