"""Whether others disturbed a probe so much that its times say little about its layout.

A measurement is disturbed if `is_disturbed` says so (in SQL `results_db.trials.filter_sql`). A
ranked layout is disturbed if all its runs that count are: then `disturbed_least` leaves no quiet
one (`results_db.leaderboard.rank_layouts.MeasuredLayout.disturbed`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

DISTURBED_SHARE: Final = 0.05
"""Share of a device's time from which a probe counts as disturbed.

Where others take a share s, steps take at least about 1 / (1 - s) times as long (measured,
docs/explanation/measurement.md): 5 % at this share, while two quiet runs differ by up to 2.8 % in
95 % of all cases. Quiet probes had shares up to 0.015; an idle service takes 0.02 of one core.
"""

MEANING: Final = (
    f"disturbed: others took {DISTURBED_SHARE:.0%} or more of a device's time, or heat or power held "
    "its clock down, so that the times say little of the layout"
)

THROTTLED: Final = math.log(1.2)
"""How much slower a device may be whose clock is held down. Sinha et al. (SC 2022, arXiv
2208.11035) found up to 22 % between the GPUs of one system."""
_LARGEST_SHARE: Final = 0.95
_POWER: Final = 1.5
"""Steps take (1 / (1 - share)) to this power times as long, since a rank that waits is waited for:
1.5 times at a quarter, three times at a half (measured, docs/explanation/measurement.md).
"""


def is_disturbed(others_share: float | None, throttled: bool | None) -> bool:
    """Whether a probe was disturbed. What is not known counts as quiet."""
    return throttled is True or (others_share is not None and others_share >= DISTURBED_SHARE)


def possible_slowdown(others_share: float | None, throttled: bool | None) -> float:
    """How much slower than a quiet one a disturbed probe may be, as a logarithm; 0: not disturbed.

    Where others had a share of a device, all ranks wait for the one that had only the rest.
    """
    if not is_disturbed(others_share, throttled):
        return 0.0
    of_others = -_POWER * math.log1p(-min(others_share or 0.0, _LARGEST_SHARE))
    return max(of_others, THROTTLED if throttled else 0.0)


def disturbed_least(shares: Sequence[tuple[float | None, bool | None]]) -> list[bool]:
    """Which runs of a layout count: those that were disturbed least, about equally.

    Each run is given as for `possible_slowdown`. One that may be slower than the least disturbed
    one by what makes a run disturbed at all does not count beside it.
    """
    slowdowns = [possible_slowdown(*each) for each in shares]
    bound = min(slowdowns) + possible_slowdown(DISTURBED_SHARE, None)
    return [each < bound for each in slowdowns]


def disturbance_words(
    others_share: float | None, throttled: bool | None, own_share: float | None = None
) -> str:
    """What others took of a probe's devices; empty: not known.

    `own_share` is the part that the product's own processes took, at most.
    """
    taken = "" if others_share is None else f"{others_share:.1%} of a device's time"
    if taken and own_share is not None:
        taken += f" ({own_share:.1%} by layout-tuner's own processes)"
    held = "heat or power held a clock down" if throttled else ""
    mark = "disturbed" if is_disturbed(others_share, throttled) else ""
    return ", ".join(filter(None, (taken, held, mark)))
