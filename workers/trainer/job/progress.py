"""Progress of a training job, as lines for people and as a log of JSON lines. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TextIO

from layout_tuner.documents.reading import why_unreadable
from layout_tuner.units import memory
from layout_tuner.workers.trainer.errors import TrainJobInvalidError


class ProgressLog:
    """Prints each event, and appends it to a log as JSON; TrainJobInvalidError if that can't be."""

    def __init__(self, *, stream: TextIO, log: Path | None = None) -> None:
        self._stream = stream
        try:
            self._log = None if log is None else log.open("a")  # for the life of the process
        except OSError as error:
            raise TrainJobInvalidError(
                f"the log {log} can't be written: {why_unreadable(error)}"
            ) from error

    def __call__(self, event: Mapping[str, Any]) -> None:
        print_event(event, stream=self._stream)
        self.record(event)

    def record(self, event: Mapping[str, Any]) -> None:
        """Appends an event to the log, without printing it."""
        if self._log is not None:
            self._log.write(json.dumps({"event": "result", **event}) + "\n")
            self._log.flush()


def print_event(event: Mapping[str, Any], *, stream: TextIO) -> None:
    """Prints one line for an event that `run_train` reported, or for its result."""
    stream.write(f"{_LINES[event.get('event', 'result')](event)}\n")
    stream.flush()


def _step(event: Mapping[str, Any]) -> str:
    if event["grad_norm"] is None:
        norm = f"skipped: gradients overflowed at loss scale {event['loss_scale']:g}"
    else:
        norm = f"grad norm {event['grad_norm']:.3f}"
    return (
        f"step {event['index']:>4}  loss {event['loss']:.4f}  {norm}  "
        f"{event['tokens_per_s']:>10,.0f} tokens/s  mfu {event['mfu']:.1%}"
    )


def _resume(event: Mapping[str, Any]) -> str:
    return (
        f"resuming from {event['path']}, saved after {event['step']} of {event['steps']} steps "
        f"under {event['layout']}"
    )


def _checkpoint(event: Mapping[str, Any]) -> str:
    return f"saved {event['path']} ({memory(event['bytes'])} in {event['seconds']:.1f} s)"


def _note(event: Mapping[str, Any]) -> str:
    return f"note: {event['message']}"


def _result(result: Mapping[str, Any]) -> str:
    if not result["steps"]:
        return f"nothing to do: all {result['first_step']} steps had been taken"
    if result["tokens_per_s"] is None:
        return f"tokens/s: not measured ({result['steps']} steps, all of them warm-up)"
    timed = result["steps"] - result["warmup"]
    shared = "; ranks shared devices" if result["oversubscribed"] else ""
    return f"tokens/s: {result['tokens_per_s']:,.0f} (median of {timed} steps{shared})"


_LINES: Final = {
    "step": _step,
    "resume": _resume,
    "checkpoint": _checkpoint,
    "note": _note,
    "result": _result,
}
