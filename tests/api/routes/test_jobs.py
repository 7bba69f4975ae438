"""Jobs over HTTP, on pages and in the terminal: two of one layout are nowhere taken for one."""

from __future__ import annotations

from dataclasses import replace
from io import BytesIO
from typing import Any

import pytest
from pyarrow import parquet

from layout_tuner.client.campaigns import filter_query
from layout_tuner.results_db.trials.filter import TrialFilter
from layout_tuner.search_spaces.layouts.job_settings import JobSettings
from layout_tuner.search_spaces.layouts.layout import Layout
from tests.kit.api import CAMPAIGN, Api, Command, answered, client_of, ends

SPACE = {**CAMPAIGN["space"], "job": {"compile": [False, True]}}
PLAIN = Layout(num_microbatches=8)
COMPILED = replace(PLAIN, job=JobSettings({"compile": True}))
TWO = Layout(tp=2, num_microbatches=8)
LIST, BOARD = "/campaigns/first/trials", "/campaigns/first/leaderboard"


@pytest.fixture(scope="module")
def api(module_api: Api) -> Api:
    """The layouts of trials 1 and 2 are one, and 2 is compiled and faster; 3 is slower."""
    module_api.submit(
        model="tiny-llama", space=SPACE, baseline={"tp": 1, "pp": 1, "job": {"compile": True}}
    )
    worker = module_api.register()
    for layout, rate in ((PLAIN, 200.0), (COMPILED, 300.0), (TWO, 100.0)):
        module_api.complete(worker, "first", layout, tokens_per_s=rate)
    return module_api


def numbers(api: Api, path: str, **query: Any) -> list[int]:
    return [trial["number"] for trial in api.get(path, **query)["trials"]]


@pytest.mark.parametrize("path", [LIST, BOARD])
def test_jobs_are_filtered_and_sorted_by_a_knob_of_the_trainer(api: Api, path: str) -> None:
    assert numbers(api, path, **{"job.compile": "true"}) == [2]
    assert sorted(numbers(api, path, **{"job.compile": "false"})) == [1, 3]
    assert sorted(numbers(api, path, **{"job.compile": ["true", "false"]})) == [1, 2, 3]
    assert numbers(api, path, **{"job.compile": "false", "tp": 2}) == [3]
    assert numbers(api, path, sort="job.compile", order="desc")[0] == 2
    assert numbers(api, path, sort="job.compile")[-1] == 2


def test_pages_by_a_knob_of_the_trainer_go_on(api: Api) -> None:
    first = api.get(LIST, sort="job.compile", limit=2)
    second = api.get(LIST, sort="job.compile", limit=2, cursor=first["next_cursor"])
    assert [trial["number"] for trial in (*first["trials"], *second["trials"])] == [1, 3, 2]


@pytest.mark.parametrize("path", [LIST, BOARD])
@pytest.mark.parametrize(
    ("query", "words"),
    [
        ({"job.complie": "true"}, "job.complie is no job knob of this campaign"),
        ({"job.compile": "fast"}, "is not a switch"),
        ({"job.compile": ""}, "job.compile="),
        ({"min_job.compile": 1}, "has no bounds"),
        ({"max_job.compile": "x"}, "is not a whole number"),
        ({"sort": "job.complie"}, "job.complie is no job knob of this campaign"),
        ({"sort": "min_job.compile"}, "no sort key"),
        ({"job.Compile": "true"}, "unknown"),
    ],
)
def test_what_no_job_can_have_is_refused(
    api: Api, path: str, query: dict[str, Any], words: str
) -> None:
    assert words in str(api.get(path, status=422, **query))


def test_a_route_without_a_filter_takes_none_of_jobs(api: Api) -> None:
    api.get("/campaigns/first", status=422, **{"job.compile": "true"})


def test_the_baseline_is_the_job_and_not_its_layout(api: Api) -> None:
    trials = api.get(LIST)["trials"]
    assert [each["is_baseline"] for each in trials] == [False, True, False]
    assert [each["layout"].get("job") for each in trials] == [{}, {"compile": True}, {}]
    baseline = api.get("/campaigns/first")["baseline"]
    assert (baseline["trial_number"], baseline["layout"]["job"]) == (2, {"compile": True})
    assert baseline["gain"]["trial_number"] == 2
    best = api.get(BOARD)["trials"][0]
    assert (best["number"], best["num_runs"]) == (2, 1)


def test_tables_state_the_knob_of_every_row_and_are_read_back(api: Api) -> None:
    rows = api.table(BOARD, format="csv")
    assert [row["job.compile"] for row in rows] == ["true", "", ""]
    every = api.table("/campaigns/first/table")
    assert [row["job.compile"] for row in every] == ["", "true", ""]
    answer = api.http.get(f"/v1{BOARD}", params={"format": "parquet"})
    table = parquet.read_table(BytesIO(answer.content))
    assert table["job.compile"].to_pylist() == ["true", None, None]
    text = api.http.get(f"/v1{BOARD}", params={"format": "csv"}).content
    added = api.http.post(
        "/v1/campaigns/import",
        params={"name": "again"},
        content=text,
        headers={"Content-Type": "text/csv"},
    )
    assert added.status_code == 201, added.text
    listed = [
        each["layout"]["job"]
        for campaign in added.json()["campaigns"]
        for each in api.get(f"/campaigns/{campaign['id']}/leaderboard")["trials"]
    ]
    assert listed == [{"compile": True}, {}, {}]


def page_of(api: Api, path: str, **query: Any) -> str:
    return answered(api.http.get(path, params=query), 200).text


@pytest.mark.parametrize(
    ("path", "query", "words"),
    [
        ("/campaigns/first", {}, "searched beside the layout: compile false, true"),
        ("/campaigns/first", {}, 'href="/campaigns/first?sort=job.compile'),
        ("/campaigns/first", {}, 'name="job.compile" value="true"'),
        ("/campaigns/first", {"job.compile": "true"}, 'value="true" checked'),
        ("/trials/2", {}, "compile"),
        ("/compare", {"trial": ["1", "2"]}, ">compile<"),
        ("/v1/campaigns/first/report", {}, "compile"),
        (
            "/campaigns/first/figures/two-knobs.json",
            {"x": "job.compile", "y": "tp"},
            '"compile"',
        ),
        ("/campaigns/first/figures/slice.json", {"knob": "job.compile"}, "compile"),
        ("/submit", {"campaign": "first"}, "compile: [false, true]"),
        ("/submit", {"campaign": "first"}, "job: {compile: true}"),
    ],
)
def test_pages_tell_jobs_of_one_layout_apart(
    api: Api, path: str, query: dict[str, Any], words: str
) -> None:
    assert words in page_of(api, path, **query)


def test_a_list_of_trials_names_the_knobs_of_each_job(api: Api) -> None:
    every = page_of(api, "/campaigns/first/trials")
    plain = page_of(api, "/campaigns/first/trials", **{"job.compile": "false"})
    assert every.count("compile") > plain.count("compile")


def test_a_plot_of_an_unknown_job_knob_is_refused(api: Api) -> None:
    path = "/campaigns/first/figures/slice.json"
    answered(api.http.get(path, params={"knob": "job.no"}), 422)


def test_a_clone_searches_the_same_knobs(api: Api) -> None:
    clone = api.post("/campaigns/first/clone", {"name": "cloned"}, status=201)
    assert clone["spec"]["space"]["job"] == api.get("/campaigns/first")["spec"]["space"]["job"]


def test_the_terminal_filters_and_shows_jobs(api: Api, command: Command) -> None:
    listed = ends(command("trial", "list", "first", "--where", "job.compile=true"), 0)
    (row,) = [line for line in listed.output.splitlines() if "COMPLETED" in line]
    assert "compile" in row
    ends(command("trial", "list", "first", "--sort", "job.compile"), 0, "compile")
    ends(command("leaderboard", "first", "--where", "job.compile=false"), 0, "2 of 2")
    ends(command("campaign", "show", "first"), 0, "job knobs", "compile false, true")
    ends(command("trial", "show", "first/2"), 0, "~compile.true")
    ends(command("trial", "list", "first", "--where", "job.complie=true"), 2, "no job knob")
    ends(command("trial", "list", "first", "--where", "min_job.compile=1"), 2)
    ends(command("trial", "list", "first", "--sort", "jobs.compile"), 2)


def test_the_python_client_asks_about_jobs(api: Api) -> None:
    wanted = TrialFilter(**{"job.compile": (True,)})
    assert filter_query(wanted) == {"job.compile": [True]}
    client = client_of(api)
    assert [each.number for each in client.trials("first", wanted=wanted)] == [2]
    (only,) = client.leaderboard("first", wanted=wanted).trials
    assert only.layout == COMPILED
