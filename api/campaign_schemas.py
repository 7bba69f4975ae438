"""The documents about campaigns' changes, and about models and clusters by name."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pydantic import Field

from api.schemas import Document, Request
from api.texts import Notes
from search_spaces.duration import MAX_DURATION_S
from search_spaces.reading import MAX_COUNT


class BudgetChange(Request):
    """Bounds to be changed: one that is not named stays, null takes one away."""

    trials: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """Trials that ended, whatever their outcome."""
    node_hours: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Nodes times hours that probes held them."""
    wall_time: str | float | None = None
    """As `90s`, `10m`, `2h`, `1d`, or in seconds; in place of wall_time_s."""
    wall_time_s: float | None = Field(default=None, gt=0, le=MAX_DURATION_S)
    """Seconds that the campaign was running."""


class CampaignChange(Request):
    """What of a campaign can be changed after its submission; what is not named stays."""

    budget: BudgetChange = BudgetChange()
    """Of a campaign that has not ended."""
    notes: Notes = ""
    """What its users write beside it: text, of several lines if need be."""


class CatalogueEntry(Document):
    """What models and clusters by name have in common."""

    name: str
    preset: bool
    """Whether it comes with the program; presets cannot be replaced or deleted."""
    description: dict[str, Any]
    """Every field, as campaign files write it."""
    created_by: str | None
    """Who put it first; null for a preset."""
    created_at: datetime | None
    updated_at: datetime | None


class ModelRead(CatalogueEntry):
    """A model that campaign files can name."""

    num_parameters: int
    """Each counted once."""


class ClusterRead(CatalogueEntry):
    """A cluster that campaign files can name."""

    num_devices: int
    """Of the whole machine."""
    warning: str | None
    """Which of its constants had to be guessed; null: none."""


class ModelPage(Document):
    """Models: presets, then the users' own, each by name."""

    models: list[ModelRead]


class ClusterPage(Document):
    """Clusters: presets, then the users' own, each by name."""

    clusters: list[ClusterRead]
