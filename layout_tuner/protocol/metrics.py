"""The table of metrics: the figures of a trial that lists are filtered and sorted by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Final

from layout_tuner.protocol.measurement import METRIC, Measurement


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """A figure that trials are filtered and sorted by."""

    name: str
    is_measured: bool = True
    """Whether it is a field of the measurement, as opposed to a figure that follows from one."""
    is_whole: bool = False
    """Whether its values are whole numbers."""


def _metrics() -> Iterator[Metric]:
    for field in fields(Measurement):
        if METRIC.items() <= field.metadata.items():
            yield Metric(name=field.name, is_whole=field.type in ("int", "int | None"))
        if field.name == "tokens_per_s_per_device":
            yield Metric(name="tokens_per_node_hour", is_measured=False)


METRICS: Final[Mapping[str, Metric]] = {metric.name: metric for metric in _metrics()}
"""Every metric by name: the fields of a measurement that are marked as metrics, in their order, and
tokens_per_node_hour, which follows from the throughput and the number of nodes."""
