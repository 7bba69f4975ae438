"""The bounds on the legal layouts of open searches; it imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

BYTES_A_LAYOUT: Final = 250
"""Most bytes that an open `guided` search of one objective holds for each legal layout.

Another objective takes 8 bytes more, measurements of other campaigns take 8. A proposal takes as
many again while it is computed, of one search at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenLimits:
    """Most legal layouts of open searches.

    A search that alone has more layouts is open while no other large one is.
    """

    of_owner: int = 2_000_000
    in_all: int = 4_000_000
