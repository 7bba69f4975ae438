"""How long an api process takes from its launch to its first answer, and what it weighs then."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Final

from benchmarks.service.api_processes import ApiProcess
from benchmarks.service.postgres_server import DURABLE, running_server
from benchmarks.trainer.trainer_table import Figure

START_S: Final = 1.8
MEMORY_BYTES: Final = 150_000_000


def measure_start(folder: Path, scale: int) -> list[Figure]:
    """Starts it again and again on a database that is there, SQLite and PostgreSQL."""
    figures = _figures("SQLite", folder / "sqlite", None, scale)
    with running_server(settings=DURABLE) as server, server.database() as url:
        figures += _figures("PostgreSQL", folder / "postgres", url, scale)
    return figures


def _figures(where: str, folder: Path, database: str | None, scale: int) -> list[Figure]:
    folder.mkdir()
    starts_s, memory_bytes = [], []
    # The first creates the database, and whatever else is there only once.
    for again in range(scale + 1):
        with ApiProcess(folder, "api", database) as api:
            if again:
                starts_s.append(api.start_s)
                memory_bytes.append(api.memory_bytes)
    return [
        Figure(
            name=f"an api process on {where}, from its launch to its first answer, median of {scale}",
            asked=f"under {START_S:g} s",
            measured=f"{median(starts_s):.2f} s ({min(starts_s):.2f} to {max(starts_s):.2f})",
            reached=median(starts_s) < START_S,
        ),
        Figure(
            name=f"its memory then on {where}, largest",
            asked=f"under {MEMORY_BYTES / 1e6:.0f} MB",
            measured=f"{max(memory_bytes) / 1e6:.0f} MB",
            reached=max(memory_bytes) < MEMORY_BYTES,
        ),
    ]
