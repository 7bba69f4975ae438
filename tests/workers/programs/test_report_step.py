"""`layout_tuner.report_step`, as training programs call it."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from layout_tuner import report_step, step_reports
from tests.kit.python_process import ROOT, printed_by

FILE = Path(step_reports.__file__)


@pytest.fixture
def pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The reading end of a probe's pipe."""
    path = tmp_path / "report"
    os.mkfifo(path)
    monkeypatch.setenv("LAYOUT_TUNER_REPORT", str(path))
    fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    yield fd
    os.close(fd)


def reports(pipe: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in os.read(pipe, 1 << 16).splitlines()]


def test_a_report_holds_what_is_known(pipe: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    before_s = time.monotonic()
    report_step(step_time_s=0.5, tokens=64)
    monkeypatch.delenv("RANK")
    report_step()
    report_step(loss=float("-inf"), step_time_s=float("inf"))
    first, second, not_finite = reports(pipe)
    assert (not_finite["loss"], not_finite["step_time_s"]) == (-math.inf, math.inf)
    assert before_s <= first.pop("at_s") <= second.pop("at_s") <= time.monotonic()
    assert first == {"rank": 3, "step_time_s": 0.5, "tokens": 64}
    assert second == {"rank": 0}


def test_tensors_and_scalars_of_numpy_are_numbers(pipe: int) -> None:
    import numpy as np
    import torch

    report_step(
        step_time_s=np.float32(0.5),
        tokens=torch.tensor([64]),
        loss=torch.tensor(2.5, dtype=torch.bfloat16, requires_grad=True),
        peak_memory_bytes=np.int64(7),
    )
    (report,) = reports(pipe)
    del report["at_s"]
    assert report == {
        "rank": 0, "step_time_s": 0.5, "tokens": 64, "loss": 2.5, "peak_memory_bytes": 7,
    }  # fmt: skip


def test_a_full_pipe_that_is_read_again_loses_nothing(pipe: int) -> None:
    def write() -> None:
        for number in range(2000):
            report_step(tokens=number)

    writer = threading.Thread(target=write)
    writer.start()
    read = b""
    while writer.is_alive() or read.count(b"\n") < 2000:
        try:
            read += os.read(pipe, 1 << 12)
        except BlockingIOError:
            continue
    assert [json.loads(line)["tokens"] for line in read.splitlines()] == list(range(2000))


def test_a_full_pipe_that_nobody_reads_does_not_stop_the_training(
    pipe: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("layout_tuner.step_reports._TRIES", 20)
    with suppress(BlockingIOError):
        while os.write(pipe, b"x" * 4096):
            pass
    started = time.monotonic()
    report_step(tokens=1)
    assert time.monotonic() - started < 5
    assert "a report was not read, and is lost" in capsys.readouterr().err


def test_outside_of_a_probe_and_without_a_reader_nothing_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LAYOUT_TUNER_REPORT", raising=False)
    report_step(step_time_s=1.0, tokens=1, loss=1.0, peak_memory_bytes=1)
    path = tmp_path / "report"
    monkeypatch.setenv("LAYOUT_TUNER_REPORT", str(path))
    report_step()  # removed with the directory of the probe
    os.mkfifo(path)
    report_step()  # the supervisor has been killed


def test_the_file_alone_is_enough_for_a_program(pipe: int, tmp_path: Path) -> None:
    """In isolated mode, without site packages: nothing of this project can be imported."""
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from layout_tuner import report_step\n"
        "report_step(tokens=5)\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('api', 'httpx', 'workers')])"
    )
    shutil.copy(FILE, tmp_path / "layout_tuner.py")
    assert printed_by(code, options=["-I", "-S"]).strip() == "[]"
    assert reports(pipe)[0]["tokens"] == 5


def test_the_file_does_not_hide_an_installed_package(pipe: int, tmp_path: Path) -> None:
    """A program may report its steps and use the client, with the file first on its path."""
    shutil.copy(FILE, tmp_path / "layout_tuner.py")
    code = (
        "import layout_tuner\n"
        "from layout_tuner import Client, report_step\n"
        "report_step(tokens=5)\n"
        "import sys; assert sys.modules['layout_tuner'] is layout_tuner\n"
        "print(layout_tuner.__file__, Client.__module__)"
    )
    paths = f"{tmp_path}:{ROOT}"
    printed = printed_by(code, cwd=tmp_path, PYTHONPATH=paths).split()
    assert printed == [str(ROOT / "layout_tuner/__init__.py"), "layout_tuner.client.clients"]
    assert reports(pipe)[0]["tokens"] == 5


def other_pythons() -> list[Path]:
    """Interpreters of other versions, from 3.8 on, as far as this machine has some."""
    folders = [*os.get_exec_path(), *map(str, Path.home().glob(".pyenv/versions/*/bin"))]
    found = {
        minor: path
        for folder in folders
        for minor in range(8, 15)
        if (path := Path(folder, f"python3.{minor}")).exists() and path.parent.name == "bin"
    }
    return [path for minor, path in found.items() if minor != sys.version_info.minor]


def test_other_versions_of_python_can_report(pipe: int, tmp_path: Path) -> None:
    pythons = other_pythons()
    if not pythons:
        pytest.skip("this machine has no other Python")
    shutil.copy(FILE, tmp_path / "layout_tuner.py")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import layout_tuner as l; l.report_step(tokens=9)"
    for python in pythons:
        subprocess.run([python, "-I", "-c", code], check=True)
        assert reports(pipe)[0]["tokens"] == 9, python
