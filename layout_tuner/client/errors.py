"""Errors of the client."""

from __future__ import annotations

from typing import TYPE_CHECKING

from layout_tuner.api.errors import ApiError

if TYPE_CHECKING:
    from layout_tuner.api.schemas.campaigns_and_trials import Problem


class ServiceError(ApiError):
    """The service refused a request, or did not answer."""

    def __init__(
        self, message: str, *, status: int | None = None, problem: Problem | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        """The HTTP status; None: there was no response."""
        self.problem = problem
        """The problem document of the service; None: it sent none."""


class EventsMissedError(ServiceError):
    """Events that the client has missed were deleted."""
