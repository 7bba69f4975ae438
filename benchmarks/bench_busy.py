"""Whether a campaign on a busy machine still names the layout that is best on a quiet one.

Run as `make bench-busy`, or `python -m benchmarks.bench_busy --record`, with nothing else on the
machine. It takes half an hour on two cores. `--record` writes the section "Busy machine" of
RESULTS.md.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Final

import yaml

from benchmarks.arguments import count
from benchmarks.results_file import describe_machine, record, table
from benchmarks.service.live_service import ROOT, LiveService, wait_until
from layout_tuner.search_spaces.layouts.layout import Layout

EXAMPLE: Final = ROOT / "examples/tiny.yaml"
SHORTEST_S: Final = 5.0
LONGEST_S: Final = 40.0
"""Of a burst, and of the pause behind it."""
ASKED_RATIO: Final = 0.95
ASKED_SHARE: Final = 0.9
NUM_RIVALS: Final = 4
"""Layouts of the quiet campaign, the best first, among which the best is looked for."""

_PATIENCE_S: Final = 1200.0
_MOST_TRIALS: Final = 1000
_LOAD: Final = """
import os, random, sys, time
core, seed, shortest, longest = int(sys.argv[1]), int(sys.argv[2]), *map(float, sys.argv[3:])
os.sched_setaffinity(0, {core})
draw = random.Random(seed)
while True:
    until = time.monotonic() + draw.uniform(shortest, longest)
    while time.monotonic() < until:
        pass
    time.sleep(draw.uniform(shortest, longest))
"""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A campaign of the example."""

    ranked: tuple[Layout, ...]
    """The best first."""
    num_runs: int
    """Trials that completed, repeats included."""
    num_disturbed: int
    """Those that others disturbed."""
    seconds: float
    """Wall time."""


@dataclass
class Speeds:
    """Quiet probes of a layout."""

    tokens_per_s: list[float] = field(default_factory=list)
    num_disturbed: int = 0

    @property
    def median(self) -> float:
        return median(self.tokens_per_s)


@contextmanager
def load(core: int, seed: int) -> Iterator[None]:
    """Bursts and pauses of one busy process on a core, from before the block to its end."""
    drawn = [str(each) for each in (core, seed, SHORTEST_S, LONGEST_S)]
    process = subprocess.Popen([sys.executable, "-c", _LOAD, *drawn])
    try:
        yield
    finally:
        process.kill()
        process.wait()


@contextmanager
def fresh_service() -> Iterator[LiveService]:
    """A service with no history and a worker on this machine."""
    with (
        TemporaryDirectory(prefix="layout-tuner-bench-") as folder,
        LiveService(Path(folder)) as service,
    ):
        service.worker().start()
        yield service


def run_example(service: LiveService, **changes: Any) -> Ended:
    """Runs the example's campaign on the service to its end; a driver and a worker run."""
    document = {**yaml.safe_load(EXAMPLE.read_text()), **changes}
    name = service.post("/campaigns", document)["name"]
    at = f"/campaigns/{name}"

    def has_ended() -> bool:
        return service.get(at)["state"] in ("COMPLETED", "FAILED", "CANCELLED")

    wait_until("the campaign has ended", has_ended, patience_s=_PATIENCE_S, pause_s=1.0)
    campaign = service.get(at)
    if campaign["state"] != "COMPLETED":
        raise RuntimeError(f"the campaign of {EXAMPLE.name} ended {campaign['state']}: {campaign}")
    trials = service.store.trial_pages.page(campaign["id"], limit=_MOST_TRIALS).trials
    measured = [each.measurement for each in trials if each.measurement is not None]
    ranked = service.get(f"{at}/leaderboard")["trials"]
    return Ended(
        ranked=tuple(Layout.from_mapping(each["layout"]) for each in ranked),
        num_runs=len(measured),
        num_disturbed=sum(each.is_disturbed for each in measured),
        seconds=campaign["wall_time_s"],
    )


def ended_campaign(core: int | None = None, seed: int = 0, **changes: Any) -> Ended:
    """The example's campaign on a service of its own, under load where a core is named."""
    with fresh_service() as service:
        service.driver().start()
        with nullcontext() if core is None else load(core, seed):
            return run_example(service, **changes)


def quiet_speeds(layouts: Sequence[Layout], rounds: int) -> dict[Layout, Speeds]:
    """Tokens/s of so many probes of each layout, one round after the other.

    Every second round goes through the layouts backwards, so that none of them always comes first.
    """
    example = yaml.safe_load(EXAMPLE.read_text())
    found = {layout: Speeds() for layout in layouts}
    with fresh_service() as service:
        for turn in range(rounds):
            for layout in layouts if turn % 2 == 0 else reversed(layouts):
                trial = service.add(layout, probe=example["probe"], space=example["space"])
                service.wait_for_end([trial])
                measured = service.trial(trial).trial.measurement
                if measured is None:
                    raise RuntimeError(f"{layout.key} was not measured: {service.trial(trial)}")
                found[layout].tokens_per_s.append(measured.tokens_per_s)
                found[layout].num_disturbed += measured.is_disturbed
    return found


def section(*, seeds: int, rounds: int) -> str:
    """The section of the results."""
    quiet = ended_campaign(strategy="exhaustive", budget={"trials": _MOST_TRIALS})
    cores = sorted(os.sched_getaffinity(0))
    busy = [ended_campaign(cores[seed % len(cores)], seed) for seed in range(seeds)]
    rivals = quiet.ranked[:NUM_RIVALS]
    compared = list(dict.fromkeys([*rivals, *(each.ranked[0] for each in busy)]))
    speeds = quiet_speeds(compared, rounds)
    best = max(compared, key=lambda layout: speeds[layout].median)
    won = Counter(each.ranked[0] for each in busy)
    rows: list[tuple[str, ...]] = [
        (
            layout.key,
            str(won[layout]),
            f"{speeds[layout].median / speeds[best].median:.3f}",
            f"{speeds[layout].median:,.0f}",
            f"{min(speeds[layout].tokens_per_s):,.0f} to {max(speeds[layout].tokens_per_s):,.0f}",
            str(speeds[layout].num_disturbed),
        )
        for layout in sorted(compared, key=lambda layout: -speeds[layout].median)
    ]
    header = (
        "layout",
        "won",
        "quiet speed over the best's",
        "tokens/s, median",
        "all",
        "disturbed",
    )
    good = [each for each in compared if speeds[each].median >= ASKED_RATIO * speeds[best].median]
    within = sum(won[layout] for layout in good)
    asked = ceil(ASKED_SHARE * seeds)
    figure = (
        "winners within 5 % of the quiet best",
        f"{asked} of {seeds}",
        f"{within} of {seeds}",
        "yes" if within >= asked else "**no**",
    )
    print(table(header, rows), end="\n\n")
    return f"""`make bench-busy`; {describe_machine("torch", "ray")}. {seeds} campaigns of `examples/tiny.yaml`, each on a service of its own, while one process keeps one core busy in bursts of {SHORTEST_S:g} to {LONGEST_S:g} s with pauses as long between them: {_range(each.num_runs for each in busy)} runs each, {_range(each.num_disturbed for each in busy)} of them marked as disturbed, {_range(round(each.seconds) for each in busy)} s.

{table(("figure", "asked", "measured", "reached"), [figure])}
"""


def _range(numbers: Iterable[int]) -> str:
    found = sorted(numbers)
    return f"{found[0]}" if found[0] == found[-1] else f"{found[0]} to {found[-1]}"


def main() -> None:
    """Prints the section, and records it where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=count, default=10, help="loads")
    parser.add_argument("--rounds", type=count, default=8, help="quiet probes of each layout")
    parser.add_argument("--record", action="store_true", help="write RESULTS.md")
    asked = parser.parse_args()
    text = section(seeds=asked.seeds, rounds=asked.rounds)
    print(text)
    if asked.record:
        record("Busy machine", text)


if __name__ == "__main__":
    main()
