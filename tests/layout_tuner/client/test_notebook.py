"""The client in a notebook: frames, figures, campaigns from files and arrays, and waiting."""

from __future__ import annotations

import csv
import io
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from layout_tuner import Client, PackageMissingError, RankedTrial, ServiceError, to_frame
from layout_tuner.api.plot_data.campaign_plots import PlotName
from layout_tuner.api.settings import Settings
from layout_tuner.errors import DocumentInvalidError, DocumentMalformedError
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.layouts.layout import Layout
from tests.kit.api import CAMPAIGN, TOKEN
from tests.kit.live import live_service
from tests.kit.store import failed, run_trial

TP = {**CAMPAIGN, "space": {**CAMPAIGN["space"], "tp": [1, 2, 4]}}


@pytest.fixture
def client(store: Store) -> Iterator[Client]:
    """A client of a service on a socket."""
    with (
        live_service(Settings(token=TOKEN), store) as url,
        Client(url.removesuffix("/v1"), TOKEN) as client,
    ):
        yield client


@pytest.fixture
def measured(client: Client, store: Store) -> str:
    """The name of a campaign with two measured layouts and a failed trial."""
    campaign = client.create_campaign(CAMPAIGN).id
    run_trial(store, campaign, Layout(tp=2), tokens_per_s=1000.0)
    run_trial(store, campaign, Layout(), tokens_per_s=2000.0)
    run_trial(store, campaign, Layout(pp=2, num_microbatches=2), failed())
    return "first"


def test_a_campaign_is_submitted_from_the_path_of_its_file(client: Client, tmp_path: Path) -> None:
    file = tmp_path / "campaign.json"
    file.write_text(json.dumps(CAMPAIGN))
    assert client.create_campaign(file).name == "first"
    assert client.create_campaign(str(file), if_exists="return").name == "first"
    assert client.plan(file) == client.plan(CAMPAIGN)
    with pytest.raises(DocumentMalformedError, match=r"nothing\.yaml: cannot be read"):
        client.create_campaign(tmp_path / "nothing.yaml")


def test_a_campaign_may_hold_numbers_and_arrays_of_numpy_and_ranges(client: Client) -> None:
    space = {**TP["space"], "tp": np.array([1, 2, 4]), "pp": range(1, 3), "dp": np.int64(1)}
    space["micro_batch_size"] = (np.int32(1), 2)
    document = {
        **TP,
        "space": space,
        "budget": {"trials": np.int64(5), "node_hours": np.float32(2)},
    }
    plain = {**space, "tp": [1, 2, 4], "pp": [1, 2], "dp": 1, "micro_batch_size": [1, 2]}
    by_hand = {**TP, "name": "plain", "space": plain, "budget": {"trials": 5, "node_hours": 2}}
    first, second = (client.create_campaign(each).spec for each in (document, by_hand))
    assert {**first, "name": ""} == {**second, "name": ""}
    cloned = client.clone_campaign("first", {"seed": np.uint8(3)})
    assert cloned.spec["seed"] == 3


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({1, 2}, r"space\.tp: \{1, 2\} \(set\) has no form in JSON: write text"),
        (np.array([1.0, np.nan]), r"space\.tp: nan \(float\) has no form in JSON"),
        ({(1, 2): 3}, r"space\.tp: the key \(1, 2\) is not text"),
    ],
)
def test_a_value_that_json_lacks_is_refused_with_its_field(
    client: Client, value: Any, words: str
) -> None:
    with pytest.raises(DocumentInvalidError, match=words):
        client.create_campaign({**TP, "space": {**TP["space"], "tp": value}})


def test_a_campaign_that_is_submitted_again_is_the_first(client: Client, store: Store) -> None:
    first = client.create_campaign(CAMPAIGN)
    with pytest.raises(ServiceError, match="exists already; choose another name"):
        client.create_campaign(CAMPAIGN)
    again = client.create_campaign(CAMPAIGN, if_exists="return")
    assert (again.id, again.created_at) == (first.id, first.created_at)
    assert [each.id for each in client.campaigns()] == [first.id]

    other = {**CAMPAIGN, "seed": 7, "budget": {"trials": 6}}
    with pytest.raises(ServiceError, match="has another seed, budget; choose another") as caught:
        client.create_campaign(other, if_exists="return")
    assert caught.value.status == 409


def test_it_is_the_first_also_when_the_first_was_changed_meanwhile(client: Client) -> None:
    first = client.create_campaign(CAMPAIGN, if_exists="return")
    client.update_campaign("first", budget={"trials": 9})
    assert client.create_campaign(CAMPAIGN, if_exists="return").id == first.id
    client.cancel_campaign("first")
    client.delete_campaign("first")
    assert client.create_campaign(CAMPAIGN, if_exists="return").id > first.id


def test_waiting_returns_the_ended_campaign_or_says_how_far_it_is(client: Client) -> None:
    client.create_campaign(CAMPAIGN)
    with pytest.raises(TimeoutError, match=r"has not ended in 0\.01 s: it is RUNNING with 0 ended"):
        client.wait("first", timeout_s=0.01)
    ending = threading.Timer(0.1, client.cancel_campaign, ["first"])
    ending.start()
    assert client.wait("first", timeout_s=60).state == "CANCELLED"
    ending.join()
    with pytest.raises(ServiceError, match="no campaign named 'second'"):
        client.wait("second")


def test_a_board_has_its_best_where_it_has_rank_1(client: Client, measured: str) -> None:
    best = client.leaderboard(measured).best
    assert isinstance(best, RankedTrial)
    assert (best.rank, best.number) == (1, 2)
    assert client.leaderboard(measured, sort="tp", descending=True).best == best
    assert client.leaderboard(measured, offset=2).best is None


def test_a_frame_of_a_board_has_the_figures_of_its_csv(client: Client, measured: str) -> None:
    frame = client.leaderboard(measured).to_frame()
    rows = list(csv.DictReader(io.StringIO(client.leaderboard_csv(measured))))
    assert len(frame) == len(rows) == 2
    for name in ("rank", "trial", "tp", "tokens_per_s", "step_time_s", "peak_memory_bytes"):
        assert [float(row[name]) for row in rows] == list(frame[name]), name
    assert list(frame["trial"]) == [2, 1]


def test_a_frame_of_a_board_has_intervals_of_the_values(client: Client, measured: str) -> None:
    frame = client.leaderboard(measured).to_frame()
    assert (frame["value_low"] <= frame["value"]).all()
    assert (frame["value"] <= frame["value_high"]).all()


def test_a_csv_of_a_board_has_intervals_of_step_times(client: Client, measured: str) -> None:
    for row in csv.DictReader(io.StringIO(client.leaderboard_csv(measured))):
        interval = float(row["step_time_low_s"]), float(row["step_time_high_s"])
        assert interval[0] <= float(row["step_time_s"]) <= interval[1]


def test_a_frame_of_an_empty_page_has_every_column(client: Client, measured: str) -> None:
    whole = client.leaderboard(measured).to_frame()
    empty = client.leaderboard(measured, offset=2).to_frame()
    assert (len(empty), list(empty.columns)) == (0, list(whole.columns))


def test_a_frame_of_trials_has_those_that_failed(client: Client, measured: str) -> None:
    frame = to_frame(client.trials(measured))
    assert list(frame["trial"]) == [1, 2, 3]
    assert list(frame["state"]) == ["COMPLETED", "COMPLETED", "FAILED"]
    assert frame["tokens_per_s"].isna().tolist() == [False, False, True]
    assert list(frame["pp"]) == [1, 1, 2]
    assert not frame["is_cheap"].any()
    assert "rank" not in frame


def test_every_plot_is_a_figure_with_colours_and_its_caption(client: Client, measured: str) -> None:
    for name in get_args(PlotName):
        figure = client.plot(measured, name)
        assert '"--' not in figure.to_json(), name
        said = " ".join(figure.layout.meta["says"])
        assert (figure.layout.title.text or "") == ("" if figure.data else said), name
        assert figure.data or said
    pareto = client.plot(measured, "pareto", across="tokens_per_s", up="memory_headroom")
    assert "tokens/s" in pareto.layout.xaxis.title.text
    assert {trace.name for trace in client.plot(measured, "history").data} >= {"measured", "winner"}
    assert client.plot(measured, "slice", knob="tp") != client.plot(measured, "slice", knob="pp")


def test_a_plot_of_another_name_is_refused_with_all_names(client: Client, measured: str) -> None:
    with pytest.raises(ServiceError, match=r"history.*pareto.*timeline") as caught:
        client.plot(measured, "nothing")
    assert caught.value.status == 422


def test_a_package_that_is_not_installed_is_named_with_its_extra(
    client: Client, measured: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = client.leaderboard(measured)
    for package, ask in (
        ("pandas", board.to_frame),
        ("plotly", lambda: client.plot(measured, "history")),
    ):
        monkeypatch.setitem(sys.modules, package, None)
        words = (
            rf"needs {package}, which is not installed; run: pip install 'layout-tuner\[notebook\]'"
        )
        with pytest.raises(PackageMissingError, match=words) as caught:
            ask()
        assert isinstance(caught.value, ImportError)
