"""Waiting for processes, and starting groups of test ranks."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil

from layout_tuner.workers.launchers.group import GroupEnd, RankGroup
from layout_tuner.workers.launchers.launcher_nodes import NodeSet
from layout_tuner.workers.launchers.placement import place
from layout_tuner.workers.packing.request import Placement
from tests.kit.waiting import wait_until

RANK_PROGRAMS = "tests.workers.rank_programs:run"
"""The entry of a zygote whose ranks do what `rank_programs` holds."""

NOBODY = 65534

MARK = "LAYOUT_TUNER_TEST_MARK"
"""Environment variable that finds every descendant of a process, whatever became of its parents."""


def make_decoys(directory: Path) -> Path:
    """Writes packages with our names and Ray's into a directory; none of them may be imported."""
    for name in ("workers", "search_spaces", "layout_tuner", "ray"):
        (directory / name).mkdir()
        (directory / name / "__init__.py").write_text("raise ImportError('a decoy was imported')")
    return directory


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(pids: Iterable[int], patience_s: float = 60.0) -> None:
    pids = list(pids)
    wait_until(f"none of {pids} is alive", lambda: not any(map(is_alive, pids)), patience_s)


def wait_until_released(locks: Iterable[Path]) -> None:
    """Waits until no process holds the locks of directories.

    A killed process loses its environment, and its first thread ends, before it closes its files.
    """

    def released(lock: Path) -> bool:
        with lock.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True

    locks = list(locks)
    wait_until("no process holds the directories", lambda: all(map(released, locks)), 20)


def marked(mark: str, *, variable: str = MARK) -> list[psutil.Process]:
    """The living processes that inherited a mark in their environment."""
    return [
        process
        for process in psutil.process_iter()
        if environment_of(process).get(variable) == mark and is_alive(process.pid)
    ]


def command_line(process: psutil.Process) -> list[str]:
    """Its words; none of a process that has ended since it was found."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def environment_of(process: psutil.Process) -> dict[str, str]:
    """Its variables; none of a process that has ended since it was found."""
    try:
        return process.environ()
    except psutil.Error:
        return {}


def living_children(process: psutil.Process, *, recursive: bool = False) -> list[psutil.Process]:
    """None of a process that has ended since it was found."""
    try:
        children = process.children(recursive=recursive)
    except psutil.NoSuchProcess:
        return []
    return [child for child in children if is_alive(child.pid)]


def kill(processes: Iterable[psutil.Process]) -> None:
    """Kills what may take others of them along."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def run_group(
    nodes: NodeSet,
    kind: str,
    *,
    shares: Placement | None = None,
    by_rank: dict[str, str] | None = None,
    num_ranks: int = 2,
    num_nodes: int = 1,
    deadline_s: float = 20.0,
    on_event: Callable[[dict[str, Any]], None] = lambda _: None,
    cancelled: Callable[[], bool] = lambda: False,
    memory_limit_bytes: int | None = None,
) -> GroupEnd:
    """Runs a group of test ranks: all do `kind`, but those in `by_rank` something else."""
    tasks = place(
        nodes.nodes,
        shares,
        num_ranks=num_ranks,
        num_nodes=num_nodes,
        device="cpu",
        job={"kind": kind, "by_rank": by_rank or {}},
        deadline_s=deadline_s,
        rendezvous=kind == "meet",
        allow_sharing=True,
    )
    group = RankGroup(
        nodes=nodes,
        tasks=tasks,
        deadline_s=deadline_s,
        on_event=on_event,
        cancelled=cancelled,
        memory_limit_bytes=memory_limit_bytes,
    )
    return group.run()
