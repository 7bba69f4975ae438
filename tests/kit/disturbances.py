"""What probes say of others on their devices, in every combination that may be told apart."""

from __future__ import annotations

import math
from itertools import product
from typing import Any, Final

from layout_tuner.search_spaces.layouts.layout import Layout

_AT: Final = 0.05
"""The share from which a probe is disturbed, as the documentation states it."""
_SHARES: Final = (None, 0.0, math.nextafter(_AT, 0), _AT, math.nextafter(_AT, 1), 1.0)

WATCHED: Final[tuple[tuple[dict[str, Any], bool], ...]] = tuple(
    ({"others_share": share, "throttled": throttled}, bool(throttled) or (share or 0) >= _AT)
    for share, throttled in product(_SHARES, (None, False, True))
)
"""Figures of a measurement, and whether they make it disturbed."""
_QUIET: Final = tuple(figures for figures, is_disturbed in WATCHED if not is_disturbed)
_DISTURBED: Final = tuple(figures for figures, is_disturbed in WATCHED if is_disturbed)

RUNS: Final[tuple[tuple[tuple[tuple[dict[str, Any], bool], ...], bool], ...]] = (
    *(((each,), each[1]) for each in WATCHED),
    *((((figures, True), (_QUIET[0], False)), False) for figures in _DISTURBED[:4]),
    *((((figures, False), (_DISTURBED[-1], True)), False) for figures in _QUIET[:4]),
    (tuple((figures, True) for figures in _DISTURBED[:4]), True),
    (tuple((figures, False) for figures in _QUIET[:4]), False),
)
"""Runs of a layout, each with whether it is disturbed, and whether the layout is."""

LAYOUTS: Final = tuple(Layout(num_microbatches=number) for number in range(1, len(RUNS) + 1))
"""A layout for each entry of `RUNS`."""
