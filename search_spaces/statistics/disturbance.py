"""Whether others disturbed a probe so much that its times say little about its layout."""

from __future__ import annotations

import math
from typing import Final

DISTURBED_SHARE: Final = 0.1
"""Share of a device's time from which a probe counts as disturbed."""

THROTTLED: Final = math.log(1.2)
"""How much slower a device may be whose clock is held down. Sinha et al. (SC 2022, arXiv
2208.11035) found up to 22 % between the GPUs of one system."""
_LARGEST_SHARE: Final = 0.95


def is_disturbed(others_share: float | None, throttled: bool | None) -> bool:
    """Whether a probe was disturbed. What is not known counts as quiet.

    Args:
        others_share: share, from 0 to 1, of a device's time that others took; None: not known.
        throttled: whether heat or power held a device's clock down; None: not known.
    """
    return throttled is True or (others_share is not None and others_share >= DISTURBED_SHARE)


def possible_slowdown(others_share: float | None, throttled: bool | None) -> float:
    """How much slower than a quiet one a disturbed probe may be, as a logarithm; 0: not disturbed.

    Where others had a share of a device, all ranks wait for the one that had only the rest.
    """
    if not is_disturbed(others_share, throttled):
        return 0.0
    of_others = -math.log1p(-min(others_share or 0.0, _LARGEST_SHARE))
    return max(of_others, THROTTLED if throttled else 0.0)
