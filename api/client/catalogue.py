"""Calls about models and clusters by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from api.campaign_schemas import ClusterPage, ClusterRead, ModelPage, ModelRead
from api.client.call import Call, delete, get, put, segment
from api.client.route import route


class CatalogueCalls:
    """What can be asked about models and clusters that campaign files name."""

    @route
    def models(self) -> Call[ModelPage]:
        """Presets, then the users' own."""
        return get("/models", ModelPage)

    @route
    def model(self, name: str) -> Call[ModelRead]:
        """A model's shape, by its name."""
        return get(f"/models/{segment(name)}", ModelRead)

    @route
    def put_model(self, name: str, description: Mapping[str, Any] | str) -> Call[ModelRead]:
        """Keeps a model under a name of one's own: a shape, or a preset with changes."""
        return put(f"/models/{segment(name)}", ModelRead, description)

    @route
    def delete_model(self, name: str) -> Call[None]:
        """Deletes a model of one's own."""
        return delete(f"/models/{segment(name)}")

    @route
    def clusters(self) -> Call[ClusterPage]:
        """Presets, then the users' own."""
        return get("/clusters", ClusterPage)

    @route
    def cluster(self, name: str) -> Call[ClusterRead]:
        """A cluster's limits and constants, by its name."""
        return get(f"/clusters/{segment(name)}", ClusterRead)

    @route
    def put_cluster(self, name: str, description: Mapping[str, Any] | str) -> Call[ClusterRead]:
        """Keeps a cluster under a name of one's own: its fields, or a preset with changes."""
        return put(f"/clusters/{segment(name)}", ClusterRead, description)

    @route
    def delete_cluster(self, name: str) -> Call[None]:
        """Deletes a cluster of one's own."""
        return delete(f"/clusters/{segment(name)}")
