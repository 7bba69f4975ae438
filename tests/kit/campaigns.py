"""Campaigns as values, for tests that need no service and no database."""

from __future__ import annotations

from typing import Any

from search_spaces.campaigns.campaign import CampaignSpec


def spec_of(**fields: Any) -> CampaignSpec:
    """A campaign with these fields of its document, and the least of the others."""
    least = {
        "name": "first",
        "model": "tiny",
        "cluster": "frontier",
        "space": {"global_batch_size": 16},
        "budget": {"trials": 3},
    }
    return CampaignSpec.from_mapping(least | fields)
