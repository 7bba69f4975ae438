import csv
import io
import json
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from api.exporters import FORMATS
from search_spaces.spec.layout import Layout
from search_spaces.tables import COLUMNS
from tests.kit.api import Api
from tests.kit.store import completed, failed

PUBLISHED_COLUMNS = (
    "source,cluster,device_memory_gb,num_devices,devices_per_node,model,num_layers,hidden_size,"
    "ffn_hidden_size,num_heads,num_kv_heads,seq_length,vocab_size,tied_embeddings,tp,pp,dp,vpp,"
    "sequence_parallel,micro_batch_size,num_microbatches,global_batch_size,zero_stage,recompute,"
    "precision,status,tokens_per_s,step_time_s,peak_memory_bytes"
)
"""The header of the published tables, character for character."""


@pytest.fixture
def api_with_trials(api: Api) -> Api:
    """Four trials: three completed (one oversubscribed), one out of memory."""
    campaign = api.submit()
    worker = api.register()
    api.complete(worker, "first", Layout(num_microbatches=8), tokens_per_s=100.0)
    api.complete(worker, "first", Layout(tp=2, num_microbatches=8), tokens_per_s=150.0)
    api.complete(
        worker, "first", Layout(pp=2, num_microbatches=8), tokens_per_s=9e6, oversubscribed=True
    )
    api.store.trials.add(campaign["id"], Layout(tp=2, pp=2, num_microbatches=8))
    api.report(worker, api.lease(worker), failed("out_of_memory"))
    return api


def test_the_leaderboard_ranks_by_the_objective_and_says_where_the_time_of_a_step_went(
    api_with_trials: Api,
) -> None:
    page = api_with_trials.get("/campaigns/first/leaderboard")
    assert page["objective"] == "tokens_per_s"
    assert [(t["rank"], t["number"]) for t in page["trials"]] == [(1, 2), (2, 1)]
    assert (page["total"], page["next_offset"]) == (2, None)

    (best, _) = api_with_trials.get("/campaigns/first/leaderboard")["trials"]
    parts = best["measurement"]["breakdown"]
    names = ("compute", "tp", "cp", "pp", "dp", "ep", "optimizer", "unexplained")
    assert set(parts) == {f"{name}_s" for name in names}
    assert sum(parts.values()) == pytest.approx(best["measurement"]["step_time_s"])
    assert best["measurement"]["warmup_settled"] is True
    assert best["measurement"]["skipped_steps"] == 0


def test_the_leaderboard_as_csv_is_a_measurement_table(
    api_with_trials: Api, http: TestClient
) -> None:
    answer = http.get("/v1/campaigns/first/leaderboard", params={"format": "csv"})
    assert answer.headers["content-type"].startswith("text/csv")
    assert answer.text.splitlines()[0] == PUBLISHED_COLUMNS
    best, second = csv.DictReader(io.StringIO(answer.text))
    assert (best["tp"], best["tokens_per_s"], best["status"]) == ("2", "150.0", "completed")
    assert (best["num_devices"], best["global_batch_size"]) == ("2", "8")
    assert (best["model"], best["num_layers"], best["tied_embeddings"]) == ("tiny", "4", "0")
    assert (best["cluster"], best["device_memory_gb"]) == ("local-cpu", "8")
    assert best["devices_per_node"] == "4"
    assert best["source"] == second["source"]
    assert "" not in best.values()

    assert ",".join(COLUMNS) == PUBLISHED_COLUMNS


def test_the_best_trial_is_exported_unless_another_is_named_and_none_that_did_not_complete(
    api_with_trials: Api, tmp_path: Path
) -> None:
    best = api_with_trials.get("/campaigns/first/exports", format="trainer")
    assert (best["format"], best["trial"]) == ("embedded", 2)
    assert "job.json" in [file["name"] for file in best["files"]]
    assert best["target_version"]
    other = api_with_trials.get("/campaigns/first/exports", format="megatron-lm", trial=1)
    assert other["trial"] == 1
    assert any(file["executable"] for file in other["files"])

    api = api_with_trials
    problem = api.get("/campaigns/first/exports", status=409, format="trainer", trial=4)
    assert problem["type"].endswith(":export-unavailable")
    assert "trial 4 of campaign 'first' is INFEASIBLE (out_of_memory)" in problem["detail"]
    worker = api.register("w2")
    api.store.trials.add(api.get("/campaigns/first")["id"], Layout(tp=4, num_microbatches=8))
    lease = api.lease(worker)
    problem = api.get("/campaigns/first/exports", status=409, format="trainer", trial=5)
    assert "is RUNNING;" in problem["detail"]
    api.report(worker, lease, failed("crashed"))
    problem = api.get("/campaigns/first/exports", status=409, format="megatron-lm", trial=5)
    assert "is FAILED (crashed);" in problem["detail"]


def test_a_campaign_that_compiles_its_probes_exports_a_job_that_compiles(api: Api) -> None:
    api.submit(probe={"compile": True})
    api.complete(api.register(), "first", Layout(num_microbatches=8))
    (file,) = api.get("/campaigns/first/exports", format="trainer")["files"]
    assert json.loads(file["content"])["compile"] is True


def test_an_impossible_export_says_why(api: Api) -> None:
    api.submit()
    problem = api.get("/campaigns/first/exports", status=409, format="trainer")
    assert "no ranked trial" in problem["detail"]
    worker = api.register()
    api.complete(worker, "first", Layout(num_microbatches=8))
    problem = api.get("/campaigns/first/exports", status=422, format="paper")
    assert ", ".join(FORMATS) in problem["detail"]
    api.get("/campaigns/first/exports", status=404, format="trainer", trial=9)


def test_the_leaderboard_pools_repeats_and_says_how_sure_it_is(api: Api, http: TestClient) -> None:
    campaign = api.submit()
    worker = api.register()
    api.complete(worker, "first", Layout(num_microbatches=8), tokens_per_s=100.0)
    api.complete(worker, "first", Layout(tp=2, num_microbatches=8), tokens_per_s=110.0)
    again = api.store.trials.repeat(api.store.trials.find(campaign["id"])[0].id)
    outcome = completed(again.layout, tokens_per_s=130.0)
    api.report(worker, api.lease(worker), outcome)
    best, second = api.get("/campaigns/first/leaderboard")["trials"]
    assert (best["number"], best["num_runs"], second["num_runs"]) == (1, 2, 1)
    pooled = 2 / (1 / 100.0 + 1 / 130.0)
    assert best["value"] == best["objectives"]["tokens_per_s"] == pytest.approx(pooled)
    slower = best["measurement"]["step_time_s"] / best["step_time_s"]
    assert best["measurement"]["tokens_per_s"] * slower == pytest.approx(pooled)
    other = api.get("/campaigns/first/leaderboard", objective="tokens_per_node_hour")["trials"][0]
    assert other["objectives"]["tokens_per_s"] == pytest.approx(pooled)
    assert best["value_low"] < pooled < best["value_high"]
    assert best["tied_with_first"]
    assert second["tied_with_first"], "the two runs of the first are further apart than that"
    query = {"format": "csv", "intervals": "true"}
    table = http.get("/v1/campaigns/first/leaderboard", params=query).text
    header, *_ = table.splitlines()
    assert header.startswith(PUBLISHED_COLUMNS + ",num_runs,step_time_low_s")
    first, _ = csv.DictReader(io.StringIO(table))
    assert (first["num_runs"], first["shortened"], first["tied_with_first"]) == ("2", "0", "1")
    assert float(first["tokens_per_s"]) == pytest.approx(pooled)
    assert api.get("/campaigns/first")["progress"]["best"] == pytest.approx(pooled)


def test_a_layout_that_was_stopped_early_is_shown_as_such_and_not_exported(api: Api) -> None:
    api.submit()
    worker = api.register()
    api.complete(worker, "first", Layout(num_microbatches=8), shortened=True, iterations_asked=10)
    (only,) = api.get("/campaigns/first/leaderboard")["trials"]
    assert only["shortened"]
    assert only["measurement"]["iterations_asked"] == 10
    assert api.get("/campaigns/first")["progress"]["best"] is None
    api.get("/campaigns/first/exports", status=409, format="trainer")
