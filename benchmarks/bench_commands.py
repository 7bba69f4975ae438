"""How long commands take as whole processes, in turns with a Python that does nothing.

Run as `make bench-commands`, or `python -m benchmarks.bench_commands --record`, with nothing else
on the machine. It takes half a minute. `--record` writes the section "Commands" of RESULTS.md.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Final

from benchmarks.arguments import count
from benchmarks.results_file import describe_machine, record, table
from benchmarks.service.live_service import ROOT, LiveService

ASKED_S: Final = 0.25
"""The most that a command may take."""

TABLE: Final = ROOT / "benchmarks" / "data" / "tiny_local_cpu.csv"
NOTHING: Final = (sys.executable, "-c", "pass")
COMMANDS: Final = (("--help",), ("campaign", "--help"), ("campaign", "list"))


def seconds_of(command: tuple[str, ...], environment: Mapping[str, str]) -> float:
    """Seconds from the start of a process to its end."""
    start = time.perf_counter()
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def measure(repeats: int) -> dict[str, float]:
    """Median seconds of each command, and of a Python that does nothing under the name "".

    The commands talk to a service with one campaign. Each command runs once before it is timed,
    so that its modules are compiled.
    """
    program = str(Path(sys.executable).with_name("layout-tuner"))
    lines = {"": NOTHING} | {" ".join(words): (program, *words) for words in COMMANDS}
    seconds: dict[str, list[float]] = {name: [] for name in lines}
    with TemporaryDirectory() as folder, LiveService(Path(folder)) as service:
        environment = {**os.environ, "LAYOUT_TUNER_DATA_DIR": str(service.data.path)}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        seconds_of((program, "campaign", "import", str(TABLE)), environment)
        for turn in range(repeats + 1):
            for name, command in lines.items():
                took_s = seconds_of(command, environment)
                if turn:
                    seconds[name].append(took_s)
    return {name: median(each) for name, each in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=count, default=15, help="timed runs of each command")
    parser.add_argument("--record", action="store_true", help="write the section of RESULTS.md")
    arguments = parser.parse_args()
    found = measure(arguments.repeats)
    python_s = found.pop("")
    rows = [
        (f"`layout-tuner {name}`", f"{took_s:.3f}", f"{took_s / python_s:.1f}", f"{ASKED_S:g}")
        for name, took_s in found.items()
    ]
    header = ("command", "s", "times `python -c pass`", "asked, s at most")
    text = (
        f"`make bench-commands`; {describe_machine('click', 'httpx', 'pydantic')}. Whole processes, "
        f"medians of {arguments.repeats} runs in turns with "
        f"`python -c pass` ({python_s:.3f} s). `campaign list` asks a service on this machine.\n\n"
        f"{table(header, rows)}"
    )
    print(text)
    if arguments.record:
        record("Commands", text)


if __name__ == "__main__":
    main()
