"""The program of a rank, which its keeper forks and ends: runs its job, and reports to the agent.

Importing this module imports torch and the trainer; the zygote does that once.

A rank reports JSON documents on its line: {"event": "listening", "port": ...} (rank 0, when there
is a rendezvous), {"event": "iteration", ...} and the like from the trainer, and last either
{"event": "result", ...} or {"event": "error", "reason", "transport", "message"}.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from typing import Any, Final

import torch

# torch.distributed has these names too, but not for type checkers.
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from layout_tuner.protocol.outcome import ProbeRequest
from layout_tuner.workers.programs.supervisor import (
    ProgramFailedError,
    receive_rendezvous,
    run_program,
)
from layout_tuner.workers.rank_jobs.health_job import measure_between, measure_node
from layout_tuner.workers.rank_jobs.machine_timings import time_machine
from layout_tuner.workers.ranks.json_lines import Document, JsonLines
from layout_tuner.workers.ranks.rank_task import RankTask
from layout_tuner.workers.ranks.scratch import PROGRAM
from layout_tuner.workers.trainer.device_peak_flops import matmul_peak
from layout_tuner.workers.trainer.job.job import TrainJob
from layout_tuner.workers.trainer.open_training import RankContext
from layout_tuner.workers.trainer.probe.exception_reasons import (
    classify,
    host_advice,
    is_transport_error,
)
from layout_tuner.workers.trainer.probe.probe import run_probe
from layout_tuner.workers.trainer.train import run_train

torch.set_num_threads(1)

_LOOPBACK: Final = "127."


def main(task: RankTask, line: JsonLines) -> None:
    """Runs one rank to its end; never returns after a failure."""
    try:
        result = _run(task, line)
    except BaseException as error:  # the rank ends here: every failure is reported with a reason
        if isinstance(error, ProgramFailedError):
            reason, transport, message = error.reason, error.transport, str(error)
        else:
            traceback.print_exc()
            sys.stderr.flush()
            reason = classify(error, device=task.device)
            transport, message = is_transport_error(error), _one_line(error)
            if reason == "host_resource":
                message = f"{message}; {host_advice(error)}"
        line.send({"event": "error", "reason": reason, "transport": transport, "message": message})
        os._exit(1)
    line.send({"event": "result", **result})


def _run(task: RankTask, line: JsonLines) -> Document:
    """Runs the job of a rank. Ranks that communicate meet before it and leave together after it."""
    if task.job["kind"] == PROGRAM:
        return run_program(task, line)
    if task.job["kind"] == "peak":
        tflops, source = matmul_peak(task.device, task.job["precision"], again=task.job["again"])
        return {"tflops": tflops, "source": source}
    job = _JOBS[task.job["kind"]]
    store = _meet(task, line)
    result = job(task, PrefixStore(task.group, store), line)
    _leave_together(task, store)
    return result


def _probe(task: RankTask, store: Store, line: JsonLines) -> Document:
    request = ProbeRequest.from_mapping(task.job["request"])
    result = run_probe(request, _context(task, store), line.send)
    return {} if result is None else asdict(result)


def _train(task: RankTask, store: Store, line: JsonLines) -> Document:
    job = TrainJob.from_mapping(task.job["job"])
    result = run_train(job, _context(task, store), line.send)
    return {} if result is None else {"training": result}


def _health(task: RankTask, store: Store, _line: JsonLines) -> Document:
    measure = measure_between if task.job.get("between") else measure_node
    return measure(task, store)


def _meet(task: RankTask, line: JsonLines) -> Store:
    """Connects to the store of the ranks, which rank 0 serves.

    Rank 0 binds the socket before it reports the port: a port that is chosen first and bound later
    may be taken meanwhile. It binds the node's own address; the store itself would use every
    interface.
    """
    if task.address.startswith(_LOOPBACK):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    timeout = timedelta(seconds=task.deadline_s)
    if task.rank == 0:
        listener = socket.create_server((task.address, 0), backlog=task.world_size)
        port = listener.getsockname()[1]
        store = TCPStore(
            task.address,
            port,
            task.world_size,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        line.send({"event": "listening", "port": port})
        return store
    rendezvous = receive_rendezvous(line)
    return TCPStore(
        rendezvous["address"],
        rendezvous["port"],
        task.world_size,
        is_master=False,
        timeout=timeout,
        wait_for_workers=False,
    )


def _leave_together(task: RankTask, store: Store) -> None:
    """Waits until all ranks have finished: others may need this rank, or the store of rank 0."""
    if store.add("layout-tuner/arrived", 1) == task.world_size:
        store.set("layout-tuner/all-arrived", "1")
    store.wait(["layout-tuner/all-arrived"])
    if task.rank == 0:
        store.wait([f"layout-tuner/left/{rank}" for rank in range(1, task.world_size)])
    else:
        store.set(f"layout-tuner/left/{task.rank}", "1")


def _context(task: RankTask, store: Store) -> RankContext:
    return RankContext(
        rank=task.rank,
        world_size=task.world_size,
        local_rank=0 if task.device == "cuda" else task.local_rank,  # it sees only its own device
        store=store,
        device=task.device,
        oversubscribed=task.oversubscribed,
        peak_tflops_per_device=task.job.get("peak_tflops_per_device"),
        peak_source=task.job.get("peak_source", ""),
        product_layouts=task.job.get("product_layouts", ()),
    )


def _one_line(error: BaseException) -> str:
    """The class of an error and the first line of its message.

    Surrogates, for example of file names that are not UTF-8, are escaped: outcomes do not accept
    them.
    """
    message = str(error).encode(errors="backslashreplace").decode()
    lines = message.strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


_JOBS: Final[dict[str, Callable[[RankTask, Store, JsonLines], dict[str, Any]]]] = {
    "probe": _probe,
    "train": _train,
    "calibrate": time_machine,
    "health": _health,
}
"""Jobs whose ranks communicate, by kind."""
