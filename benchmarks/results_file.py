"""Where benchmarks write down what they measured, and what they say of the machine."""

from __future__ import annotations

import contextlib
import datetime
import platform
from importlib import metadata
from pathlib import Path
from typing import Final

from layout_tuner.process_resources import usable_cores, usable_memory_bytes
from layout_tuner.units import GIB

RESULTS: Final = Path(__file__).with_name("RESULTS.md")


def describe_machine(*packages: str) -> str:
    """Date, machine, and the versions of Python and of these packages, in one line."""
    versions = ", ".join(f"{package} {metadata.version(package)}" for package in packages)
    return (
        f"{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}; {_cpu_name()}, {usable_cores()} cores, "
        f"{usable_memory_bytes() / GIB:.0f} GiB; {platform.system()}, "
        f"Python {platform.python_version()}, {versions}"
    )


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.machine()


def table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table; every column after the first is set flush right."""
    lines = [header, ("---", *["--:"] * (len(header) - 1)), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def record(title: str, text: str, path: Path = RESULTS) -> None:
    """Writes a section of the results; it replaces the section with the same title."""
    written = f"## {title}\n\n{text.strip()}\n"
    preamble, *sections = path.read_text().split("\n## ")
    kept = [f"## {section.strip()}\n" for section in sections]
    titles = [section.splitlines()[0] for section in kept]
    if f"## {title}" in titles:
        kept[titles.index(f"## {title}")] = written
    else:
        kept.append(written)
    path.write_text("\n".join([f"{preamble.strip()}\n", *kept]))
