"""Ranks of a benchmark: forked from this process, one core each, on gloo."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing import connection, get_context
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Final, Generic, TypeVar

import torch
from torch import distributed as dist

from layout_tuner.process_resources import usable_cores
from layout_tuner.workers.trainer.open_training import RankContext

T = TypeVar("T")

_DEADLINE_S: Final = 600.0
_KEEPS_MEMORY: Final = {
    "MALLOC_MMAP_THRESHOLD_": "4000000000",
    "MALLOC_TRIM_THRESHOLD_": "8000000000",
    "OMP_NUM_THREADS": "1",
}
"""The environment that workers give their ranks (`workers/ranks/zygote_client.py`): here both sides
have it."""


class RankFailedError(Exception):
    """A rank raised, died, or did not end in time."""


def restart_with_rank_environment() -> None:
    """Restarts this program if its environment is not a rank's: malloc reads it at the start."""
    if _KEEPS_MEMORY.items() <= os.environ.items():
        return
    sys.stdout.flush()
    os.execve(sys.executable, sys.orig_argv, {**os.environ, **_KEEPS_MEMORY})


class _Ranks(Generic[T]):
    def __init__(self, world_size: int, work: Callable[[RankContext], T], folder: Path) -> None:
        self.processes: list[ForkProcess] = []
        self.answers: dict[connection.Connection, int] = {}
        for rank in range(world_size):
            reader, writer = connection.Pipe(duplex=False)
            process = get_context("fork").Process(
                target=_become_rank, args=(rank, world_size, work, folder / "store", writer)
            )
            process.start()
            writer.close()
            self.processes.append(process)
            self.answers[reader] = rank

    def gather(self) -> list[T]:
        results: dict[int, T] = {}
        while self.answers:
            ready = connection.wait(self.answers, timeout=_DEADLINE_S)
            if not ready:
                raise RankFailedError(f"ranks {sorted(self.answers.values())} did not answer")
            for reader in ready:
                assert isinstance(reader, connection.Connection)
                rank = self.answers.pop(reader)
                try:
                    error, result = reader.recv()
                except EOFError:
                    raise RankFailedError(f"rank {rank} died without a word") from None
                if error:
                    raise RankFailedError(f"rank {rank} failed:\n{error}")
                results[rank] = result
        return [results[rank] for rank in sorted(results)]


def run_ranks(world_size: int, work: Callable[[RankContext], T]) -> list[T]:
    """Calls `work` on every rank, and returns what each returned, which must be picklable.

    The process group is the work's business; a rank ends with `os._exit`, for tearing gloo down
    can hang.

    Raises:
        RankFailedError: the first failure; no rank is left alive.
    """
    torch.set_num_threads(1)  # before torch does any work: else a forked rank may hang
    with tempfile.TemporaryDirectory() as folder:
        ranks = _Ranks(world_size, work, Path(folder))
        try:
            results = ranks.gather()
            for process in ranks.processes:
                process.join(5.0)
            return results
        finally:
            for process in ranks.processes:
                process.kill()
                process.join()


def _become_rank(
    rank: int,
    world_size: int,
    work: Callable[[RankContext], T],
    store_file: Path,
    writer: connection.Connection,
) -> None:
    status = 1
    try:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
        context = RankContext(
            rank=rank,
            world_size=world_size,
            local_rank=rank,
            store=dist.FileStore(str(store_file), world_size),
            device="cpu",
            oversubscribed=world_size > usable_cores(),
            peak_tflops_per_device=None,
            peak_source="",
        )
        writer.send(("", work(context)))
        if dist.is_initialized():
            dist.barrier()
        status = 0
    except BaseException:
        writer.send((traceback.format_exc(), None))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
