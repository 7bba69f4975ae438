"""Commands that take a while show progress at a terminal, and nothing of it in a pipe."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner

from api.cli import main
from results_db.store import Store
from search_spaces.terminal import live_output
from tests.kit.postgres import upgraded
from tests.kit.services import ServeProcess
from tests.kit.store import make_campaign
from tests.kit.terminal import Screen, Terminal, run_in_terminal
from tests.search_spaces.tables.tables import layouts, make_row, make_text

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
    piped = CliRunner().invoke(main, arguments)
    assert piped.exit_code == 0, piped.output
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
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_output, "SHOWN_AFTER_S", 0.0)
    service = ServeProcess(tmp_path / "service")
    try:
        monkeypatch.setenv("LAYOUT_TUNER_DATA_DIR", str(service.data_dir))
        arguments = ("campaign", "import", str(table), "--name", "imported")
        code, printed = run_in_terminal(100, arguments, monkeypatch)
    finally:
        service.end()
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
