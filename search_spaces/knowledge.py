"""What a campaign may start from: earlier measurements of the same machine, and named campaigns."""

from __future__ import annotations

from typing import Final, Literal, get_args

from search_spaces.errors import CampaignInvalidError
from search_spaces.reading import shown

KnowledgeSource = Literal["auto", "none"]
"""auto: whatever earlier campaigns measured on the same cluster under the same software. none: only
what `start_from` names."""

KNOWLEDGE_SOURCES: Final[tuple[KnowledgeSource, ...]] = get_args(KnowledgeSource)
MAX_START_FROM: Final = 32


def read_start_from(value: object) -> tuple[str, ...]:
    """The names of campaigns.

    Raises:
        CampaignInvalidError: it is no list of distinct names.
    """
    if not isinstance(value, (list, tuple)) or not all(isinstance(name, str) for name in value):
        raise CampaignInvalidError(
            f"{shown(value)} is not a list of campaigns' names, such as [first, second]"
        )
    if len(value) > MAX_START_FROM:
        raise CampaignInvalidError(
            f"{len(value)} campaigns are more than {MAX_START_FROM}, the most to start from"
        )
    for place, name in enumerate(value):
        if name in value[:place]:
            raise CampaignInvalidError(f"{shown(name)} is listed more than once")
    return tuple(value)
