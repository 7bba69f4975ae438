"""The time between probes, and what failed probes leave behind: real service, worker, Ray, ranks.

Run as `make bench-workers`, or `python -m benchmarks.bench_workers --record`, with nothing else on
the machine. It takes about 25 minutes on two cores. `--only` chooses a part. `--record` writes a
section of `benchmarks/RESULTS.md` for each part.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Final

from benchmarks.arguments import count, refuse
from benchmarks.results_file import describe_machine, record, table
from benchmarks.service.live_service import WaitedInVainError
from benchmarks.trainer.trainer_table import Figure
from benchmarks.trainer.turn_around import (
    PROBE_S,
    RANK_ENTRY,
    MissingMomentsError,
    measure_devices_back,
    measure_share,
    measure_turn_around,
    recorded_service,
)
from benchmarks.workers.fault_storm import Storm, spread, storm
from benchmarks.workers.ray_kills import OURS, RAYS, WARDENS, away_after_kill_s
from layout_tuner.protocol.outcome import ProbeRequest
from layout_tuner.search_spaces.clusters.cluster_presets import resolve_cluster
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_presets import model_preset
from layout_tuner.workers.launchers.ray.launcher import ray_launcher

GAP_S: Final = 0.6
TORCHRUN_TIMES: Final = 5.0
SHARE: Final = 0.8
BACK_S: Final = 1.0
NODE_BACK_S: Final = 60.0
MIB: Final = 1 << 20
MEMORY_GONE_BYTES: Final = 512 * MIB
"""Of the whole machine: what the page cache and others do in the same minutes."""
DESCRIPTORS_MORE: Final = 8
"""A connection or two that Ray has opened anew."""

Part = Callable[[Path, int], list[Figure]]


def turn_around(folder: Path, scale: int) -> list[Figure]:
    """From probe to probe, torchrun in turns; the share of iterations; and a killed rank."""
    with recorded_service(folder) as service:
        turn = measure_turn_around(service, rounds=scale)
        back_s = measure_devices_back(service, repeats=max(2, 5 * scale // 4))
        share = measure_share(service, num_probes=max(2, scale))
    return [
        Figure(
            name="from a probe's outcome to the end of the next one's first iteration, 2 ranks, median",
            asked=f"under {GAP_S} s",
            measured=f"{turn.gap_s:.3f} s (p90 {turn.gap_p90_s:.3f} s, {len(turn.gaps_s)} gaps)",
            reached=turn.gap_s < GAP_S,
        ),
        Figure(
            name="torchrun from its launch to the end of the same probe's first iteration, over that",
            asked=f"{TORCHRUN_TIMES:g} times",
            measured=f"{turn.times:.1f} times: {median(turn.torchrun_s):.2f} s, in turns",
            reached=turn.times >= TORCHRUN_TIMES,
        ),
        Figure(
            name=f"share of the devices' time in iterations, {PROBE_S:g}-second probes",
            asked=f"{SHARE:.0%}",
            measured=f"{share.share:.1%}: {share.iterations_s:.1f} of {share.wall_s:.1f} s, "
            f"{share.num_probes} probes of {share.num_devices} devices",
            reached=share.share >= SHARE,
        ),
        Figure(
            name="a rank is SIGKILLed in mid-iteration: the next probe's ranks run on its devices, slowest",
            asked=f"under {BACK_S:g} s",
            measured=f"{max(back_s):.3f} s (median {median(back_s):.3f} s of {len(back_s)})",
            reached=max(back_s) < BACK_S,
        ),
    ]


def faults(folder: Path, scale: int) -> list[Figure]:
    """Probes of which three in ten fail, in every way that one machine has."""
    with recorded_service(folder, num_workers=0) as service:
        found = storm(
            service, num_probes=25 * scale, faults=spread(15 * scale // 2), rank_entry=RANK_ENTRY
        )
    return storm_figures(found)


def storm_figures(found: Storm) -> list[Figure]:
    """What is asked of a storm of faults."""
    for wrong in found.wrong:
        print(f"not as its fault explains: {wrong}", file=sys.stderr)
    left = [*found.left, *found.left_running]
    before, after = found.descriptors
    after_all = f"after {found.num_probes} probes of which {found.num_faults} fail in every way"
    return [
        Figure(
            name=f"processes left {after_all}",
            asked="0",
            measured="; ".join(left) or f"0 ({found.wall_s:.0f} s in all)",
            reached=not left,
        ),
        Figure(
            name="trials that ended otherwise than their fault explains",
            asked="0",
            measured=str(len(found.wrong)),
            reached=not found.wrong,
        ),
        Figure(
            name="files and shared memory left",
            asked="0",
            measured=", ".join(found.files_left) or "0",
            reached=not found.files_left,
        ),
        Figure(
            name="descriptors of the worker",
            asked="no more",
            measured=f"{after}, {before} before",
            reached=after <= before + DESCRIPTORS_MORE,
        ),
        Figure(
            name="memory of the machine gone",
            asked="none",
            measured=f"{found.memory_gone_bytes / MIB:.0f} MiB, of all that runs on it",
            reached=found.memory_gone_bytes < MEMORY_GONE_BYTES,
        ),
    ]


def ray_kills(_folder: Path, scale: int) -> list[Figure]:
    """Each process of a Ray node is killed three times, one at a time."""
    cluster, _ = resolve_cluster("local-cpu")
    request = ProbeRequest(model=model_preset("tiny"), layout=Layout(), iterations=2)
    launcher = ray_launcher(cluster)

    def run() -> bool:
        outcome = launcher.run(request, on_event=lambda _: None, cancelled=lambda: False)
        return outcome.state == "completed"

    try:
        run()
        kills = max(1, 3 * scale // SCALE)
        away_s = {
            kind: [away_after_kill_s(launcher, kind, run) for _ in range(kills)]
            for kind in (*RAYS, *OURS, *WARDENS)
        }
    finally:
        launcher.close()
    for kind, seconds in away_s.items():
        print(f"{kind}: {max(seconds):.1f} s (median {median(seconds):.1f} s)", flush=True)
    slowest = max(away_s, key=lambda kind: max(away_s[kind]))
    worst_s, medians_s = max(away_s[slowest]), [median(seconds) for seconds in away_s.values()]
    return [
        Figure(
            name=f"SIGKILL of each of {len(away_s)} processes of a Ray node, {kills} times: the next "
            "probe has run on the node, slowest",
            asked=f"under {NODE_BACK_S:g} s",
            measured=f"{worst_s:.1f} s ({slowest}; medians of each {min(medians_s):.1f} to "
            f"{max(medians_s):.1f} s)",
            reached=worst_s < NODE_BACK_S,
        )
    ]


PARTS: Final[dict[str, Part]] = {
    "turn-around": turn_around,
    "faults": faults,
    "ray-kills": ray_kills,
}
SCALE: Final = 8


def main() -> None:
    """Prints, and records, what was asked for."""
    arguments = _arguments()
    if arguments.record and arguments.scale != SCALE:
        refuse("bench-workers", "--record is for the whole of a part; leave --scale away")
    machine = describe_machine("torch", "ray")
    print(machine, end="\n\n", flush=True)
    try:
        for part in arguments.only or PARTS:
            figures = measure(part, arguments.scale)
            if arguments.record:
                record(TITLES[part], _section(part, machine, figures))
    except (MissingMomentsError, WaitedInVainError) as error:
        sys.exit(str(error))


def measure(part: str, scale: int) -> list[Figure]:
    """Measures a part, and prints what came of it."""
    with tempfile.TemporaryDirectory() as folder:
        figures = PARTS[part](Path(folder), scale)
    for figure in figures:
        print(" | ".join(figure.cells()), flush=True)
    return figures


def _section(part: str, machine: str, figures: Sequence[Figure]) -> str:
    numbers = table(("figure", "asked", "measured", "reached"), [f.cells() for f in figures])
    return f"`make bench-workers`; {machine}.\n\n{numbers}\n\n{_NOTES[part]}"


TITLES: Final = {
    "turn-around": "From probe to probe",
    "faults": "Faults",
    "ray-kills": "Kills of Ray",
}
_NOTES: Final = {
    "turn-around": """\
With Ray and probes of `tiny`. From outcome to iteration: the end of a group, its outcome on disk, the next trial's fork, meeting, \
weights, memory iteration and first iteration. torchrun runs the same probe by the same code, four probes and one torchrun in turns.""",
    "faults": """\
With Ray and probes of `tiny`. A rank that raises, ends with a code or without a result, is killed, segfaults, aborts, hangs or is stopped until its deadline, \
runs out of memory, leaves children, daemons, sessions, threads or shared memory, floods its log; a killed zygote, warden, node \
agent, raylet and worker: each as often, once a trial.""",
    "ray-kills": f"""\
The launcher alone, with the Ray that it starts and probes of `tiny`. Killed: {", ".join((*RAYS, *OURS, *WARDENS))}. `ray start` and the bridge are the processes that start and use Ray; a warden is above each. A worker \
also checks a node before it uses it again. Ray has no other process here: neither monitor nor log monitor is started.""",
}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench-workers", description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=list(PARTS), help="repeatable")
    parser.add_argument(
        "--scale", type=count, default=SCALE, help=f"how much of it; {SCALE} is all [{SCALE}]"
    )
    parser.add_argument("--record", action="store_true", help="write benchmarks/RESULTS.md")
    return parser.parse_args()


if __name__ == "__main__":
    main()
