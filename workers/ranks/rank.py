"""What a forked rank runs: it meets the others, does its job, and says how that ended.

Importing this module imports torch and the trainer; the zygote does it once.

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

# torch.distributed offers these too, without telling type checkers so.
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from search_spaces.outcome import ProbeRequest
from workers.health_job import measure_between, measure_node
from workers.json_lines import Document, JsonLines
from workers.machine_timings import time_machine
from workers.rank_task import RankTask
from workers.trainer.context import RankContext
from workers.trainer.failure import classify, is_transport_error
from workers.trainer.job import TrainJob
from workers.trainer.peak import matmul_peak
from workers.trainer.probe import run_probe
from workers.trainer.train import run_train

torch.set_num_threads(1)

_LOOPBACK: Final = "127."


def main(task: RankTask, line: JsonLines) -> None:
    """Runs one rank to its end; never returns after a failure."""
    try:
        result = _JOBS[task.job["kind"]](task, line)
    except BaseException as error:  # the rank ends here: every failure becomes a reason
        traceback.print_exc()
        sys.stderr.flush()
        line.send(
            {
                "event": "error",
                "reason": classify(error),
                "transport": is_transport_error(error),
                "message": _one_line(error),
            }
        )
        os._exit(1)
    line.send({"event": "result", **result})


def _probe(task: RankTask, line: JsonLines) -> Document:
    store = _meet(task, line)
    request = ProbeRequest.from_mapping(task.job["request"])
    result = run_probe(request, _context(task, store), line.send)
    _leave_together(task, store)
    if result is None:
        return {}
    return {
        "measurement": asdict(result.measurement),
        "environment": asdict(result.environment),
    }


def _train(task: RankTask, line: JsonLines) -> Document:
    store = _meet(task, line)
    job = TrainJob.from_mapping(task.job["job"])
    result = run_train(job, _context(task, store), line.send)
    _leave_together(task, store)
    return {} if result is None else {"training": result}


def _peak(task: RankTask, _line: JsonLines) -> Document:
    tflops, source = matmul_peak(task.device, task.job["precision"])
    return {"tflops": tflops, "source": source}


def _calibrate(task: RankTask, line: JsonLines) -> Document:
    store = _meet(task, line)
    timed = time_machine(task, PrefixStore(task.group, store), line)
    _leave_together(task, store)
    return timed


def _health(task: RankTask, line: JsonLines) -> Document:
    store = _meet(task, line)
    measure = measure_between if task.job.get("between") else measure_node
    measured = measure(task, PrefixStore(task.group, store))
    _leave_together(task, store)
    return measured


def _meet(task: RankTask, line: JsonLines) -> Store:
    """The store where the ranks meet: rank 0 serves it and publishes the port.

    The socket is bound before the port is told, on the node's own address: choosing a free port
    first and binding it later races, and the store by itself would listen on every interface.
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
    rendezvous = line.receive()
    if rendezvous is None:
        raise ConnectionError("the zygote closed the line before it told where rank 0 listens")
    return TCPStore(
        rendezvous["address"],
        rendezvous["port"],
        task.world_size,
        is_master=False,
        timeout=timeout,
        wait_for_workers=False,
    )


def _leave_together(task: RankTask, store: Store) -> None:
    """Keeps a rank from leaving while another still needs it, or needs the store in rank 0."""
    arrived = store.add("layout-tuner/arrived", 1)
    if arrived == task.world_size:
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
        local_rank=0 if task.device == "cuda" else task.local_rank,  # it sees its own device alone
        store=PrefixStore(task.group, store),
        device=task.device,
        oversubscribed=task.oversubscribed,
        peak_tflops_per_device=task.job.get("peak_tflops_per_device"),
        peak_source=task.job.get("peak_source", ""),
    )


def _one_line(error: BaseException) -> str:
    """The error's kind and the first line of what it says, as text that a document can hold.

    An error may quote a file name that is no UTF-8, whose surrogates no outcome takes.
    """
    said = str(error).encode(errors="backslashreplace").decode()
    lines = said.strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


_JOBS: Final[dict[str, Callable[[RankTask, JsonLines], dict[str, Any]]]] = {
    "probe": _probe,
    "train": _train,
    "peak": _peak,
    "calibrate": _calibrate,
    "health": _health,
}
