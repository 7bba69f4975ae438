"""Arguments of the benchmarks' command lines."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn


def count(text: str) -> int:
    """A whole number from 1.

    Raises:
        ArgumentTypeError: it is none.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1")
    return int(text)


def refuse(program: str, message: str) -> NoReturn:
    """Ends the program for what it was asked for."""
    print(f"{program}: {message}", file=sys.stderr)
    sys.exit(2)
