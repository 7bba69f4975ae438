"""Applies a seeded fault: finds its function by name, and replaces the snippet in the source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from tests.seeded_faults.fault import Fault

ROOT: Final = Path(__file__).parents[2]
PACKAGES: Final = ("layout_tuner", "search_spaces", "results_db", "tuner", "workers", "api")


class FaultInapplicableError(Exception):
    """A fault's function or snippet is not found exactly once, or the result is invalid Python."""


@dataclass(frozen=True, slots=True)
class Change:
    """A fault applied to its module."""

    path: Path
    """The module, relative to the root."""
    text: str
    """Its source with the fault."""


def changed(fault: Fault) -> Change:
    """The module with the fault in it; nothing is written.

    Raises:
        FaultInapplicableError: see there.
    """
    found = [
        (path, start, end)
        for path, text in _sources().items()
        for start, end in _spans(text, fault)
    ]
    if len(found) != 1:
        places = ", ".join(str(path.relative_to(ROOT)) for path, _, _ in found) or "no module"
        raise FaultInapplicableError(f"{fault.name}: {fault.function} is defined in {places}")
    ((path, start, end),) = found
    lines = _sources()[path].splitlines(keepends=True)
    pattern = r"\s+".join(re.escape(word) for word in fault.before.split())
    function = "".join(lines[start:end])
    times = len(re.findall(pattern, function))
    if times != 1:
        raise FaultInapplicableError(
            f"{fault.name}: {fault.before!r} occurs {times} times in {fault.function} of {path}"
        )
    text = "".join([*lines[:start], re.sub(pattern, lambda _: fault.after, function), *lines[end:]])
    try:
        compile(text, str(path), "exec")
    except SyntaxError as error:
        raise FaultInapplicableError(f"{fault.name}: {error}") from error
    return Change(path.relative_to(ROOT), text)


@cache
def _sources() -> dict[Path, str]:
    """The text of every module."""
    modules = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return {path: path.read_text() for path in sorted(modules)}


def _spans(text: str, fault: Fault) -> Iterator[tuple[int, int]]:
    """First and last line of the functions that have the fault's qualified name and its `also`."""
    if f"def {fault.function.rpartition('.')[2]}(" not in text:
        return
    lines = text.splitlines(keepends=True)
    waiting: list[tuple[str, ast.AST]] = [("", ast.parse(text))]
    while waiting:
        prefix, node = waiting.pop()
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                waiting.append((prefix, child))
                continue
            name = f"{prefix}{child.name}"
            waiting.append((f"{name}.", child))
            start, end = child.lineno - 1, child.end_lineno or child.lineno
            is_named = name == fault.function and not isinstance(child, ast.ClassDef)
            if is_named and fault.also in "".join(lines[start:end]):
                yield start, end
