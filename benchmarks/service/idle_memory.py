"""Memory of an idle `layout-tuner up`, and how long its first probe takes, beside another checkout.

Run as `python -m benchmarks.service.idle_memory --before CHECKOUT`, where CHECKOUT has a `.venv` of
its own. The two take turns. A turn starts `up` on a folder of its own; once driver and worker are
ready and it has settled, it reads each process's proportional share of memory (PSS). Then it starts
`up` again, and submits two trials as soon as it is ready. `--record` writes the section "Idle
memory" of RESULTS.md.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any, Final

import httpx
import psutil

from benchmarks.arguments import count
from benchmarks.bench_idle import ProcessOfUp, process_of_up, running_up
from benchmarks.results_file import describe_machine, record, table
from benchmarks.service.live_service import ROOT
from benchmarks.trainer.trainer_table import Figure
from layout_tuner.protocol.connection.running_service import find_service

_MIB: Final = 2**20
ASKED: Final = 0.75
PATIENCE_S: Final = 300.0
CAMPAIGN: Final[Mapping[str, Any]] = {
    "name": "first",
    "model": "tiny",
    "cluster": "local-cpu",
    "strategy": "exhaustive",
    "budget": {"trials": 2},
    "probe": {"warmup": 2, "iterations": 10},
    "space": {"global_batch_size": 16, "tp": [1, 2], "dp": 1, "pp": 1, "micro_batch_size": 4},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One turn of a checkout."""

    pss_bytes: Mapping[ProcessOfUp, int]
    first_measured_s: float
    """From the start of `up` to the first measured trial."""
    first_probe_s: float
    """Of that trial, from its start to its end."""

    @property
    def total_mib(self) -> float:
        return sum(self.pss_bytes.values()) / _MIB


def take_turn(checkout: Path, settle_s: float, options: Sequence[str]) -> Turn:
    """Measures one checkout once."""
    with (
        tempfile.TemporaryDirectory() as folder,
        running_up(Path(folder) / "data", *options, checkout=checkout) as up,
    ):
        time.sleep(settle_s)
        pss_bytes = memory_of(up)
    with tempfile.TemporaryDirectory() as folder:
        data_dir, began = Path(folder) / "data", time.monotonic()
        with running_up(data_dir, *options, checkout=checkout):
            probe_s = _first_probe_s(data_dir)
            return Turn(
                pss_bytes=pss_bytes,
                first_measured_s=time.monotonic() - began,
                first_probe_s=probe_s,
            )


def memory_of(up: psutil.Process) -> dict[ProcessOfUp, int]:
    """The proportional share of memory of each process of `up`, in bytes."""
    return {
        process_of_up(process, up.pid): process.memory_full_info().pss
        for process in (up, *up.children(recursive=True))
    }


def _first_probe_s(data_dir: Path) -> float:
    """Submits the campaign, and waits for its first measured trial; its seconds."""
    service = find_service(data_dir)
    assert service is not None
    headers = {"Authorization": f"Bearer {(data_dir / 'token').read_text().strip()}"}
    with httpx.Client(base_url=f"{service.url}/v1", headers=headers, trust_env=False) as http:
        http.post("/campaigns", json=CAMPAIGN).raise_for_status()
        give_up_at = time.monotonic() + PATIENCE_S
        while time.monotonic() < give_up_at:
            answer = http.get("/campaigns/first/trials", params={"state": "COMPLETED"})
            for trial in answer.raise_for_status().json()["trials"]:
                began, ended = (
                    datetime.fromisoformat(trial[name]) for name in ("started_at", "ended_at")
                )
                return (ended - began).total_seconds()
            time.sleep(0.05)
    raise TimeoutError(f"no trial was measured in {PATIENCE_S:g} s")


def figures_of(before: Sequence[Turn], after: Sequence[Turn]) -> list[Figure]:
    """What is asked, of turns in pairs."""
    figures = []
    for name, asked, values in (
        ("memory of an idle `layout-tuner up` (PSS), over before", ASKED, "total_mib"),
        ("from its start to the first measured trial, over before", 1.0, "first_measured_s"),
        ("the first probe's own seconds, over before", 1.0, "first_probe_s"),
    ):
        of = [[getattr(turn, values) for turn in turns] for turns in (before, after)]
        ratios = [own / others for others, own in zip(*of, strict=True)]
        figures.append(
            Figure(
                name=f"{name}, median of {len(ratios)} pairs",
                asked=f"at most {asked:g}",
                measured=f"{median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}; medians "
                f"{median(of[1]):.4g} and {median(of[0]):.4g})",
                reached=median(ratios) <= asked,
            )
        )
    return figures


def main() -> None:
    """Measures, prints, and records if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, required=True, help="the other checkout")
    parser.add_argument("--rounds", type=count, default=5, help="turns of each")
    parser.add_argument("--settle", type=count, default=30, help="seconds before memory is read")
    parser.add_argument("--launcher", choices=["local", "ray"], help="of this checkout alone")
    parser.add_argument("--record", action="store_true", help="write to RESULTS.md")
    asked = parser.parse_args()
    own = ("--launcher", asked.launcher) if asked.launcher else ()
    sides: list[tuple[Path, Sequence[str], list[Turn]]] = [(asked.before, (), []), (ROOT, own, [])]
    for index in range(asked.rounds):
        for checkout, options, turns in sides[:: 1 if index % 2 else -1]:
            turns.append(take_turn(checkout.absolute(), asked.settle, options))
            print(f"{checkout}: {turns[-1].total_mib:.0f} MiB, first measured trial after "
                  f"{turns[-1].first_measured_s:.1f} s, its probe {turns[-1].first_probe_s:.2f} s")  # fmt: skip
    last = sorted(sides[1][2][-1].pss_bytes.items(), key=lambda each: -each[1])
    numbers = [each.cells() for each in figures_of(sides[0][2], sides[1][2])]
    text = (
        f"`python -m benchmarks.service.idle_memory --before CHECKOUT`; {describe_machine('torch')}."
        f"\n\n{table(('figure', 'asked', 'measured', 'reached'), numbers)}\n\n"
        + table(
            ("process of the last turn", "MiB"),
            [(f"{each.part}: {each.words}", f"{pss / _MIB:.0f}") for each, pss in last],
        )
    )
    print(text)
    if asked.record:
        record("Idle memory", text)


if __name__ == "__main__":
    main()
