"""A cache of the parsed descriptions of campaigns: parsing one takes as long as a lease."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from search_spaces.campaigns.campaign import CampaignSpec
from search_spaces.errors import SearchSpaceError

MOST_SPECS: Final = 256
"""Campaigns whose parsed description a process keeps."""


class ParsedSpecs:
    """The descriptions of campaigns by their ids. Threads may share it."""

    def __init__(self) -> None:
        self._specs: dict[int, tuple[Mapping[str, Any], CampaignSpec]] = {}

    def of(self, campaign_id: int, document: Mapping[str, Any]) -> CampaignSpec | SearchSpaceError:
        """The campaign, parsed again if its document has changed; an error if it is damaged."""
        known = self._specs.get(campaign_id)
        if known is not None and known[0] == document:
            return known[1]
        try:
            spec = CampaignSpec.from_mapping(document)
        except SearchSpaceError as error:
            return error
        if len(self._specs) >= MOST_SPECS:
            self._specs.clear()
        self._specs[campaign_id] = (document, spec)
        return spec
