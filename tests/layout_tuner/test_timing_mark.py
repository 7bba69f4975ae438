"""Whether ranks time iterations: real processes that hold the mark, and end."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from layout_tuner.timing_mark import (
    SHARED_CORES_VARIABLE,
    TIMING_VARIABLE,
    is_timing,
    shares_cores,
    timing,
    wait_while_timing,
)
from tests.kit.python_process import start_python

RANK = """
from layout_tuner.timing_mark import timing
with timing():
    print("timing", flush=True)
    input()
print("timed", flush=True)
input()
"""


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(TIMING_VARIABLE, str(tmp_path / "timing"))
    return tmp_path / "timing"


def test_ranks_are_seen_to_time_until_the_last_of_them_is_done_or_killed(mark: Path) -> None:
    assert not is_timing(), "none has begun"
    ranks = [start_python(RANK, **{TIMING_VARIABLE: str(mark)}) for _ in range(2)]
    try:
        for rank in ranks:
            assert rank.stdout.readline() == "timing\n"
        assert is_timing()
        ranks[0].stdin.write("\n")
        ranks[0].stdin.flush()
        assert ranks[0].stdout.readline() == "timed\n"
        assert is_timing(), "the other one still times"
        ranks[1].kill()
        ranks[1].wait()
        assert not is_timing()
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def test_work_waits_while_ranks_time_until_it_must_stop_and_not_for_ever(mark: Path) -> None:
    paused: list[float] = []

    def wait(pause_s: float) -> bool:
        paused.append(pause_s)
        return len(paused) == 3

    assert not wait_while_timing(wait)
    assert paused == [], "nobody times"
    with timing():
        assert wait_while_timing(wait), "it must stop"
        assert len(paused) == 3
        assert not wait_while_timing(lambda pause_s: bool(time.sleep(0)), longest_s=1.0)
    assert not wait_while_timing(wait)


def test_processes_of_up_know_that_they_share_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHARED_CORES_VARIABLE, "1")
    assert shares_cores()
    monkeypatch.delenv(SHARED_CORES_VARIABLE)
    assert not shares_cores()


@pytest.mark.parametrize("path", ["", "/dev/null/nowhere"])
def test_where_the_mark_is_unknown_or_cannot_be_opened_nobody_waits(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setenv(TIMING_VARIABLE, path)
    with timing():
        assert not is_timing()


def test_a_mark_of_another_user_or_behind_a_link_is_not_used(mark: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").touch()
    mark.symlink_to(tmp_path / "elsewhere")
    with timing():
        assert not is_timing()
    mark.unlink()
    with timing():
        assert is_timing()
    if os.getuid() == 0:
        os.chown(mark, 65534, 65534)
        with timing():
            assert not is_timing()


def test_processes_that_were_told_nothing_share_the_users_mark(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(TIMING_VARIABLE)
    rank = start_python(f"import os; os.environ.pop({TIMING_VARIABLE!r}, None)\n{RANK}")
    try:
        assert rank.stdout.readline() == "timing\n"
        assert is_timing()
    finally:
        rank.kill()
        rank.communicate()
