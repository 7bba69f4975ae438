"""Errors of the API room; one base, so that a caller can catch them all."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from api.schemas import Problem


class ApiError(Exception):
    """Base of everything that `api` raises on purpose."""


class DocumentMalformedError(ApiError):
    """A document is not JSON or YAML; the message says at which line."""


class DocumentTypeUnsupportedError(ApiError):
    """The body's content type is neither JSON nor YAML."""


class DocumentTooLargeError(ApiError):
    """The document is longer than any that somebody wrote."""


class PageInvalidError(ApiError):
    """A cursor or page does not come from this service."""


class WatchersTooManyError(ApiError):
    """As many watch live events as a process serves."""


class EventNumberInvalidError(ApiError):
    """The number of an event to go on after is none."""


class QueryUnknownError(ApiError):
    """A URL's query names something that the route does not know."""


class ExportUnavailableError(ApiError):
    """There is no trial that could be exported, or the one that was named has not completed."""


class AnalysisUnavailableError(ApiError):
    """The campaign has not been analysed: too little of it has been measured."""


class AccessUndeclaredError(ApiError):
    """A route stands in no line of the table of access: a fault of ours."""


class CampaignOwnedError(ApiError):
    """The campaign is somebody else's."""


class PresetFixedError(ApiError):
    """A model or cluster that comes with the program was to be replaced or deleted."""


class ServiceStartError(ApiError):
    """The service cannot start; the message says what to do."""


class TokenFileInvalidError(ApiError):
    """A token file cannot be read, or holds no token; the message says what to do."""


class ServiceUnstableError(ApiError):
    """A process of the service keeps ending; restarting it again would hide the fault."""


class ServiceError(ApiError):
    """The service refused a request, or did not answer."""

    def __init__(
        self, message: str, *, status: int | None = None, problem: Problem | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        """The HTTP status; None when there was no answer."""
        self.problem = problem
        """The service's refusal, which names the fields; None where it sent none."""


class EventsMissedError(ServiceError):
    """Events that a client would go on after are kept no more."""
