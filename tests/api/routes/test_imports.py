"""Measurement tables over HTTP and on the command line: in as campaigns, out as tables."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from api.campaigns import imports
from search_spaces.spec.layout import Layout
from search_spaces.tables import read_table
from tests.kit.api import Api, Command
from tests.kit.store import failed
from tests.results_db.campaigns.test_imports import unnumbered, varied_rows
from tests.search_spaces.tables.tables import layouts, make_row, make_text

CSV = {"Content-Type": "text/csv"}


def post(api: Api, text: str | bytes, status: int = 201, **query: Any) -> Any:
    body = text.encode() if isinstance(text, str) else text
    answer = api.http.post("/v1/campaigns/import", content=body, headers=CSV, params=query)
    assert answer.status_code == status, answer.text
    return answer.json()


def table_of(api: Api, campaign: str) -> str:
    answer = api.http.get(f"/v1/campaigns/{campaign}/table")
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/csv")
    return answer.text


def two_cells() -> str:
    larger = [
        {**layout, "num_microbatches": 2 * layout["num_microbatches"]} for layout in layouts()
    ]
    return make_text(
        *(make_row(**layout) for layout in layouts()),
        *(make_row(**layout, global_batch_size=16, step_time_s=0.9) for layout in larger),
    )


def test_a_table_becomes_a_campaign_that_has_ended(api: Api) -> None:
    answer = post(api, make_text(*varied_rows()), name="theirs")
    (campaign,) = answer["campaigns"]
    assert (campaign["name"], campaign["state"], campaign["reason"]) == (
        "theirs",
        "COMPLETED",
        "imported",
    )
    assert campaign["progress"]["best_trial"] == 2
    assert "sequence_parallel is not stated: 0 stands in (1 row)" in answer["notes"]
    assert answer["notes"] == api.get("/campaigns/theirs")["warnings"]
    page = api.get("/campaigns/theirs/leaderboard")
    assert [trial["number"] for trial in page["trials"]][:2] == [2, 1]
    assert page["trials"][0]["measurement"]["mfu"] is None
    trials = api.get("/campaigns/theirs/trials")["trials"]
    assert [trial["state"] for trial in trials][4:6] == ["INFEASIBLE", "FAILED"]


def test_an_imported_campaign_says_where_it_comes_from_and_has_no_analysis(
    api: Api, command: Command
) -> None:
    source = "simulated a100-1.3b, seed 3"
    post(api, make_text(*(make_row(**each, source=source) for each in layouts())), name="theirs")
    api.submit(name="ours")
    assert api.get("/campaigns/theirs/leaderboard")["source"] == source
    assert api.get("/campaigns/ours/leaderboard")["source"] is None
    assert f"imported, not measured here: {source}" in command("leaderboard", "theirs").output
    ranked = api.http.get("/v1/campaigns/theirs/leaderboard", params={"format": "csv"}).text
    assert {row["source"] for row in csv.DictReader(io.StringIO(ranked))} == {source}

    problem = api.get("/campaigns/theirs/analysis", status=404)
    assert "'theirs' is imported, and has no analysis" in problem["detail"]


def test_cells_become_campaigns_named_after_what_they_are_and_are_selected_by_keys(
    api: Api,
) -> None:
    answer = post(api, two_cells())
    assert [campaign["name"] for campaign in answer["campaigns"]] == [
        "small-gpt-8xtestbox-s512-b8",
        "small-gpt-8xtestbox-s512-b16",
    ]
    numbered = post(api, two_cells(), name="theirs")
    assert [campaign["name"] for campaign in numbered["campaigns"]] == ["theirs-1", "theirs-2"]

    answer = post(api, two_cells(), name="large", cell=["global_batch_size=16"])
    assert [campaign["name"] for campaign in answer["campaigns"]] == ["large"]
    assert {t["global_batch_size"] for t in api.get("/campaigns/large/trials")["trials"]} == {16}
    problem = post(api, two_cells(), 422, cell=["colour=red"])
    assert "'colour=red' selects no cells" in problem["detail"]
    assert "no cell is selected" in post(api, two_cells(), 422, cell=["model=x"])["detail"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (make_text(make_row(), make_row(tp=3)), "row 2 (line 3): tp*pp*dp=3*2*2=12 is not num_dev"),
        (
            make_text(make_row(), make_row(model="other", step_time_s=0.5, tokens_per_s=1)),
            "row 2 (line 3)",
        ),
        ("/etc/hostname", "the header is one column, '/etc/hostname'"),
        (b"tp,pp\n\xff,2\n", "line 2 is not UTF-8"),
    ],
)
def test_a_bad_table_is_refused_with_the_row_and_nothing_is_kept(
    api: Api, text: str | bytes, message: str
) -> None:
    problem = post(api, text, 422)
    assert message in problem["detail"]
    assert problem["type"] == "urn:layout-tuner:problem:table-invalid"
    assert api.get("/campaigns")["campaigns"] == []


def test_a_name_that_is_taken_or_impossible_imports_nothing(api: Api) -> None:
    api.submit(name="theirs-2")
    assert "'theirs-2' exists already" in post(api, two_cells(), 409, name="theirs")["detail"]
    assert "is not 1 to 64 characters" in post(api, two_cells(), 422, name="a b")["detail"]
    assert [campaign["name"] for campaign in api.get("/campaigns")["campaigns"]] == ["theirs-2"]


def test_an_import_is_csv_of_a_largest_size(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = api.http.post("/v1/campaigns/import", json={})
    assert answer.status_code == 415
    assert "'application/json' is not text/csv" in answer.json()["detail"]

    assert post(api, b"x" * ((4 << 20) + 1), 413)["status"] == 413
    monkeypatch.setattr(imports, "MAX_IMPORTED_ROWS", 3)
    problem = post(api, make_text(*varied_rows()), 422)
    assert "1 cells of 8 rows are more than 200 cells or 3 rows" in problem["detail"]


def test_a_legal_winner_is_exported_and_an_illegal_one_says_why(api: Api) -> None:
    legal = make_row(**layouts()[0], recompute="full", precision="bf16", family="llama")
    across = make_row(
        tp=8,
        pp=1,
        dp=1,
        micro_batch_size=1,
        num_microbatches=8,
        vpp=3,
        step_time_s=0.3,
        family="llama",
    )
    post(api, make_text(legal, across), name="theirs")
    exported = api.get("/campaigns/theirs/exports", format="trainer", trial=1)
    assert exported["trial"] == 1
    assert exported["notes"][0] == "the layout was not measured here: it is imported, from made up"
    assert "rotary_base=10000 is assumed" in exported["notes"][1]
    problem = api.get("/campaigns/theirs/exports", status=409, format="trainer")
    assert "trial 2 of the imported campaign 'theirs' is not legal here: " in problem["detail"]
    assert "num_layers=8" in problem["detail"]


def test_the_table_of_a_measured_campaign_has_its_failures(api: Api) -> None:
    api.submit()
    worker = api.register()
    api.complete(worker, "first", Layout(num_microbatches=8), tokens_per_s=512.0)
    broken = api.store.trials.add(1, Layout(tp=2, num_microbatches=8))
    api.report(worker, api.lease(worker), failed("out_of_memory"))
    api.complete(worker, "first", Layout(pp=2, num_microbatches=8), oversubscribed=True)
    rows = list(csv.DictReader(io.StringIO(table_of(api, "first"))))
    assert [row["status"] for row in rows] == ["completed", "out_of_memory"]
    assert (rows[1]["tp"], rows[1]["tokens_per_s"]) == ("2", "")
    assert api.get(f"/trials/{broken.id}")["state"] == "INFEASIBLE"


def test_the_commands_import_a_table_print_it_again_and_say_which_row_is_wrong(
    api: Api, command: Command, tmp_path: Path
) -> None:
    file = tmp_path / "theirs.csv"
    file.write_text(two_cells())
    done = command("campaign", "import", str(file), "--cell", "global_batch_size=8")
    assert done.exit_code == 0, done.output
    assert "campaign small-gpt-8xtestbox-s512-b8 imported: " in done.output
    assert "note: family is not stated" in done.output
    shown = command("campaign", "show", "small-gpt-8xtestbox-s512-b8").output
    assert f"imported: {len(layouts())} layouts" in shown
    printed = command("campaign", "table", "small-gpt-8xtestbox-s512-b8").output
    assert unnumbered(read_table(printed)) == unnumbered(read_table(two_cells()))[:1]
    board = command("leaderboard", "small-gpt-8xtestbox-s512-b8").output
    assert f"of {len(layouts())} by tokens_per_s_per_device" in board
    as_json = command("campaign", "import", str(file), "--name", "n", "--json")
    assert [each["name"] for each in json.loads(as_json.output)["campaigns"]] == ["n-1", "n-2"]

    file.write_text(make_text(make_row(), make_row(tp=3)))
    done = command("campaign", "import", str(file))
    assert done.exit_code == 1
    assert "row 2 (line 3): tp*pp*dp=3*2*2=12" in done.output
