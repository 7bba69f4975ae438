"""Stopwatch: what a rank's time goes to, in parts that exclude each other and add up to the whole.

`with part("tp"): ...` says what happens inside; an inner part takes its time away from the outer
one. Where no stopwatch runs, nothing is recorded.

On the CPU a mark is the clock's reading. On a GPU it is an event on the stream that computes, so
that the parts are the device's time and not that of the thread which only launches kernels: a
collective on its own stream counts from where the computing stream waits for it, which is what it
costs beyond the work that hides it. Gaps in which the device waits for the next launch belong to
the part that was open, as in any timeline.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Literal, get_args

import torch

Part = Literal["compute", "tp", "pp", "dp", "optimizer", "idle", "unexplained"]
"""compute: passes over micro-batches. tp, pp, dp: communication over that axis that nothing hides,
the wait for the peer included. optimizer: the update. idle: waiting for every rank at a step's end.
unexplained: what no part claims."""

_Opened = Part | Literal["communication"]

PARTS: Final[tuple[Part, ...]] = get_args(Part)


class Stopwatch:
    """Marks where one part of a step ends and the next begins; a rank keeps one for all its steps.

    Which part is open is worked out after the step: what is done during it is to read the clock.
    """

    def __init__(
        self, device: torch.device, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._events = _Events(device) if device.type == "cuda" else None
        self._clock: Callable[[], Any] = self._events.record if self._events else clock
        # On a GPU the backward pass runs in a thread of autograd's. The thread that called it is
        # blocked meanwhile, so parts still nest; an append is atomic, and needs no lock.
        self._marks: list[tuple[_Opened | None, Any]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Records every `part` of this process, of any thread, until it is left."""
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
        """A part is opened inside the open one, or, with None, that one is closed."""
        self._marks.append((opened, self._clock()))

    def seconds(self) -> dict[Part, float]:
        """Seconds of each part of what was recorded last; waits for the device where there is one."""
        between_s = self._events.seconds_between if self._events else _difference
        seconds = dict.fromkeys(PARTS, 0.0)
        if self._events is not None and self._marks:
            self._marks[-1][1].synchronize()
        open_parts: list[Part] = []
        for (opened, start), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            if opened is None:
                open_parts.pop()
            else:
                open_parts.append(_resolved(opened, open_parts))
            seconds[open_parts[-1]] += between_s(start, end)
        return seconds


def _resolved(opened: _Opened, open_parts: list[Part]) -> Part:
    """Communication is tensor parallel's in a pass; elsewhere it belongs to the part that is open."""
    if opened != "communication":
        return opened
    return "tp" if open_parts[-1] == "compute" else open_parts[-1]


class _Events:
    """Events on the stream that computes, used again in every step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: list[torch.cuda.Event] = []
        self._num_used = 0
        self._stream = torch.cuda.current_stream(device)

    def begin(self) -> None:
        # Always the same stream: a thread, or a block of code, may have made another one current.
        self._stream, self._num_used = torch.cuda.current_stream(self._device), 0

    def record(self) -> torch.cuda.Event:
        if self._num_used == len(self._made):
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._made.append(event)
        event = self._made[self._num_used]
        self._num_used += 1
        event.record(self._stream)
        return event

    @staticmethod
    def seconds_between(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        milliseconds: float = start.elapsed_time(end)
        return milliseconds / 1e3


def _difference(start: float, end: float) -> float:
    return end - start


class _PartOfStep:
    """A context that may be entered anywhere, again and again: its state is the stopwatch's."""

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
"""The one that records. Of the process, not of a context: autograd's threads inherit no context."""

_OF_PART: Final = {name: _PartOfStep(name) for name in PARTS}

communication: Final = _PartOfStep("communication")
"""What a collective is counted as: inside a pass none but tensor parallel's waits, unless it says so."""


def part(name: Part) -> _PartOfStep:
    """Counts what happens inside as this part of the step, if a stopwatch runs."""
    return _OF_PART[name]
