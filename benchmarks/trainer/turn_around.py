"""The time between two probes on the same devices, with the real service, worker, Ray and ranks."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final

from benchmarks.service.live_service import LiveService
from benchmarks.workers.rank_faults import FOLDER, fault_named, seed_of
from benchmarks.workers.rank_records import RECORDS, GroupMoments, by_group, read_moments
from layout_tuner.process_resources import usable_cores
from layout_tuner.protocol.outcome import ProbeRequest
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_presets import model_preset

PROBE_S: Final = 3.0
"""Length of the probes whose share of the devices' time is counted."""

RANK_ENTRY: Final = "benchmarks.workers.recorded_rank:main"
"""What ranks run that write their moments down and fail as they are asked."""

_TORCHRUN: Final = Path(__file__).with_name("torchrun_probe.py")


class MissingMomentsError(Exception):
    """Ranks did not do what should have been timed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnAround:
    """How long devices run no iteration between two probes, and torchrun's start for comparison."""

    gaps_s: tuple[float, ...]
    """From the last word of a probe's ranks to the end of the next one's first iteration."""
    torchrun_s: tuple[float, ...]
    """From torchrun's launch to the end of the first iteration of the same probe."""

    @property
    def gap_s(self) -> float:
        return median(self.gaps_s)

    @property
    def gap_p90_s(self) -> float:
        return quantiles(self.gaps_s, n=10)[-1]

    @property
    def times(self) -> float:
        """How many times longer torchrun takes."""
        return median(self.torchrun_s) / self.gap_s


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceTimeShare:
    """What probes' iterations had of the devices' time in steady state."""

    iterations_s: float
    """Seconds of iterations, of the probes that ran one after the other."""
    wall_s: float
    num_probes: int
    num_devices: int
    """That each of them held: all of them."""

    @property
    def share(self) -> float:
        return self.iterations_s / self.wall_s


@contextmanager
def recorded_service(folder: Path, *, num_workers: int = 1) -> Iterator[LiveService]:
    """A service and its workers, whose ranks record their moments and fail on request."""
    (folder / "faults").mkdir()
    variables = {RECORDS: str(moments_file(folder)), FOLDER: str(folder / "faults")}
    with LiveService(folder) as service:
        service.environment.update(variables)
        workers = [service.worker(f"w{i}", rank_entry=RANK_ENTRY) for i in range(num_workers)]
        for worker in workers:
            worker.start()
        yield service
        for worker in workers:
            worker.stop()


def moments_file(folder: Path) -> Path:
    """Where ranks of a recorded service write."""
    return folder / "moments.jsonl"


def num_ranks() -> int:
    """Ranks of the probes that are timed."""
    return min(2, usable_cores())


def measure_turn_around(service: LiveService, *, rounds: int, a_round: int = 4) -> TurnAround:
    """So many probes one after the other and torchrun once, in turns.

    Raises:
        MissingMomentsError: a probe did not get to its iterations.
    """
    run_probes(service, [0] * 2)  # the peak is measured once
    gaps_s: list[float] = []
    torchrun_s = []
    for index in range(rounds):
        groups = run_probes(service, [0] * a_round)
        gaps_s += [_gap_s(before, after) for before, after in pairwise(groups)]
        torchrun_s.append(_torchrun_s(service, f"torchrun-{index}"))
    return TurnAround(gaps_s=tuple(gaps_s), torchrun_s=tuple(torchrun_s))


def run_probes(service: LiveService, seeds: Sequence[int], **changes: Any) -> list[GroupMoments]:
    """Runs 2-rank probes, all of them waiting from the start; their groups, in order.

    Args:
        service: has a worker whose ranks are recorded.
        seeds: a probe each; what befalls it follows from its seed.
        changes: to their campaigns' documents.

    Raises:
        MissingMomentsError: one did not run.
    """
    before = len(_groups(service))
    layout = Layout(dp=num_ranks(), micro_batch_size=4)
    service.wait_for_end([service.add(layout, seed=seed, **changes) for seed in seeds])
    groups = _groups(service)[before:]
    if len(groups) != len(seeds):
        raise MissingMomentsError(f"{len(seeds)} probes were asked for, {len(groups)} ran")
    return groups


def measure_devices_back(service: LiveService, *, repeats: int) -> list[float]:
    """Seconds from the SIGKILL of a rank in mid-iteration to the first event of the next probe."""
    fault, back_s = fault_named("is killed"), []
    for repeat in range(repeats):
        killed, following = run_probes(service, [seed_of(fault, repeat), 0])
        back_s.append(following.entered_s - killed.last_s)
    return back_s


def measure_share(service: LiveService, *, num_probes: int) -> DeviceTimeShare:
    """The share of iterations in the time of so many 3-second probes, in steady state.

    The probe before them says how many iterations 3 seconds are; the first of them begins the time.
    """
    (tried,) = run_probes(service, [0], probe=_probe(50))
    iterations = round(PROBE_S * tried.num_iterations / tried.iterations_s)
    groups = run_probes(service, [0] * (num_probes + 1), probe=_probe(iterations - 2))
    counted = groups[1:]
    return DeviceTimeShare(
        iterations_s=sum(group.iterations_s for group in counted),
        wall_s=groups[-1].last_s - groups[0].last_s,
        num_probes=num_probes,
        num_devices=num_ranks(),
    )


def _probe(iterations: int) -> dict[str, Any]:
    return {"warmup": 2, "iterations": max(2, iterations), "deadline": "60s"}


def _groups(service: LiveService) -> list[GroupMoments]:
    moments = read_moments(moments_file(service.folder))
    return [group for group in by_group(moments) if not group.group.startswith("torchrun")]


def _gap_s(before: GroupMoments, after: GroupMoments) -> float:
    if after.first_iteration_s is None:
        raise MissingMomentsError(f"the ranks of group {after.group} reported no iteration")
    return after.first_iteration_s - before.last_s


def _torchrun_s(service: LiveService, group: str) -> float:
    layout = Layout(dp=num_ranks(), micro_batch_size=4)
    request = ProbeRequest(model=model_preset("tiny"), layout=layout, iterations=2)
    launched_s = time.monotonic()
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *(f"--nproc-per-node={layout.num_devices}", str(_TORCHRUN), group),
            json.dumps(replace(request, deadline_s=60.0).to_mapping()),
        ],
        env={**service.environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    moments = read_moments(moments_file(service.folder))
    for moment in moments:
        if moment.group == group and moment.what == "iteration":
            return moment.at_s - launched_s
    raise MissingMomentsError(f"torchrun's ranks reported no iteration:\n{done.stderr[-2000:]}")
