"""Campaigns as values, for tests that need no service and no database."""

from __future__ import annotations

from typing import Any

from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec
from layout_tuner.search_spaces.layouts.layout import KNOBS
from layout_tuner.search_spaces.spaces.search_space import DERIVABLE


def space_of(**knobs: Any) -> dict[str, Any]:
    """A space with these knobs, and one value for each other one, so that nothing is auto.

    The precision is the cluster's.
    """
    left = (*DERIVABLE, "precision")
    one = {name: knob.default for name, knob in KNOBS.items() if name not in left}
    return {"global_batch_size": 16} | one | knobs


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
