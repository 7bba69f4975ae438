"""Programs in a Python of their own, which finds this project wherever it stands."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def python_words(program: str, *arguments: str, options: Sequence[str] = ()) -> list[str]:
    return [sys.executable, *options, "-c", program, *arguments]


def environment_with(variables: dict[str, str]) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **variables}


def run_python(
    program: str,
    *arguments: str,
    options: Sequence[str] = (),
    cwd: Path = ROOT,
    timeout_s: float = 100.0,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end, whatever its exit code."""
    return subprocess.run(
        python_words(program, *arguments, options=options),
        cwd=cwd,
        env=environment_with(variables),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def printed_by(program: str, *arguments: str, **options: Any) -> str:
    """What a program prints that ends well."""
    ended = run_python(program, *arguments, **options)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def start_python(program: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    """Starts a program whose words can be read, and which can be told something."""
    return subprocess.Popen(
        python_words(program, *arguments),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment_with(variables),
    )
