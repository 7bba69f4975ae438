"""The documents of models and clusters by name."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from api.schemas.campaigns_and_trials import Document


class CatalogueEntry(Document):
    """The common fields of models and clusters."""

    name: str
    preset: bool
    """Whether it is a preset of the program; presets cannot be replaced or deleted."""
    description: dict[str, Any]
    """All fields, in the form of campaign files."""
    created_by: str | None
    """Name of the token that stored it first; null for a preset."""
    created_at: datetime | None
    updated_at: datetime | None


class ModelRead(CatalogueEntry):
    """A model that campaign files can name."""

    num_parameters: int
    """Number of parameters; shared ones count once."""


class ClusterRead(CatalogueEntry):
    """A cluster that campaign files can name."""

    num_devices: int
    """Devices of the whole machine."""
    warning: str | None
    """The constants that were assumed; null: none."""


class ModelPage(Document):
    """Models: presets, then those of users, both sorted by name."""

    models: list[ModelRead]


class ClusterPage(Document):
    """Clusters: presets, then those of users, both sorted by name."""

    clusters: list[ClusterRead]
