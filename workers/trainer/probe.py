"""A probe: a short training run that is measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from search_spaces.outcome import Environment, Measurement, ProbeRequest
from workers.trainer.context import RankContext

__all__ = ["RankContext", "RankResult", "run_probe"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankResult:
    """What rank 0 knows when a probe has ended well."""

    measurement: Measurement
    environment: Environment


def run_probe(
    request: ProbeRequest, ctx: RankContext, report: Callable[[dict[str, Any]], None]
) -> RankResult | None:
    """Runs one rank of a probe, from the process group to the measurement."""
    raise NotImplementedError
