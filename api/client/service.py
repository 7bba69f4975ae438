"""Calls about the service itself."""

from __future__ import annotations

from api.client.call import Call, get, get_metrics
from api.client.route import route
from api.schemas import Health, Readiness


class ServiceCalls:
    """What can be asked about the service."""

    @route
    def health(self) -> Call[Health]:
        """Whether the service's parts are there."""
        return get("/health", Health)

    @route
    def readiness(self) -> Call[Readiness]:
        """Whether the service can work; one that cannot refuses, with the reasons."""
        return get("/ready", Readiness)

    @route
    def metrics(self) -> Call[str]:
        """How the service stands, as Prometheus reads it."""
        return get_metrics()
