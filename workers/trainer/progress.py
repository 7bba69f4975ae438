"""What a training job says while it runs, for people. Nothing here needs torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TextIO


def print_event(event: Mapping[str, Any], *, stream: TextIO) -> None:
    """Prints one line of what `run_train` reported (a step), or of what it returned (the result)."""
    stream.write(f"{_step(event) if event.get('event') == 'step' else _result(event)}\n")
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


def _result(result: Mapping[str, Any]) -> str:
    timed = result["steps"] - result["warmup"]
    shared = "; ranks shared devices" if result["oversubscribed"] else ""
    return f"tokens/s: {result['tokens_per_s']:,.0f} (median of {timed} steps{shared})"
