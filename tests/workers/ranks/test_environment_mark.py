"""Processes that carry a mark in their environment are ended, also one that a look has missed."""

from __future__ import annotations

import os
import signal
import subprocess
import uuid

import pytest

from tests.workers.process_checks import MARK
from workers.ranks import processes
from workers.ranks.processes import end_marked


def test_a_process_that_shows_no_environment_at_one_look_is_ended_at_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mark = uuid.uuid4().hex
    own_processes = processes._own_processes
    looks: list[int] = []

    def all_but_at_the_first_look() -> list[int]:
        looks.append(1)
        return own_processes() if len(looks) > 1 else []

    monkeypatch.setattr(processes, "_own_processes", all_but_at_the_first_look)
    with subprocess.Popen(["sleep", "1000"], env={**os.environ, MARK: mark}) as process:
        try:
            end_marked(MARK, mark, within_s=10)
            assert process.wait(60) == -signal.SIGKILL
        finally:
            process.kill()
