"""Processor time of an idle `layout-tuner up`: no campaign, and no watcher unless asked for.

Run as `python -m benchmarks.bench_idle`. It starts the whole service on a folder of its own, lets
it settle, and reads the processor times of each process twice. `--watchers N` opens so many streams
of live events, as pages of a browser do. `--record` writes the section "Idle" of RESULTS.md.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx
import psutil

from benchmarks.arguments import count
from benchmarks.results_file import describe_machine, record, table
from layout_tuner.protocol.connection.running_service import find_service

SETTLE_S: Final = 30
MEASURED_S: Final = 60
START_PATIENCE_S: Final = 120.0
ASKED_SHARE: Final = 0.01
"""Of one core, for api, driver and worker together."""

OURS: Final = ("api", "driver", "worker")
"""Parts that the target is about. The worker's part has all of its own processes: the bridge to
Ray, the zygote and its warden."""

_COMMANDS: Final = {"serve": "api", "driver": "driver", "worker": "worker", "up": "up"}


@dataclass(frozen=True, kw_only=True, slots=True)
class IdleCost:
    """Processor time by part of the service, as shares of one core."""

    shares: Mapping[str, float]
    """By part: api, driver, worker, up, ray."""
    processes: Mapping[str, float]
    """By process, for finding what wakes up."""

    @property
    def ours(self) -> float:
        """Of api, driver and worker together."""
        return sum(self.shares.get(part, 0.0) for part in OURS)


def measure_idle(
    *, settle_s: float = SETTLE_S, measured_s: float = MEASURED_S, watchers: int = 0
) -> IdleCost:
    """Starts `layout-tuner up` and measures it while nothing happens."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as opened:
        data_dir = Path(folder) / "data"
        up = opened.enter_context(running_up(data_dir))
        for _ in range(watchers):
            opened.enter_context(_watching(data_dir))
        time.sleep(settle_s)
        before, began = processor_times(up), time.monotonic()
        time.sleep(measured_s)
        after, took_s = processor_times(up), time.monotonic() - began
    shares: defaultdict[str, float] = defaultdict(float)
    processes: dict[str, float] = {}
    for process, used_s in after.items():
        share = (used_s - before.get(process, 0.0)) / took_s
        shares[process.part] += share
        processes[f"{process.part}: {process.words} ({process.pid})"] = share
    return IdleCost(shares=shares, processes=processes)


@dataclass(frozen=True, slots=True)
class ProcessOfUp:
    """A process below `layout-tuner up`."""

    pid: int
    part: str
    words: str


@contextmanager
def running_up(
    data_dir: Path, *options: str, checkout: Path | None = None
) -> Iterator[psutil.Process]:
    """`layout-tuner up`, of this or another checkout, once its driver and its worker are ready."""
    command = [
        sys.executable if checkout is None else str(checkout / ".venv/bin/python"),
        "-m",
        "layout_tuner",
        "up",
        "--data-dir",
        str(data_dir),
        "--port",
        "0",
    ]
    command += options
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=checkout) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("ready:"):
                    break
            yield psutil.Process(process.pid)
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=START_PATIENCE_S)


@contextmanager
def _watching(data_dir: Path) -> Iterator[None]:
    """A stream of all live events that is open and, for the service, read."""
    service = find_service(data_dir)
    assert service is not None
    headers = {"Authorization": f"Bearer {(data_dir / 'token').read_text().strip()}"}
    with httpx.stream(
        "GET", f"{service.url}/v1/events", headers=headers, timeout=None, trust_env=False
    ) as stream:
        next(stream.iter_lines())
        yield


def processor_times(up: psutil.Process) -> dict[ProcessOfUp, float]:
    """Seconds of processor time of every process, by process."""
    times = {}
    for process in (up, *up.children(recursive=True)):
        try:
            used = process.cpu_times()
            times[process_of_up(process, up.pid)] = used.user + used.system
        except psutil.NoSuchProcess:
            continue
    return times


def process_of_up(process: psutil.Process, up: int) -> ProcessOfUp:
    """A process below `up`, which has this pid."""
    words = process.cmdline()
    shown = " ".join(word for word in words[1:6] if not word.startswith("-"))
    return ProcessOfUp(process.pid, _part(process, up), (shown or process.name())[:70])


def _part(process: psutil.Process, up: int) -> str:
    """The part of a process: of our command above it, unless it is one of Ray's own."""
    if _is_of_ray(process):
        return "ray"
    if process.pid == up:
        return "up"
    for above in (process, *process.parents()):
        words = above.cmdline()
        if "layout_tuner" in words:
            return _COMMANDS.get(words[words.index("layout_tuner") + 1], "other")
        if _is_of_ray(above):
            return "ray"
    return "other"


def _is_of_ray(process: psutil.Process) -> bool:
    words = " ".join(process.cmdline())
    return "raylet" in words or "gcs_server" in words or f"{os.sep}ray{os.sep}" in words


def main() -> None:
    """Measures, prints, and records if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--settle", type=count, default=SETTLE_S, help="seconds before")
    parser.add_argument("--seconds", type=count, default=MEASURED_S, help="seconds that count")
    parser.add_argument("--watchers", type=int, default=0, help="open streams of live events")
    parser.add_argument("--record", action="store_true", help="write to RESULTS.md")
    asked = parser.parse_args()
    cost = measure_idle(settle_s=asked.settle, measured_s=asked.seconds, watchers=asked.watchers)
    for words, share in sorted(cost.processes.items(), key=lambda each: -each[1]):
        print(f"{share:7.2%}  {words}")
    parts = ", ".join(f"{part} {share:.2%}" for part, share in sorted(cost.shares.items()))
    row = (
        f"`layout-tuner up` without a campaign, with {asked.watchers} watchers of live events, over "
        f"{asked.seconds} s: processor time of api, driver and worker",
        f"at most {ASKED_SHARE:.0%} of a core",
        f"{cost.ours:.2%} ({parts})",
        "yes" if cost.ours <= ASKED_SHARE else "**no**",
    )
    numbers = table(("figure", "asked", "measured", "reached"), [row])
    text = f"`python -m benchmarks.bench_idle`; {describe_machine('ray')}.\n\n{numbers}"
    print(text)
    if asked.record:
        record("Idle", text)


if __name__ == "__main__":
    main()
