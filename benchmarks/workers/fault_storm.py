"""Hundreds of probes of which many fail in every way that there is: what is left of them?"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Final

import psutil

from benchmarks.service.live_service import LiveProcess, LiveService, WaitedInVainError, wait_until
from benchmarks.trainer.turn_around import num_ranks, run_probes
from benchmarks.workers.rank_faults import FAULTS, LOSES_WORKER, RankFault, seed_of
from layout_tuner.results_db.records import TrialRecord
from layout_tuner.search_spaces.layouts.layout import Layout

DEADLINE: Final = "6s"
"""Of each probe: what hangs takes that long."""
_A_TRIAL_WITHIN_S: Final = 120.0
_WARM_UP_PROBES: Final = 5
"""Probes after which the worker is warm: its descriptors are counted from there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Storm:
    """What came of it."""

    num_probes: int
    num_faults: int
    wrong: Sequence[str]
    """Trials that ended in another way than their fault explains."""
    left_running: Sequence[str]
    """Processes below the worker after the last probe that were not there before the first."""
    left: Sequence[str]
    """Processes after the worker had ended."""
    files_left: Sequence[str]
    """In /dev/shm and the worker's temporary directory."""
    descriptors: tuple[int, int]
    """Of the worker before and after; it is killed before those."""
    memory_gone_bytes: int
    """Available memory before the worker's start less that after its end."""
    wall_s: float


def storm(
    service: LiveService, *, num_probes: int, faults: Mapping[RankFault, int], rank_entry: str
) -> Storm:
    """Runs the probes on a worker, starts it again when it is killed, ends it, and looks around.

    Args:
        service: has no worker.
        num_probes: all of them.
        faults: how often each befalls one; they are spread at random.
        rank_entry: what ranks run, by which faults befall them.
    """
    memory_bytes, shared, started_s = _available_bytes(), _shared_memory(), time.monotonic()
    with TemporaryDirectory(prefix="lb-", dir="/tmp") as temporary:  # Ray wants a short path
        worker = service.worker(rank_entry=rank_entry, environment={"TMPDIR": temporary})
        worker.start()
        trials = _run(
            service, worker, {f: n for f, n in faults.items() if f.name == LOSES_WORKER}, 0
        )
        run_probes(service, [0] * _WARM_UP_PROBES)
        before = _Look(service, worker)
        others = {f: n for f, n in faults.items() if f.name != LOSES_WORKER}
        num_others = num_probes - len(trials)
        trials |= _run(service, worker, others, num_others - sum(others.values()))
        run_probes(service, [0])  # the last fault may have cost a node, which is back now
        after = _Look(service, worker)
        worker.stop()
        wait_until("nothing is left", lambda: len(service.processes()) <= 1, 20)
        files_left = sorted(path.name for path in Path(temporary).iterdir())
    left = [_said(process) for process in service.processes() if process.pid != service.serve.pid]
    return Storm(
        num_probes=len(trials),
        num_faults=sum(faults.values()),
        wrong=_wrong(service, trials),
        left_running=after.beyond(before),
        left=left,
        files_left=[*files_left, *sorted(_shared_memory() - shared)],
        descriptors=(before.descriptors, after.descriptors),
        memory_gone_bytes=memory_bytes - _available_bytes(),
        wall_s=time.monotonic() - started_s,
    )


def _run(
    service: LiveService, worker: LiveProcess, faults: Mapping[RankFault, int], num_healthy: int
) -> dict[int, RankFault | None]:
    """Runs probes, those that fail among the others; what befell each trial."""
    trials = _add_probes(service, faults, num_healthy)
    _wait(service, worker, [*trials])
    return trials


class _Look:
    """What is there while nothing runs."""

    def __init__(self, service: LiveService, worker: LiveProcess) -> None:
        # Ray starts and ends helpers of its own; what counts is below the zygotes and warden.
        self._ranks = [process for process in service.processes() if _is_ours(process)]
        self.descriptors = psutil.Process(worker.pid).num_fds()

    def beyond(self, before: _Look) -> list[str]:
        """Processes more than there were."""
        more = len(self._ranks) - len(before._ranks)
        return [_said(process) for process in self._ranks] if more > 0 else []


def _is_ours(process: psutil.Process) -> bool:
    said = _said(process)
    return "layout_tuner.workers.ranks.zygote" in said or "time.sleep" in said


def _said(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())}"
    except psutil.Error:
        return ""


def _add_probes(
    service: LiveService, faults: Mapping[RankFault, int], num_healthy: int
) -> dict[int, RankFault | None]:
    """The trials and what befalls them, in an order that is the same every time."""
    befalls: list[tuple[int, RankFault | None]] = [
        (seed_of(fault, again), fault) for fault, times in faults.items() for again in range(times)
    ]
    befalls += [(0, None)] * num_healthy
    Random(0).shuffle(befalls)
    probe = {"warmup": 2, "iterations": 2, "deadline": DEADLINE}
    layout = Layout(dp=num_ranks())
    return {service.add(layout, seed=seed, probe=probe): fault for seed, fault in befalls}


def _wait(service: LiveService, worker: LiveProcess, trials: Sequence[int]) -> None:
    """Waits for the ends of the trials; starts the worker again as its supervisor would.

    Raises:
        WaitedInVainError: one did not end.
    """
    for trial in trials:
        give_up_at = time.monotonic() + _A_TRIAL_WITHIN_S
        while True:
            if worker.has_ended():
                worker.start()
            try:
                service.wait_for_end([trial], 1.0)
                break
            except WaitedInVainError:
                if time.monotonic() > give_up_at:
                    raise


def _wrong(service: LiveService, trials: Mapping[int, RankFault | None]) -> list[str]:
    said = []
    for trial_id, fault in trials.items():
        trial = service.trial(trial_id).trial
        if not _explains(fault, trial):
            name = "nothing befell it" if fault is None else fault.name
            said.append(
                f"trial {trial_id} ({name}): {trial.state}, {trial.reason}, attempt "
                f"{trial.attempt}: {trial.message}"
            )
    return said


def _explains(fault: RankFault | None, trial: TrialRecord) -> bool:
    reasons, attempts = (
        (None,) if fault is None else fault.reasons,
        1 if fault is None else fault.attempts,
    )
    return trial.reason in reasons and trial.attempt <= attempts


def _available_bytes() -> int:
    return int(psutil.virtual_memory().available)


def _shared_memory() -> set[str]:
    """Segments that Ray and torch make, and no browser."""
    return {
        path.name for path in Path("/dev/shm").glob("*") if path.name.startswith(("torch", "ray"))
    }


def spread(num_faults: int) -> dict[RankFault, int]:
    """So many faults, of each kind about as many."""
    each, more = divmod(num_faults, len(FAULTS))
    return {fault: each + (index < more) for index, fault in enumerate(FAULTS)}
