"""What commands print to a terminal and to a pipe: whole tables, and no control characters."""

from __future__ import annotations

import json
import re
import sqlite3
import unicodedata
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner

from layout_tuner.cli.main import main
from layout_tuner.results_db.database.data_dir import DataDir
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.layouts.layout import Layout
from tests.kit.api import CAMPAIGN, INTRODUCTION, ends
from tests.kit.python_process import run_python
from tests.kit.services import ServeProcess
from tests.kit.store import TimelyStore, completed, failed, make_worker, run_trial
from tests.kit.terminal import Screen, Terminal, run_in_terminal
from tests.kit.waiting import wait_until

NAME = "a-campaign-of-the-group-" + "x" * 36
LAYOUTS = [
    Layout(tp=tp, pp=pp, dp=1, micro_batch_size=16, num_microbatches=128)
    for tp in (1, 2)
    for pp in (1, 2, 4)
]

HOSTILE = "\x1b[2J \x1b]0;t\x07 \x9b31m \u202eevil\u2066 \x7f\r\x08 end"
HOSTILE_COLUMNS = {
    "campaigns": ("message", "notes", "model_name", "cluster_name", "created_by"),
    "trials": ("message", "node"),
    "trial_logs": ("tail",),
    "workers": ("name", "host", "device"),
    "allocation_nodes": ("doing", "reason"),
    "node_quarantines": ("reason",),
    "tokens": ("created_by",),
    "user_models": ("created_by",),
    "audit": ("actor", "address", "target"),
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    """A service with a campaign that has every kind of trial; text from outside is hostile."""
    service = ServeProcess(tmp_path_factory.mktemp("service"))
    try:
        _fill(service)
        yield service
    finally:
        service.end()


def _fill(service: ServeProcess) -> None:
    service.post("/campaigns", {**CAMPAIGN, "name": NAME, "budget": {"trials": 50}})
    service.post("/campaigns", {**CAMPAIGN, "name": "hostile"})
    service.post("/tokens", {"name": "somebody", "role": "viewer"})
    service.http.put("/models/own", json={"preset": "tiny"}).raise_for_status()
    nodes = [{"name": "n0", "num_devices": 4}]
    about = {"cluster": "local-cpu", "num_nodes": 1, "devices_per_node": 4, "nodes": nodes}
    service.post("/workers", {**INTRODUCTION, **about})
    service.post("/nodes/local-cpu/n0/quarantine", {"reason": "loud"})
    with closing(TimelyStore(DataDir(service.data_dir).database_url)) as store:
        _measure(store)
    _make_hostile(database_of(service.data_dir))


def database_of(data_dir: Path) -> Path:
    return Path(DataDir(data_dir).database_url.removeprefix("sqlite:///"))


def _measure(store: Store) -> None:
    worker = make_worker(store, "w1").id
    for campaign, outcomes in (
        (NAME, [completed(layout, tokens_per_s=9e6 + at) for at, layout in enumerate(LAYOUTS)]),
        ("hostile", [completed(LAYOUTS[0]), failed(), failed("out_of_memory")]),
    ):
        id_ = store.campaigns.by_name(campaign).id
        for layout, outcome in zip(LAYOUTS, outcomes, strict=False):
            run_trial(store, id_, layout, outcome, worker=worker)


def _make_hostile(database: Path) -> None:
    with closing(sqlite3.connect(database, timeout=30)) as rows:
        for table, columns in HOSTILE_COLUMNS.items():
            for column in columns:
                done = rows.execute(f"UPDATE {table} SET {column} = {column} || ?", (HOSTILE,))
                assert done.rowcount, f"no row of {table} is hostile"
        rows.execute(
            "UPDATE campaigns SET model_name = 'tiny', cluster_name = 'local-cpu', message = ''"
            " WHERE name = ?",
            (NAME,),
        )
        rows.commit()


@pytest.fixture(autouse=True)
def environment(served: ServeProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAYOUT_TUNER_DATA_DIR", str(served.data_dir))


BOARD = f"leaderboard {NAME}"
TABLES = {
    BOARD: [(str(rank), str(7 - rank)) for rank in range(1, 7)],
    f"trial list {NAME}": [(str(each), str(each)) for each in range(1, 7)],
    "campaign list": [(NAME,), ("hostile",)],
    "audit": [("campaign.create",), ("token.create",), ("model.put",), ("node.quarantine",)],
    "token list": [("somebody",)],
    "model list": [("tiny",), ("own",)],
    "cluster list": [("local-cpu",), ("frontier",)],
}
"""Commands that print tables, and the values by which their rows are told apart."""


@pytest.mark.sampled(4)
@pytest.mark.parametrize("columns", [80, 120, 240])
@pytest.mark.parametrize("table", TABLES)
def test_at_a_terminal_and_in_a_pipe_every_row_has_its_identifying_values_whole(
    table: str, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, printed = run_in_terminal(columns, table.split(), monkeypatch)
    assert code == 0, printed
    piped = ends(CliRunner().invoke(main, table.split()), 0)
    assert "…" not in printed + piped.stdout
    assert "all: " not in piped.stdout
    lines = printed.splitlines()
    assert all(len(line) <= columns for line in lines), printed
    for values in TABLES[table]:
        for shown in (printed.replace(",", ""), piped.stdout):
            words = [line.split() for line in shown.splitlines()]
            assert any(all(value in line for value in values) for line in words), (values, shown)


def test_at_80_columns_a_leaderboard_has_every_knob_that_differs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, printed = run_in_terminal(80, BOARD.split(), monkeypatch)
    head = next(line for line in printed.splitlines() if "rank" in line and "trial" in line)
    assert {"tp", "pp"} <= set(head.split()), printed
    folded = " ".join(printed.split())
    for same in ("nodes 1", "dp 1", "mbs 16", "mb 128", "precision fp32", "runs 1"):
        assert same in folded


HOSTILE_COMMANDS = [
    *("campaign list", "campaign show hostile", "trial show hostile/2", "trial log hostile/2"),
    *("token list", "model list", "audit --limit 500", "allocation show"),
]


def spelled_out_or_plain(text: str) -> bool:
    return all(c.isprintable() or c in "\n\t" or unicodedata.category(c) == "Zs" for c in text)


@pytest.mark.parametrize("command", HOSTILE_COMMANDS)
def test_nothing_from_outside_acts_on_a_terminal(
    command: str, served: ServeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAYOUT_TUNER_URL", served.url)
    monkeypatch.setenv("LAYOUT_TUNER_TOKEN_FILE", str(served.data_dir / "token"))
    code, printed = run_in_terminal(200, command.split(), monkeypatch)
    assert code == 0, printed
    assert spelled_out_or_plain(printed), repr(printed)
    piped = CliRunner().invoke(main, command.split())
    assert spelled_out_or_plain(piped.output), repr(piped.output)
    for spelled in ("\\u001b[2J", "\\u009b31m", "\\u202eevil\\u2066", "\\u007f\\u000d\\u0008"):
        assert spelled in piped.output, piped.output
        assert spelled in printed


def test_json_and_raw_logs_keep_values_and_a_message_of_several_lines_fakes_no_field(
    monkeypatch: pytest.MonkeyPatch, served: ServeProcess
) -> None:
    arguments = ["trial", "show", "hostile/2", "--json"]
    piped = CliRunner().invoke(main, arguments).stdout
    for printed in (piped, run_in_terminal(80, arguments, monkeypatch)[1]):
        assert spelled_out_or_plain(printed), repr(printed)
        assert json.loads(printed)["message"] == f"rank 1 of 2: crashed{HOSTILE}"

    raw = CliRunner().invoke(main, ["trial", "log", "hostile/2", "--raw"])
    assert raw.stdout_bytes.decode() == f"Traceback ...{HOSTILE}"

    with closing(sqlite3.connect(database_of(served.data_dir), timeout=30)) as rows:
        rows.execute(
            "UPDATE trials SET message = ? WHERE message LIKE '%out_of_memory%'",
            ("first\nstate         COMPLETED",),
        )
        rows.commit()
    shown = CliRunner().invoke(main, ["trial", "show", "hostile/3"]).stdout.splitlines()
    assert [line for line in shown if line.startswith("state")] == [
        "state         INFEASIBLE (out_of_memory)"
    ]
    assert "              state         COMPLETED" in shown


def test_an_error_and_a_traceback_escape_what_they_quote(monkeypatch: pytest.MonkeyPatch) -> None:
    code, printed = run_in_terminal(80, ["trial", "list", "no\x1b[31mne"], monkeypatch)
    assert code == 1
    assert spelled_out_or_plain(printed), repr(printed)
    refused = CliRunner().invoke(main, ["leaderboard", "x", "--objective", "a\x9b"])
    assert refused.exit_code == 2
    assert spelled_out_or_plain(refused.output), repr(refused.output)

    program = (
        "from layout_tuner.cli.main import CommandLine\n"
        "import click\n"
        "@click.group(cls=CommandLine)\n"
        "def group(): pass\n"
        "@click.command()\n"
        "def fall(): raise ValueError('no\\x1b[31m such\\u202e thing')\n"
        "CommandLine.get_command = lambda *_: fall\n"
        "group(['fall'])\n"
    )
    said = run_python(program).stderr
    assert "ValueError: no\\u001b[31m such\\u202e thing" in said
    assert spelled_out_or_plain(said)


@dataclass(frozen=True, kw_only=True)
class Watched:
    """What `campaign watch` showed in a terminal until a SIGINT, after the campaign had changed."""

    columns: int
    first: list[str]
    shown: list[str]
    """The rows of the screen before and after the change."""
    left: list[str]
    """The rows that stayed."""
    printed: str
    code: int


@pytest.fixture(scope="module", params=[20, 300])
def watched(request: pytest.FixtureRequest, served: ServeProcess) -> Watched:
    columns = int(request.param)
    with Terminal(columns) as terminal:
        process = terminal.start(
            "campaign", "watch", "hostile", LAYOUT_TUNER_DATA_DIR=str(served.data_dir)
        )
        terminal.wait_for("used")
        first = Screen(columns).after(terminal.so_far())
        before = len(terminal.so_far())
        with closing(TimelyStore(DataDir(served.data_dir).database_url)) as store:
            campaign = store.campaigns.by_name("hostile")
            change = store.campaigns.resume if campaign.state == "PAUSED" else store.campaigns.pause
            change(campaign.id)
            wait_until("it has changed", lambda: len(terminal.so_far()) > before)
        wait_until("it is whole", lambda: Screen(columns).after(terminal.so_far())[-1] != "")
        shown = Screen(columns).after(terminal.so_far())
        process.send_signal(2)
        code = process.wait(30)
    left, printed = Screen(columns).after(terminal.printed), terminal.printed
    return Watched(columns=columns, first=first, shown=shown, left=left, printed=printed, code=code)


def test_a_watched_campaign_is_redrawn_in_place(watched: Watched) -> None:
    """Facts keep their rows until watching is stopped."""
    assert watched.shown[0].startswith("hostile:")
    labels = ("best", "so far", "failed", "used")
    counts = {label: [row[: len(label)] for row in watched.shown].count(label) for label in labels}
    assert counts == dict.fromkeys(labels, 1), watched.shown


def test_a_watched_campaign_fits_into_the_terminal(watched: Watched) -> None:
    rows = (*watched.first, *watched.shown)
    assert all(len(row) < watched.columns for row in rows), rows


@pytest.mark.parametrize("watched", [300], indirect=True)
def test_a_watched_campaign_has_its_figures_whole(watched: Watched) -> None:
    text = " ".join(watched.shown)
    assert "failed   2: 1 crashed, 1 out_of_memory" in watched.shown
    assert "node-hours" in text
    assert "trial 1: n1-tp1-pp1" in text


def test_watching_prints_only_what_redraws(watched: Watched) -> None:
    plain = re.sub(r"\x1b\[\d*[AKJ]", "", watched.printed)
    assert all(c.isprintable() or c in "\r\n" for c in plain)


def test_stopping_to_watch_restores_the_terminal(watched: Watched) -> None:
    assert watched.code == 130
    assert "watchinghasended;campaignhostilegoeson" in "".join("".join(watched.left).split())
    assert not [row for row in watched.left if row.startswith(("best", "used", "failed"))]
    assert "Aborted" not in watched.printed
