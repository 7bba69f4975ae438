"""Clocks that a test sets, each a process's own, by libfaketime."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.service.live_service import ROOT


def find_faketime() -> Path | None:
    """The preloadable library of Debian's package, where it is installed."""
    found = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
    return found[0] if found else None


AT_START = """
import os, select, time
# The library refuses the absolute monotonic sleeps of Python's where it leaves that clock alone.
time.sleep = lambda seconds: select.select([], [], [], max(seconds, 0))
os.environ.pop("LD_PRELOAD", None)  # the clock is this process's alone: Ray's need not be
"""


class Clock:
    """A clock for a process that is started with its environment; it can be set at any time."""

    def __init__(self, folder: Path) -> None:
        library = find_faketime()
        if library is None:
            pytest.skip("libfaketime is not installed (Debian's package faketime)")
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(AT_START)
        self._file = folder / "clock"
        self.set(0)
        self.environment = {
            "PYTHONPATH": f"{folder}:{ROOT}",
            "LD_PRELOAD": str(library),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",
            # Nobody can set a monotonic clock, and nobody does here.
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    def set(self, ahead_s: int) -> None:
        """Sets it so many seconds before the real one."""
        written = self._file.with_suffix(".new")
        written.write_text(f"{ahead_s:+d}\n")
        os.replace(written, self._file)  # noqa: PTH105 (a reader never sees half of it)
