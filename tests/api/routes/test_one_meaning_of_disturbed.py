"""Trials, leaderboard, files and plots of a service call the same trials and layouts disturbed."""

from __future__ import annotations

from tests.kit.api import Api
from tests.kit.disturbances import LAYOUTS, RUNS


def test_documents_files_and_plots_agree_on_every_case(api: Api) -> None:
    api.submit(name="cases")
    worker = api.register()
    expected: dict[int, bool] = {}
    of_layouts: dict[str, bool] = {}
    for layout, (runs, is_layout_disturbed) in zip(LAYOUTS, RUNS, strict=True):
        of_layouts[layout.key] = is_layout_disturbed
        (figures, is_disturbed), *repeats = runs
        first = api.complete(worker, "cases", layout, **figures)
        expected[first] = is_disturbed
        for figures, is_disturbed in repeats:
            trial = api.store.trials.repeat(first, reason="tie")
            api.report_measured(worker, api.lease(worker), layout, **figures)
            expected[trial.id] = is_disturbed
    trials = api.get("/campaigns/cases/trials", limit=100)["trials"]
    for trial in trials:
        record = api.store.trials.get(trial["id"]).measurement
        assert record is not None
        assert record.is_disturbed is expected[trial["id"]]
        told = trial["measurement"]
        assert (told["others_share"], told["throttled"]) == (record.others_share, record.throttled)
    assert {trial["id"] for trial in trials} == set(expected)
    ranked = api.get("/campaigns/cases/leaderboard", limit=100)["trials"]
    assert {each["layout_key"]: each["disturbed"] for each in ranked} == of_layouts
    board = api.table("/campaigns/cases/leaderboard", format="csv", intervals=True)
    assert [row["disturbed"] == "1" for row in board] == [each["disturbed"] for each in ranked]
    drawn = api.http.get("/campaigns/cases/figures/history.json").json()["data"]
    (rings,) = [trace["customdata"] for trace in drawn if trace["name"] == "disturbed"]
    assert set(rings) == {id_ for id_, is_disturbed in expected.items() if is_disturbed}
