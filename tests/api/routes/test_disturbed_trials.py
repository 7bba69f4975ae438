"""A disturbed probe, from its outcome over HTTP to the pages, tables, files and terminals."""

from __future__ import annotations

import csv
import io
import json
import re

import pytest
from starlette.testclient import TestClient

from search_spaces.spec.layout import Layout
from search_spaces.statistics.disturbance import MEANING
from tests.kit.api import Api, Command, measured_as_asked
from tests.kit.cheap_campaign import PREDICTION

QUIET = {"others_share": 0.01, "throttled": False}
DISTURBED = {"others_share": 0.42, "throttled": None}
LAYOUTS = (
    Layout(num_microbatches=8),
    Layout(tp=2, num_microbatches=8),
    Layout(pp=2, num_microbatches=8),
)


@pytest.fixture
def measured(api: Api) -> Api:
    """Trial 1 quiet and its repeat 4 disturbed, 2 disturbed, 3 of a worker that does not say."""
    campaign = api.submit()
    worker = api.register()
    for layout, share, rate in zip(
        LAYOUTS, (QUIET, DISTURBED, {}), (300.0, 200.0, 100.0), strict=True
    ):
        api.complete(worker, "first", layout, tokens_per_s=rate, prediction=PREDICTION, **share)
    first = api.store.trials.by_number(campaign["id"], 1)
    api.store.trials.repeat(first.id, reason="tie")
    api.report_measured(worker, api.lease(worker), LAYOUTS[0], tokens_per_s=290.0, **DISTURBED)
    return api


def marks(html: str) -> list[str]:
    return re.findall(r'<span class="mark">([^<]*disturbed)</span>', html)


def page(http: TestClient, path: str) -> str:
    answer = http.get(path, headers={"Accept": "text/html"})
    assert answer.status_code == 200, answer.text
    return answer.text


def test_the_documents_have_what_others_took_and_why_a_trial_is_repeated(measured: Api) -> None:
    listed = measured.get("/campaigns/first/trials")["trials"]
    shares = [each["measurement"]["others_share"] for each in listed]
    assert shares == [0.01, 0.42, None, 0.42]
    assert [each["measurement"]["throttled"] for each in listed] == [False, None, None, None]
    assert [each["repeat_reason"] for each in listed] == [None, None, None, "tie"]
    ranked = measured.get("/campaigns/first/leaderboard")["trials"]
    found = [(each["num_runs"], each["disturbed"]) for each in ranked]
    assert found == [(1, False), (1, True), (1, False)], "beside a quiet run it does not count"
    again = measured.post("/trials/1/repeat", {"times": 1}, status=201)["trials"]
    assert [each["repeat_reason"] for each in again] == ["request"]


def test_an_outcome_with_an_impossible_share_is_refused(api: Api) -> None:
    campaign = api.submit()
    worker = api.register()
    trial = api.store.trials.add(campaign["id"], LAYOUTS[0])
    lease = api.lease(worker)
    outcome = json.loads(json.dumps(measured_as_asked(lease, LAYOUTS[0]).to_mapping()))
    outcome["measurement"]["others_share"] = 1.5
    body = {"worker_id": worker, "attempt": 1, "outcome": outcome}
    refusal = api.post(f"/trials/{trial.id}/outcome", body, status=422)
    assert "others_share" in json.dumps(refusal)


def test_every_page_marks_it_and_explains_the_mark_once(measured: Api, http: TestClient) -> None:
    leaderboard = page(http, "/campaigns/first")
    assert marks(leaderboard) == ["disturbed"]
    assert marks(page(http, "/campaigns/first/trials")) == ["disturbed"] * 2
    trial = page(http, "/trials/2")
    assert marks(trial) == ["disturbed"]
    assert "42.0% of a device&#39;s time, disturbed" in trial
    assert marks(page(http, "/trials/1")) == marks(page(http, "/trials/3")) == []
    assert "1.0% of a device" in page(http, "/trials/1")
    assert "taken by others" not in page(http, "/trials/3"), "it is not known"
    heads = page(http, "/compare?trial=1&trial=2")
    assert set(marks(heads)) == {"disturbed"}
    assert "trial 1</a> <span" not in heads
    report = page(http, "/v1/campaigns/first/report")
    assert len(re.findall(r"<td>(?:tied, )?disturbed</td>", report)) == 1
    assert "its layout stands with the runs that are not" in page(http, "/trials/4")
    assert "measure it again when the machine is quieter" in trial
    meaning = MEANING.replace("'", "&#39;")
    for path in (
        "/campaigns/first",
        "/campaigns/first/trials",
        "/trials/2",
        "/compare?trial=1&trial=2",
    ):
        assert page(http, path).count(meaning) == 1, path
    assert report.count(meaning) == 1


def test_the_result_says_that_the_winner_was_disturbed(measured: Api, http: TestClient) -> None:
    said = "Others took its devices while it was measured: it is disturbed."
    for path in ("/campaigns/{}", "/v1/campaigns/{}/report"):
        assert said not in page(http, path.format("first")), "the winner has a quiet run"
    measured.submit(name="second")
    measured.complete(measured.register(), "second", LAYOUTS[0], **DISTURBED)
    for path in ("/campaigns/{}", "/v1/campaigns/{}/report"):
        assert said in page(http, path.format("second"))


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("best", "it is among the best"),
        ("tie", "it cannot be told apart from others among the best"),
        ("doubted", "its measurement is doubted"),
        ("disturbed", "others took its devices while it was measured"),
        ("request", "a user or the campaign&#39;s file asked for it"),
    ],
)
def test_the_page_of_a_repeat_states_its_reason(
    measured: Api, http: TestClient, command: Command, reason: str, words: str
) -> None:
    again = measured.store.trials.repeat(1, reason=reason)
    assert f"Its layout is repeated because {words}." in page(http, f"/trials/{again.id}")
    shown = command("trial", "show", str(again.id)).stdout
    assert f"trial 1, because {words.replace('&#39;', chr(39))}" in shown


def test_tables_for_files_say_it(measured: Api, http: TestClient) -> None:
    query = {"format": "csv", "intervals": "true"}
    rows = csv.DictReader(
        io.StringIO(http.get("/v1/campaigns/first/leaderboard", params=query).text)
    )
    assert [row["disturbed"] for row in rows] == ["0", "1", "0"]
    table = http.get("/v1/campaigns/first/table").text
    rows = csv.DictReader(io.StringIO(table))
    assert [row["others_share"] for row in rows] == ["0.01", "0.42", "", "0.42"]


def test_terminals_say_it(measured: Api, command: Command) -> None:
    leaderboard = command("leaderboard", "first").stdout
    assert leaderboard.count("1, disturbed") == 1
    assert leaderboard.count("disturbed: others took") == 1
    trials = command("trial", "list", "first").stdout
    assert trials.count("COMPLETED, disturbed") == 2
    assert trials.count("disturbed: others took") == 1
    assert "42.0% of a device's time, disturbed" in command("trial", "show", "2").stdout


PLOTS = ["history", "slice", "parallel", "pareto", "estimated-time", "time-parts", "timeline"]


@pytest.mark.parametrize("name", PLOTS)
def test_the_points_of_plots_say_it(measured: Api, name: str) -> None:
    drawn = measured.http.get(f"/campaigns/first/figures/{name}.json").json()["data"]
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
def test_the_tables_of_plots_say_it_and_their_page_explains_it_once(
    measured: Api, http: TestClient, tab: str, rows: set[str]
) -> None:
    html = page(http, f"/campaigns/first/{tab}")
    found = set(re.findall(r'<a href="/trials/\d">([^<]*)</a>', html))
    assert found - {"1. trial 1 ★ winner"} == rows
    assert html.count(MEANING.replace("'", "&#39;")) == 1
    measured.submit(name="second")
    assert "disturbed:" not in page(http, f"/campaigns/second/{tab}")


def test_a_disturbed_winner_and_a_disturbed_baseline_are_marked_wherever_they_are_listed(
    api: Api, http: TestClient, command: Command
) -> None:
    api.submit(name="noisy", baseline=LAYOUTS[1].to_mapping())
    worker = api.register()
    api.complete(worker, "noisy", LAYOUTS[0], tokens_per_s=300.0, **DISTURBED)
    api.complete(worker, "noisy", LAYOUTS[1], tokens_per_s=200.0, **DISTURBED)
    api.submit(name="quiet")
    api.complete(worker, "quiet", LAYOUTS[0], tokens_per_s=300.0, **QUIET)
    progress = {each["name"]: each["progress"] for each in api.get("/campaigns")["campaigns"]}
    assert progress["noisy"]["best_disturbed"]
    assert not progress["quiet"]["best_disturbed"]
    assert api.get("/campaigns/noisy")["baseline"]["disturbed"]
    meaning = MEANING.replace("'", "&#39;")
    listed = page(http, "/")
    assert (len(marks(listed)), listed.count(meaning)) == (1, 1)
    compared = page(http, "/compare-campaigns?campaign=noisy&campaign=quiet")
    assert (compared.count("; disturbed"), compared.count(meaning)) == (1, 1)
    assert "it is disturbed" in page(http, "/campaigns/noisy").split("The baseline, ")[1]
    assert command("campaign", "list").stdout.count("300, disturbed") == 1
    shown = command("campaign", "show", "noisy").stdout
    assert "best          300 tokens/s, disturbed, trial 1" in shown
    assert re.search(r"baseline +trial 2, COMPLETED, 200 tokens/s [^ ]+, disturbed", shown)
    for name, is_disturbed in (("noisy", True), ("quiet", False)):
        notes = api.get(f"/campaigns/{name}/exports", format="megatron-lm", trial=1)["notes"]
        (line,) = [note for note in notes if note.startswith("measured: ")]
        assert line.endswith("; disturbed") is is_disturbed
