"""Errors of the client."""

from __future__ import annotations

from typing import TYPE_CHECKING

from layout_tuner.api.errors import ApiError
from layout_tuner.errors import ServiceUnansweredError
from layout_tuner.protocol.connection.http_connection import TEMPORARY, TOO_MANY_REQUESTS

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

    @property
    def is_temporary(self) -> bool:
        """Whether the service, or a proxy before it, may be back in a moment."""
        if isinstance(self.__cause__, ServiceUnansweredError):
            return self.__cause__.may_be_down
        return self.status == TOO_MANY_REQUESTS or self.status in TEMPORARY


class PackageMissingError(ApiError, ImportError):
    """A method needs a package that is not installed; the message says how to install it."""


class EventsMissedError(ServiceError):
    """Events that the client has missed were deleted."""
