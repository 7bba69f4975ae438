from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.long_run.measured import halves, kept
from tests.long_run.processes import SERVICES
from tests.long_run.run import LongRun

MINUTES = 10
CLIENTS = 4
"""Connections by which the clients of two services may be spread in another way."""


@pytest.fixture
def folder() -> Iterator[Path]:
    """Not pytest's: PostgreSQL may not read it, and its paths are too long for a socket."""
    with tempfile.TemporaryDirectory(prefix="lt-long-run-", ignore_cleanup_errors=True) as name:
        yield Path(name)


@pytest.mark.nightly
@pytest.mark.timeout(5400)
def test_nothing_is_lost_in_ten_minutes_of_kills(folder: Path) -> None:
    run = LongRun(folder, MINUTES)
    assert run.go_on() == [], run.report()
    figures = {(each.service, each.figure): each for each in halves(kept(run.samples))}
    for service in SERVICES:
        handles = figures[service, "handles"]
        assert abs(handles.second - handles.first) <= CLIENTS, run.report()


def test_a_run_of_another_length_is_refused(folder: Path) -> None:
    folder.joinpath("state.json").write_text('{"minutes": 120, "faults": []}')
    command = [sys.executable, "-m", "tests.long_run.run", "--minutes", "10", "--folder"]
    ended = subprocess.run([*command, folder], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1].endswith(" is one of 120 minutes; leave --minutes out")
