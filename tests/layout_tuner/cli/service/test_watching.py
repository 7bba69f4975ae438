"""What commands show while they watch a campaign, or while their own work takes long."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner

from layout_tuner.api.settings import Settings
from layout_tuner.cli import live_output
from layout_tuner.cli.main import main
from layout_tuner.cli.service.watching import CampaignView, progress_line
from layout_tuner.client.clients import Client
from layout_tuner.protocol.outcome import Outcome
from layout_tuner.protocol.worker_messages import BeatBody
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.tuner.driver.campaign_end import Spent, time_is_up
from tests.kit.api import CAMPAIGN, TOKEN, ends
from tests.kit.live import live_service
from tests.kit.postgres import upgraded
from tests.kit.services import ServeProcess, run_command
from tests.kit.store import (
    TimelyStore,
    completed,
    failed,
    lease_one,
    make_campaign,
    make_worker,
    post_outcome,
    run_trial,
    send_beats,
    take_leases,
)
from tests.kit.terminal import Screen, Terminal, run_in_terminal
from tests.kit.waiting import wait_until
from tests.search_spaces.tables.tables import layouts, make_row, make_text


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with closing(TimelyStore.open(upgraded(tmp_path / "data"))) as store:
        yield store


@pytest.fixture
def client(store: Store) -> Iterator[Client]:
    with (
        live_service(Settings(token=TOKEN), store) as url,
        Client(url.removesuffix("/v1"), TOKEN) as client,
    ):
        client.create_campaign({**CAMPAIGN, "name": "watched", "budget": {"node_hours": 2}})
        yield client


def add_ended(store: Store, end: Outcome | float, number: int) -> None:
    """Ends the next trial with an outcome, or measures so many tokens a second."""
    store.trials.add(store.campaigns.by_name("watched").id, Layout(num_microbatches=number))
    lease = lease_one(store, store.workers.find()[0].id)
    outcome = end if isinstance(end, Outcome) else completed(lease.layout, tokens_per_s=end)
    post_outcome(store, lease.trial_id, lease.attempt, outcome)


def lines_of(view: CampaignView, client: Client, width: int = 120) -> list[str]:
    campaign = client.campaign("watched")
    view.update(campaign)
    return view.lines(campaign, width)


def test_a_view_grows_with_its_campaign(store: Store, client: Client) -> None:
    view = CampaignView(client, "watched")
    assert lines_of(view, client)[1:] == ["used     0 of 2 node-hours, 2 left"]
    make_worker(store)
    for number, rate in enumerate((100.0, 300.0, 200.0, 500.0), start=1):
        add_ended(store, rate, number)
    add_ended(store, failed(), 5)
    lines = lines_of(view, client)
    assert "best     500 tokens/s, trial 4: n1-tp1-pp1-dp1" in lines[1]
    assert lines[2] == "so far   ▁▅▅█"
    assert lines[3] == "failed   1: 1 crashed"
    add_ended(store, failed("out_of_memory"), 6)
    add_ended(store, failed(), 7)
    add_ended(store, 900.0, 8)
    lines = lines_of(view, client)
    assert lines[2] == "so far   ▁▃▃▅█"
    assert lines[3] == "failed   3: 2 crashed, 1 out_of_memory"
    assert lines[4].startswith("used     0.0")
    assert lines[4].endswith("left")


def test_the_running_trial_is_shown_with_its_iterations(store: Store, client: Client) -> None:
    campaign = store.campaigns.by_name("watched")
    for number in (1, 2):
        store.trials.add(campaign.id, Layout(num_microbatches=number))
    worker = make_worker(store).id
    leases = take_leases(store, worker, 2)
    beat = [BeatBody(trial_id=each.trial_id, attempt=1, iterations_done=3) for each in leases]
    send_beats(store, worker, beat)
    probe = campaign.spec["probe"]
    planned = probe["warmup"] + probe["iterations"]
    key = Layout(num_microbatches=1).key
    now = f"now      trial 1, iteration 3 of {planned}; 1 more: {key}"
    assert now in lines_of(CampaignView(client, "watched"), client)


def test_what_is_watched_says_that_it_is_simulated(store: Store, client: Client) -> None:
    client.create_campaign({**CAMPAIGN, "name": "rehearsed", "simulated": True})
    assert "rehearsed: RUNNING, simulated, 0 of" in progress_line(client.campaign("rehearsed"))
    assert "simulated" not in progress_line(client.campaign("watched"))


def test_a_budget_that_was_exceeded_says_why_and_its_campaign_ends_with_the_same_sum(
    store: Store, client: Client
) -> None:
    client.create_campaign({**CAMPAIGN, "name": "spent", "budget": {"node_hours": 0.01}})
    campaign, worker = store.campaigns.by_name("spent").id, make_worker(store)
    for number in (1, 2):
        layout = Layout(num_microbatches=number)
        run_trial(store, campaign, layout, completed(layout, duration_s=27.0), worker=worker.id)
    sum_ = "0.015 of 0.01 node-hours spent, as probes that were running went on to their"
    campaign_read = client.campaign("spent")
    assert f"used     {sum_} ends" in CampaignView(client, "spent").lines(campaign_read, 120)
    spent = Spent(trials=2, node_seconds=campaign_read.node_seconds, wall_time_s=60.0)
    assert time_is_up(campaign_read.stored.budget, spent) == f"{sum_} ends"


AWAY = "does not answer"


def test_watching_says_at_once_that_the_service_is_away_and_goes_on_when_it_is_back(
    tmp_path: Path,
) -> None:
    service = ServeProcess(tmp_path)
    port = service.url.rpartition(":")[2]
    service.post("/campaigns", {**CAMPAIGN, "name": "watched"})
    words = ("campaign", "watch", "watched")
    log = tmp_path / "watched.log"
    with Terminal(300) as terminal, log.open("w") as written:
        shown = terminal.start(*words, LAYOUT_TUNER_DATA_DIR=str(tmp_path))
        environment = {**os.environ, "LAYOUT_TUNER_DATA_DIR": str(tmp_path)}
        logged = subprocess.Popen(
            [sys.executable, "-m", "layout_tuner", *words], stdout=written, env=environment
        )
        terminal.wait_for("no driver is at work")
        wait_until("a line is written", lambda: "RUNNING" in log.read_text())
        service.end(signal.SIGKILL)
        terminal.wait_for(AWAY)
        (row,) = Screen(300).after(terminal.so_far())
        assert row.startswith(f"watched: the service at {service.url} {AWAY} (")
        assert row.endswith("; watching goes on when it is back")
        wait_until("the log says so", lambda: AWAY in log.read_text())
        service.start(port=port)
        terminal.wait_for("no driver is at work")
        service.post("/campaigns/watched/cancel")
        assert [process.wait(60) for process in (shown, logged)] == [1, 1]
        service.end()
    lines = log.read_text().splitlines()
    assert [AWAY in line for line in lines[:2]] == [False, True], lines
    assert sum(AWAY in line for line in lines) == 1
    assert "CANCELLED" in lines[-1]


def test_whoever_stops_watching_a_service_that_is_away_is_not_told_that_the_campaign_goes_on(
    tmp_path: Path,
) -> None:
    service = ServeProcess(tmp_path)
    service.post("/campaigns", {**CAMPAIGN, "name": "watched"})
    with Terminal(300) as terminal:
        watching = terminal.start(
            "campaign", "watch", "watched", LAYOUT_TUNER_DATA_DIR=str(tmp_path)
        )
        terminal.wait_for("RUNNING")
        service.end(signal.SIGKILL)
        terminal.wait_for(AWAY)
        watching.send_signal(signal.SIGINT)
        assert watching.wait(60) == 130
    left = " ".join(Screen(300).after(terminal.printed))
    assert f"watching has ended; the service at {service.url} {AWAY}" in left
    assert "goes on: " not in left


def test_watching_a_service_that_never_answered_is_refused(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("lt_none")
    words = ("campaign", "watch", "x", "--url", "http://127.0.0.1:9", "--token-file")
    refused = run_command(*words, str(tmp_path / "token"))
    assert (refused.returncode, AWAY in refused.stderr) == (1, True), refused.stderr


def test_no_line_is_wider_than_the_terminal(store: Store, client: Client) -> None:
    make_worker(store)
    for number in range(1, 60):
        store.trials.add(store.campaigns.by_name("watched").id, Layout(num_microbatches=number))
    add_ended(store, 1000.0, 200)
    add_ended(store, failed(), 201)
    for width in (19, 40, 299):
        lines = lines_of(CampaignView(client, "watched"), client, width)
        assert max(len(line) for line in lines) <= width
        assert len(lines) <= 23


Words = tuple[tuple[str, ...], tuple[str, ...]]
"""Arguments of a command, and what its progress says."""


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "table.csv"
    rows = [make_row(**layout, step_time_s=1.0 + place) for place, layout in enumerate(layouts())]
    path.write_text(make_text(*rows))
    return path


def estimate(table: Path, _: Path) -> Words:
    arguments = ("estimate", "--table", str(table), "--out", str(table.with_name("out.csv")))
    return arguments, ("reading table.csv", "predicting: 0 of", "writing the table")


def replay(table: Path, _: Path) -> Words:
    arguments = ("replay", str(table), "--strategy=random", "--seeds=3", "--probes=2", "--jobs=1")
    return arguments, ("reading table.csv", "searching: 0 of 3", "searching: 3 of 3")


def backup(_: Path, folder: Path) -> Words:
    with closing(Store.open(upgraded(folder / "data"))) as store:
        make_campaign(store)
    arguments = ("db", "backup", str(folder / "copy.sqlite3"), "--data-dir", str(folder / "data"))
    return (*arguments, "--force"), ("copying: 100%", "checking the copy")


@pytest.mark.parametrize("command", [estimate, replay, backup])
def test_progress_is_shown_at_a_terminal_and_removed(
    command: Callable[[Path, Path], Words],
    table: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments, words = command(table, tmp_path)
    piped = ends(CliRunner().invoke(main, arguments), 0)
    assert "\r" not in piped.output
    assert not [each for each in words if each in piped.output]
    monkeypatch.setattr(live_output, "SHOWN_AFTER_S", 0.0)
    monkeypatch.setattr(live_output, "REDRAW_S", 0.0)
    code, printed = run_in_terminal(100, arguments, monkeypatch)
    assert code == 0, printed
    for each in words:
        assert each in printed
    left = " ".join(Screen(100).after(printed))
    assert not [each for each in words if each in left]


def test_importing_a_table_shows_progress(
    service: ServeProcess, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_output, "SHOWN_AFTER_S", 0.0)
    monkeypatch.setenv("LAYOUT_TUNER_DATA_DIR", str(service.data_dir))
    arguments = ("campaign", "import", str(table), "--name", "imported")
    code, printed = run_in_terminal(100, arguments, monkeypatch)
    assert code == 0, printed
    assert "importing table.csv (0.0 MB)" in printed
    assert Screen(100).after(printed)[0].startswith("campaign imported imported")


@pytest.mark.ranks
@pytest.mark.slow
def test_a_probe_shows_its_iterations() -> None:
    with Terminal(100) as terminal:
        process = terminal.start("probe", "--model=tiny", "--num-microbatches=2", "--steps=30")
        assert process.wait(120) == 0
    assert "importing torch" in terminal.printed
    assert re.search(r"iteration \d+ of \d+ \(timed\): \S+ ms a step", terminal.printed)
    left = Screen(100).after(terminal.printed)
    assert left[0].startswith("tiny as n1-tp1"), left
