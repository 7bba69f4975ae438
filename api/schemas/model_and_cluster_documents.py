"""The documents of models and clusters by name."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final, Self

from layout_tuner.api.schemas.campaigns_and_trials import Document
from layout_tuner.search_spaces.clusters.cluster_presets import (
    CLUSTER_PRESETS,
    LOCAL_CPU,
    resolve_cluster,
)
from layout_tuner.search_spaces.models.model_presets import MODEL_PRESETS

_OF_PRESETS: Final[dict[str, Any]] = {
    "preset": True,
    "created_by": None,
    "created_at": None,
    "updated_at": None,
}


class CatalogueEntry(Document):
    """The common fields of models and clusters."""

    name: str
    preset: bool
    """Whether it is a preset of the program; presets cannot be replaced or deleted."""
    description: dict[str, Any]
    """All fields, in the form of campaign files."""
    created_by: str | None
    """Its owner, for whom it was stored first; null for a preset."""
    created_at: datetime | None
    updated_at: datetime | None


class ModelRead(CatalogueEntry):
    """A model that campaign files can name."""

    num_parameters: int
    """Number of parameters, those of multi-token prediction too; shared ones count once."""

    @classmethod
    def of_preset(cls, name: str) -> Self:
        shape = MODEL_PRESETS[name]
        description = shape.to_mapping()
        return cls(
            name=name, description=description, num_parameters=shape.num_parameters, **_OF_PRESETS
        )


class ClusterRead(CatalogueEntry):
    """A cluster that campaign files can name."""

    num_devices: int
    """Devices of the whole machine."""
    warning: str | None
    """The constants that were assumed; null: none."""

    @classmethod
    def of_preset(cls, name: str) -> Self:
        """A preset; those of local-cpu are detected."""
        cluster, _ = resolve_cluster(name)
        description, num_devices = cluster.to_mapping(), cluster.num_devices
        return cls(
            name=name, description=description, num_devices=num_devices, warning=None, **_OF_PRESETS
        )


class ModelPage(Document):
    """Models: presets, then those of users, both sorted by name."""

    models: list[ModelRead]

    @classmethod
    def of_presets(cls) -> Self:
        return cls(models=[ModelRead.of_preset(name) for name in MODEL_PRESETS])


class ClusterPage(Document):
    """Clusters: presets, then those of users, both sorted by name."""

    clusters: list[ClusterRead]

    @classmethod
    def of_presets(cls) -> Self:
        names = (LOCAL_CPU, *CLUSTER_PRESETS)
        return cls(clusters=[ClusterRead.of_preset(name) for name in names])
