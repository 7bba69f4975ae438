"""Stopwatch: divides the time of a rank's step into parts that do not overlap.

`with part("tp"): ...` counts the time inside as that part. The time of an inner part is not counted
in the outer one. Without a running stopwatch nothing is recorded.

On the CPU a mark is a reading of the clock. On a GPU it is an event on the stream that computes, so
that the parts are times of the device and not of the thread that launches kernels. A collective on
its own stream counts from the moment at which the computing stream waits for it: this is the time
that computation does not hide. Time in which the device waits for the next launch belongs to the
part that is open.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Literal, get_args

import torch

Part = Literal["compute", "tp", "cp", "ep", "pp", "dp", "optimizer", "idle", "unexplained"]
"""compute: passes over micro-batches. tp, cp, pp, dp: communication over that axis that computation
does not hide, including the wait for the peer; ep counts etp too. optimizer: the update. idle: the
wait for all ranks at the end of a step. unexplained: time outside all parts."""

_Opened = Part | Literal["communication"]

PARTS: Final[tuple[Part, ...]] = get_args(Part)


class Stopwatch:
    """Records where the parts of a step begin and end; a rank uses one for all its steps.

    During the step it only reads the clock. It computes the times of the parts afterwards.
    """

    def __init__(
        self, device: torch.device, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._events = _Events(device) if device.type == "cuda" else None
        self._clock: Callable[[], Any] = self._events.record if self._events else clock
        # On a GPU the backward pass runs in a thread of autograd while the calling thread is
        # blocked, so parts still nest. An append is atomic and needs no lock.
        self._marks: list[tuple[_Opened | None, Any]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Records every `part` of this process, in any thread, while the context is open."""
        global _running
        assert _running is None, "another stopwatch is running"
        self._marks = []
        if self._events is not None:
            self._events.begin()
        self.mark("unexplained")
        _running = self
        try:
            yield
        finally:
            _running = None
            self.mark(None)

    def mark(self, opened: _Opened | None) -> None:
        """Opens a part inside the open one; None closes the open one."""
        self._marks.append((opened, self._clock()))

    def seconds(self) -> dict[Part, float]:
        """Seconds of each part in the last recording; waits for the GPU, if there is one."""
        seconds = dict.fromkeys(PARTS, 0.0)
        if self._events is not None and self._marks:
            self._marks[-1][1].synchronize()
        open_parts: list[Part] = []
        for (opened, start), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            if opened is None:
                open_parts.pop()
            else:
                if opened == "communication":
                    opened = "tp" if open_parts[-1] == "compute" else open_parts[-1]
                open_parts.append(opened)
            took_s = start.elapsed_time(end) / 1e3 if self._events else end - start
            seconds[open_parts[-1]] += took_s
        return seconds


class _Events:
    """Events on the stream that computes. Every step reuses them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: list[torch.cuda.Event] = []
        self._num_used = 0
        self._stream = torch.cuda.current_stream(device)

    def begin(self) -> None:
        # All events go to this stream, even if a thread or block of code makes another one current.
        self._stream, self._num_used = torch.cuda.current_stream(self._device), 0

    def record(self) -> torch.cuda.Event:
        if self._num_used == len(self._made):
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._made.append(event)
        event = self._made[self._num_used]
        self._num_used += 1
        event.record(self._stream)
        return event


class _PartOfStep:
    """A reusable context without state of its own; the stopwatch holds the state."""

    __slots__ = ("_opened",)

    def __init__(self, opened: _Opened) -> None:
        self._opened: _Opened = opened

    def __enter__(self) -> None:
        if _running is not None:
            _running.mark(self._opened)

    def __exit__(self, *_: object) -> None:
        if _running is not None:
            _running.mark(None)


_running: Stopwatch | None = None
"""The stopwatch that records in this process. A ContextVar would not reach autograd's threads."""

_OF_PART: Final = {name: _PartOfStep(name) for name in PARTS}

communication: Final = _PartOfStep("communication")
"""Part of a collective: tp inside `compute`, elsewhere the part that is open. Inside a pass only
collectives over tp wait, unless the caller opens another part."""


def part(name: Part) -> _PartOfStep:
    """A context that counts the time inside as this part of the step, if a stopwatch runs."""
    return _OF_PART[name]
