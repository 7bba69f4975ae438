"""Runs a function on a few gloo ranks, forked from the test's process; raises the first error."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from layout_tuner.workers.trainer.comm import host_transfers
from layout_tuner.workers.trainer.open_training import RankContext

# pytest-xdist runs other tests on the other cores: ranks that poll would keep the cores from each
# other, as ranks that share cores know and these do not.
POLLS = "PYTEST_XDIST_WORKER" not in os.environ

# Before torch does any work: a process that has run OpenMP threads cannot fork ranks.
torch.set_num_threads(1)


FORK = multiprocessing.get_context("fork")


class RanksFailedError(AssertionError):
    """A rank raised, died, or did not end in time."""


def make_context(rank: int, world_size: int, store: Any, **changes: Any) -> RankContext:
    """What a rank on this machine is told by whoever started it."""
    fields: dict[str, Any] = {
        "rank": rank,
        "world_size": world_size,
        "local_rank": rank,
        "store": store,
        "device": "cpu",
        "oversubscribed": False,
        "peak_tflops_per_device": 0.1,
        "peak_source": "a test's",
    }
    return RankContext(**{**fields, **changes})


def run_ranks(
    world_size: int,
    work: Callable[[int], Any],
    *,
    deadline_s: float = 60.0,
    own_group: bool = False,
    dying: tuple[int, ...] = (),
) -> list[Any]:
    """Calls `work(rank)` on every rank with the default group up; returns what each returned.

    Args:
        own_group: `work(rank, store)` makes the process group itself.
        dying: ranks that die as soon as they have answered, whatever their peers wait for.
    """
    with tempfile.TemporaryDirectory() as folder:
        readers, processes = [], []
        for rank in range(world_size):
            reader, writer = FORK.Pipe(duplex=False)
            job = (rank, world_size, Path(folder) / "store", work, writer, own_group, rank in dying)
            processes.append(FORK.Process(target=_run_rank, args=job))
            processes[-1].start()
            writer.close()
            readers.append(reader)
        try:
            return _gather(readers, time.monotonic() + deadline_s)
        finally:
            for process in processes:
                process.join(0.2)  # one that has answered ends by itself: its peers see a clean end
                process.kill()
                process.join()


def _run_rank(
    rank: int,
    world_size: int,
    store_file: Path,
    work: Callable[..., Any],
    writer: Any,
    own_group: bool,
    dies: bool,
) -> None:
    try:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(1)
        if not POLLS:
            host_transfers._POLL_S = 0.0
        store = dist.FileStore(str(store_file), world_size)
        if own_group:
            result = work(rank, store)
        else:
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
            result = work(rank)
        writer.send_bytes(pickle.dumps(("result", result)))
        if not dies:
            dist.barrier()
    except BaseException as error:
        described = (type(error).__name__, str(error), traceback.format_exc())
        writer.send_bytes(pickle.dumps(("error", described)))
    finally:
        writer.close()
        sys.stderr.flush()
        os._exit(0)


def _gather(readers: list[Any], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    waiting = {reader: rank for rank, reader in enumerate(readers)}
    while waiting:
        ready = connection.wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RanksFailedError(f"ranks {[*waiting.values()]} did not answer in time")
        for reader in ready:
            rank = waiting.pop(reader)
            try:
                kind, value = pickle.loads(reader.recv_bytes())
            except EOFError:
                raise RanksFailedError(f"rank {rank} died without a word") from None
            if kind == "error":
                name, message, trace = value
                raise RanksFailedError(f"rank {rank}: {name}: {message}\n{trace}")
            results[rank] = value
    return [results[rank] for rank in range(len(readers))]
