"""The memory of a running program, sampled from outside."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from layout_tuner.process_resources import available_memory_bytes, kernel_text
from layout_tuner.protocol.outcome import FailureReason
from layout_tuner.trainers.failure_texts import lacking
from layout_tuner.units import memory
from layout_tuner.workers.ranks.keeper import memory_of, oom_kills
from layout_tuner.workers.ranks.memory_watch import devices_in_use, visible_names
from layout_tuner.workers.ranks.rank_task import RankTask

_EVERY_S: Final = 0.1
_PAUSES: Final = 20
"""How many times longer than a sample the pause after it is at least: samples use a core of the
ranks."""


class MemorySample:
    """The peak of a program's memory, as far as samples show it, and whether the kernel ended it.

    On a GPU it is the memory in use on the rank's device, above the memory in use before the
    program started.
    On CPU devices it is the private and shared memory of the program's processes, without files; of
    a program that is all ranks of its node, each rank's share.
    Construct it before the program starts.

    Args:
        task: of the rank.
        num_ranks: ranks of the layout that the program is.
        limit_bytes: memory of a device; None: no limit.
    """

    def __init__(self, task: RankTask, *, num_ranks: int, limit_bytes: int | None) -> None:
        self._limit_bytes = limit_bytes
        self._on_cpu = task.device == "cpu"
        self._num_ranks = num_ranks
        self.peak_bytes = 0
        """0: nothing was sampled, or the driver does not report it."""
        self._next_at = 0.0
        self._oom_kills = oom_kills()
        self._available_bytes = available_memory_bytes()
        self._names: tuple[str, ...] = ()
        if task.device == "cuda":
            names = visible_names(os.environ)
            is_alone = task.local_world_size == len(names)
            self._names = names[task.local_rank : task.local_rank + 1] if is_alone else names
        self._before = devices_in_use(self._names) if self._names else {}

    def take(self, pid: int) -> bool:
        """Takes a sample of a program, unless the last one was just taken; whether it did."""
        now = time.monotonic()
        if now < self._next_at:
            return False
        if self._names:
            in_use, before = devices_in_use(self._names), self._before
            used_bytes = max(
                (in_use[name] - before[name] for name in in_use.keys() & before), default=0
            )
        else:
            each = map(memory_of, process_tree(pid))
            used_bytes = sum(of["RssAnon"] + of["RssShmem"] for of in each) // self._num_ranks
        self.peak_bytes = max(self.peak_bytes, used_bytes)
        ended = time.monotonic()
        self._next_at = ended + max(_EVERY_S, _PAUSES * (ended - now))
        return True

    def kernel_killed(self, number: int) -> tuple[FailureReason, str] | None:
        """The reason where the kernel's out-of-memory killer may have sent a signal, and why."""
        kills = oom_kills()
        if number != signal.SIGKILL or kills is None or self._oom_kills is None:
            return None
        if kills == self._oom_kills:
            return None
        why = (
            f"the kernel's out-of-memory killer struck {kills - self._oom_kills} times on the node "
            f"meanwhile, which had {memory(self._available_bytes)} free at the start"
        )
        if not self._on_cpu:  # the limit is that of the device's own memory
            return "host_resource", f"{why}; {lacking('host memory')}"
        if self._limit_bytes is None:
            return "out_of_memory", why
        seen = f"{memory(self.peak_bytes)} of the {memory(self._limit_bytes)} promised"
        return "node_lost", f"{why}; the program was seen with {seen}"


def process_tree(pid: int) -> Iterator[int]:
    """A process and its living descendants that were not detached from it."""
    yield pid
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in kernel_text(path).split():
            yield from process_tree(int(child))
