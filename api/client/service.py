"""Calls about the service itself."""

from __future__ import annotations

from api.client.call import Call, get
from api.client.route import route
from api.schemas import Health


class ServiceCalls:
    """What can be asked about the service."""

    @route
    def health(self) -> Call[Health]:
        """Whether the service's parts are there."""
        return get("/health", Health)
