"""A disturbed probe, from its outcome over HTTP to the pages, tables, files and terminals."""

from __future__ import annotations

import re
from typing import Any

import pytest

from layout_tuner.api.formatting import REPEAT_WORDS
from layout_tuner.predictions.statistics.disturbance import MEANING
from layout_tuner.results_db.records import REPEAT_REASONS
from layout_tuner.search_spaces.layouts.layout import Layout
from tests.kit.api import Api, Command, answered
from tests.kit.cheap_campaign import PREDICTION

QUIET: dict[str, Any] = {"others_share": 0.01, "throttled": False}
DISTURBED: dict[str, Any] = {"others_share": 0.42, "throttled": None}
LAYOUTS = [Layout(**degree, num_microbatches=8) for degree in ({}, {"tp": 2}, {"pp": 2})]
EXPLANATION = MEANING.replace("'", "&#39;")
PAGES = ("/campaigns/first", "/campaigns/first/trials", "/trials/2", "/compare?trial=1&trial=2")
REPORT = "/v1/campaigns/first/report"


@pytest.fixture(scope="module")
def api(module_api: Api) -> Api:
    """Of the first campaign trial 1 is quiet and its repeat 4 disturbed, 2 disturbed, 3 unknown.

    The second has a disturbed winner, noisy a disturbed baseline too, and quiet neither.
    """
    api = module_api
    campaign = api.submit()
    worker = api.register()
    for layout, share, rate in zip(LAYOUTS, (QUIET, DISTURBED, {}), (300, 200, 100), strict=True):
        figures = {"tokens_per_s": float(rate), "prediction": PREDICTION, **share}
        api.complete(worker, "first", layout, **figures)
    first = api.store.trials.by_number(campaign["id"], 1)
    api.store.trials.repeat(first.id, reason="tie")
    api.report_measured(worker, api.lease(worker), LAYOUTS[0], tokens_per_s=290.0, **DISTURBED)
    api.submit(name="noisy", baseline=LAYOUTS[1].to_mapping())
    api.submit(name="quiet")
    for name, layout, rate, share in (
        ("noisy", LAYOUTS[0], 300.0, DISTURBED),
        ("noisy", LAYOUTS[1], 200.0, DISTURBED),
        ("quiet", LAYOUTS[0], 300.0, QUIET),
    ):
        api.complete(worker, name, layout, tokens_per_s=rate, **share)
    return api


def marks(html: str) -> list[str]:
    return re.findall(r'<span class="mark">([^<]*disturbed)</span>', html)


def page(api: Api, path: str) -> str:
    return answered(api.http.get(path, headers={"Accept": "text/html"}), 200).text


def test_documents_and_files_have_what_others_took_and_why_a_trial_is_repeated(api: Api) -> None:
    listed = api.get("/campaigns/first/trials")["trials"]
    measured = [each["measurement"] for each in listed]
    assert [each["others_share"] for each in measured] == [0.01, 0.42, None, 0.42]
    assert [each["throttled"] for each in measured] == [False, None, None, None]
    assert [each["repeat_reason"] for each in listed] == [None, None, None, "tie"]
    ranked = api.get("/campaigns/first/leaderboard")["trials"]
    found = [(each["num_runs"], each["disturbed"]) for each in ranked]
    assert found == [(1, False), (1, True), (1, False)], "beside a quiet run it does not count"
    board = api.table("/campaigns/first/leaderboard", format="csv", intervals=True)
    assert [row["disturbed"] for row in board] == ["0", "1", "0"]
    table = api.table("/campaigns/first/table")
    assert [row["others_share"] for row in table] == ["0.01", "0.42", "", "0.42"]


def test_every_page_marks_a_disturbed_trial(api: Api) -> None:
    campaign, trials, trial, compared = (page(api, path) for path in PAGES)
    assert marks(campaign) == ["disturbed"]
    assert marks(trials) == ["disturbed"] * 2
    assert marks(trial) == ["disturbed"]
    assert marks(page(api, "/trials/1")) == marks(page(api, "/trials/3")) == []
    assert set(marks(compared)) == {"disturbed"}
    assert "trial 1</a> <span" not in compared
    assert len(re.findall(r"<td>(?:tied, )?disturbed</td>", page(api, REPORT))) == 1


def test_a_page_explains_the_mark_once(api: Api) -> None:
    for path in (*PAGES, REPORT):
        assert page(api, path).count(EXPLANATION) == 1, path


def test_a_trial_says_what_others_took_of_its_devices(api: Api) -> None:
    trial = page(api, "/trials/2")
    assert "42.0% of a device&#39;s time, disturbed" in trial
    assert "measure it again when the machine is quieter" in trial
    assert "1.0% of a device" in page(api, "/trials/1")
    assert "taken by others" not in page(api, "/trials/3"), "it is not known"


def test_a_repeat_says_why_it_is_made_and_that_its_layout_stands_with_quiet_runs(api: Api) -> None:
    repeat = page(api, "/trials/4")
    assert "its layout stands with the runs that are not" in repeat
    assert f"Its layout is repeated because {REPEAT_WORDS['tie']}." in repeat
    assert set(REPEAT_WORDS) == set(REPEAT_REASONS)


@pytest.mark.parametrize("path", ["/campaigns/{}", "/v1/campaigns/{}/report"])
def test_a_winner_is_said_to_be_disturbed_where_it_has_no_quiet_run(api: Api, path: str) -> None:
    said = "Others took its devices while it was measured: it is disturbed."
    assert said not in page(api, path.format("first")), "the winner has a quiet run"
    assert said in page(api, path.format("noisy"))


def test_commands_say_that_a_trial_is_disturbed(api: Api, command: Command) -> None:
    leaderboard = command("leaderboard", "first").stdout
    assert leaderboard.count("1, disturbed") == 1
    assert leaderboard.count("disturbed: others took") == 1
    trials = command("trial", "list", "first").stdout
    assert trials.count("COMPLETED, disturbed") == 2
    assert trials.count("disturbed: others took") == 1
    assert "42.0% of a device's time, disturbed" in command("trial", "show", "2").stdout
    because = f"trial 1, because {REPEAT_WORDS['tie']}"
    assert because in command("trial", "show", "4").stdout


PLOTS = ["history", "slice", "parallel", "pareto", "estimated-time", "time-parts", "timeline"]


@pytest.mark.parametrize("name", PLOTS)
def test_the_points_of_plots_say_that_their_trial_is_disturbed(api: Api, name: str) -> None:
    drawn = api.http.get(f"/campaigns/first/figures/{name}.json").json()["data"]
    said: dict[int, set[bool]] = {}
    for trace in drawn:
        texts = trace.get("hovertext") or trace.get("text", ())
        for trial_id, text in zip(trace.get("customdata", ()), texts, strict=True):
            said.setdefault(trial_id, set()).add("its measurement is disturbed" in text)
    runs = (1, 2, 3, 4) if name in ("history", "timeline") else (1, 2, 3)
    assert said == {each: {each in (2, 4)} for each in runs}
    ringed = [sorted(trace["customdata"]) for trace in drawn if trace["name"] == "disturbed"]
    assert ringed == {"history": [[2, 4]], "timeline": []}.get(name, [[2]])


@pytest.mark.parametrize(
    ("tab", "rows"),
    [
        ("plots", {"1", "2, disturbed", "3", "2. trial 2, disturbed", "3. trial 3"}),
        ("timeline", {"1", "2, disturbed", "3", "4, disturbed"}),
    ],
)
def test_the_tables_of_plots_mark_disturbed_trials_and_their_page_explains_the_mark_once(
    api: Api, tab: str, rows: set[str]
) -> None:
    html = page(api, f"/campaigns/first/{tab}")
    found = set(re.findall(r'<a href="/trials/\d">([^<]*)</a>', html))
    assert found - {"1. trial 1 ★ winner"} == rows
    assert html.count(EXPLANATION) == 1
    assert "disturbed:" not in page(api, f"/campaigns/quiet/{tab}")


def test_documents_mark_a_disturbed_winner_and_a_disturbed_baseline(api: Api) -> None:
    progress = {each["name"]: each["progress"] for each in api.get("/campaigns")["campaigns"]}
    assert progress["noisy"]["best_disturbed"]
    assert not progress["quiet"]["best_disturbed"]
    assert api.get("/campaigns/noisy")["baseline"]["disturbed"]


def test_lists_of_campaigns_mark_a_disturbed_winner_and_a_disturbed_baseline(api: Api) -> None:
    listed = page(api, "/")
    assert (len(marks(listed)), listed.count(EXPLANATION)) == (1, 1)
    compared = page(api, "/compare-campaigns?campaign=noisy&campaign=quiet")
    assert (compared.count("; disturbed"), compared.count(EXPLANATION)) == (1, 1)
    assert "it is disturbed" in page(api, "/campaigns/noisy").split("The baseline, ")[1]


def test_commands_mark_a_disturbed_winner_and_a_disturbed_baseline(command: Command) -> None:
    assert command("campaign", "list").stdout.count("300, disturbed") == 1
    shown = command("campaign", "show", "noisy").stdout
    assert "best          300 tokens/s, disturbed, trial 1" in shown
    assert re.search(r"baseline +trial 2, COMPLETED, 200 tokens/s [^ ]+, disturbed", shown)


@pytest.mark.parametrize(("name", "is_disturbed"), [("noisy", True), ("quiet", False)])
def test_an_export_notes_that_its_trial_is_disturbed(
    api: Api, name: str, is_disturbed: bool
) -> None:
    notes = api.get(f"/campaigns/{name}/exports", format="megatron-lm", trial=1)["notes"]
    (line,) = [note for note in notes if note.startswith("measured: ")]
    assert line.endswith("; disturbed") is is_disturbed
