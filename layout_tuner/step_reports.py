"""`report_step`: how a training program reports its steps to the worker that runs it as a probe.

This module needs the standard library alone. A worker puts a copy of it, named layout_tuner.py, on
the program's path, for environments in which this project is not installed. Where it is installed,
the copy loads the installed package in its place.
"""

from __future__ import annotations

import os
import sys
import time
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from typing import Any, Final

_REPORT_VARIABLE: Final = "LAYOUT_TUNER_REPORT"
"""The named pipe of the probe; not set outside of one."""
_TRIES: Final = 1000
_PAUSE_S: Final = 0.001


def report_step(
    *,
    step_time_s: float | None = None,
    tokens: int | None = None,
    loss: float | None = None,
    skipped: int | None = None,
    peak_memory_bytes: int | None = None,
) -> None:
    """Reports that an optimizer step has ended, where a worker runs this program as a probe.

    Outside of a probe it does nothing. One rank may report for the whole job, or every rank may:
    then the slowest rank's time, the mean loss and the largest memory count.

    Args:
        step_time_s: seconds of the whole step; None: the time since the previous report counts.
        tokens: tokens that the whole job consumed in the step, counted by the program; None: they
            are assumed to be those of the layout, and the measurement is marked so.
        loss: mean loss of the step, in nats a token.
        skipped: whether the optimizer skipped the step, since a gradient overflowed in fp16, as a
            switch or as a count; None: not known.
        peak_memory_bytes: peak memory of this rank so far; None: the worker samples it.
    """
    path = os.environ.get(_REPORT_VARIABLE)
    if not path:
        return
    import json

    figures = {
        "step_time_s": step_time_s,
        "tokens": tokens,
        "loss": loss,
        "skipped": skipped,
        "peak_memory_bytes": peak_memory_bytes,
    }
    document = {name: _number(value) for name, value in figures.items() if value is not None}
    document["rank"] = int(os.environ.get("RANK", "0"))
    document["at_s"] = time.monotonic()
    _write_report(path, json.dumps(document).encode() + b"\n")


def _number(value: Any) -> float:
    """A number, or what stands for one: a tensor of one element, or a scalar of numpy."""
    return float(value.detach() if hasattr(value, "detach") else value)


def _write_report(path: str, line: bytes) -> None:
    """Writes a line to the pipe, as a whole; training goes on where nobody reads it."""
    try:
        pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:  # the worker has ended the probe
        return
    try:
        for _ in range(_TRIES):
            try:
                os.write(pipe, line)
                return
            except BlockingIOError:  # the pipe is full
                time.sleep(_PAUSE_S)
        sys.stderr.write("layout_tuner.report_step: a report was not read, and is lost\n")
    except OSError:
        return
    finally:
        os.close(pipe)


def _load_installed_package() -> None:
    """Puts an installed `layout_tuner` in the place of this copy of the module, if there is one."""
    own = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib takes 10 ms
    others = [path for path in sys.path if os.path.abspath(path) != own]  # noqa: PTH100
    installed = PathFinder.find_spec(__name__, others)
    if installed is None or installed.loader is None:
        return
    sys.modules[__name__] = module_from_spec(installed)
    installed.loader.exec_module(sys.modules[__name__])


if __name__ == "layout_tuner":
    _load_installed_package()
