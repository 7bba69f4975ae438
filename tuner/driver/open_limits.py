"""The bounds on the legal layouts of open searches; it imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenLimits:
    """Most legal layouts of open searches.

    A search that alone has more layouts is open while no other large one is.
    """

    of_owner: int = 2_000_000
    in_all: int = 4_000_000
