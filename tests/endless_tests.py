"""Tests that never end by themselves, for `test_interrupted_runs.py`; no suite has them."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Final

from benchmarks.service.postgres_server import running_server
from tests.kit.services import ServeProcess

NEVER_ENDED: Final[list[object]] = []
"""What no fixture ends; pytest would report it if it were garbage."""

DAEMONS: Final = "sleep 5001 & (setsid sleep 5002 &) ; exec sleep 5003"


def wait_for_ever(name: str) -> None:
    """Tells the test that started this run, which then interrupts it."""
    (Path(os.environ["TOLD"]) / name).touch()
    while True:
        signal.pause()


def test_with_a_service_and_daemons(tmp_path: Path) -> None:
    service = ServeProcess(tmp_path / "data")
    assert service.get("/campaigns") is not None
    NEVER_ENDED.append(service)
    NEVER_ENDED.append(subprocess.Popen(["sh", "-c", DAEMONS], start_new_session=True))
    wait_for_ever("daemons")


def test_with_a_database() -> None:
    with running_server() as server:
        assert server.execute("SELECT 1")
        wait_for_ever("database")
