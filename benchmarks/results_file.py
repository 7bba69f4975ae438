"""Where benchmarks write down what they measured, and what they say of the machine."""

from __future__ import annotations

import contextlib
import datetime
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import Final

from layout_tuner.process_resources import usable_cores, usable_memory_bytes
from layout_tuner.units import GIB

RESULTS: Final = Path(__file__).with_name("RESULTS.md")


def describe_machine(*packages: str, path: Path = RESULTS) -> str:
    """Date, machine, and the versions of these packages, in one line.

    A machine that the head of the results describes has the name that it has there; of another one
    processor, cores, memory, system and Python are stated.
    """
    versions = ", ".join(f"{package} {metadata.version(package)}" for package in packages)
    machine = (
        f"{_cpu_name()}, {usable_cores()} cores, {usable_memory_bytes() / GIB:.0f} GiB; "
        f"{platform.system()}, Python {platform.python_version()}"
    )
    named = named_machines(path).get(machine, machine)
    return f"{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}; {named}; {versions}"


def named_machines(path: Path = RESULTS) -> dict[str, str]:
    """The names of machines by their descriptions: the list at the head of the results."""
    head = path.read_text().partition("\n## ")[0]
    items = re.findall(r"^- (\w+): (.+)$", head, re.MULTILINE)
    return {machine: name for name, machine in items}


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
