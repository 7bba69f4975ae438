"""Whether others disturbed a probe so much that its times say little about its layout."""

from __future__ import annotations

from typing import Final

DISTURBED_SHARE: Final = 0.1
"""Share of a device's time from which a probe counts as disturbed."""


def is_disturbed(others_share: float | None, throttled: bool | None) -> bool:
    """Whether a probe was disturbed. What is not known counts as quiet.

    Args:
        others_share: share, from 0 to 1, of a device's time that others took; None: not known.
        throttled: whether heat or power held a device's clock down; None: not known.
    """
    return throttled is True or (others_share is not None and others_share >= DISTURBED_SHARE)
