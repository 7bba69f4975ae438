"""Errors of the package `api`, with one base class."""

from __future__ import annotations

from layout_tuner.errors import LayoutTunerError


class ApiError(LayoutTunerError):
    """Base of all errors of `api`."""


class DocumentTypeUnsupportedError(ApiError):
    """The body's content type is neither JSON nor YAML."""


class PageInvalidError(ApiError):
    """A cursor was not written by this service, or for another list."""


class WatchersTooManyError(ApiError):
    """The process has as many watchers of live events as it serves."""


class EventNumberInvalidError(ApiError):
    """A Last-Event-ID is not the number of an event."""


class QueryUnknownError(ApiError):
    """A query has a parameter that the route does not know."""


class ExportUnavailableError(ApiError):
    """There is no trial to export, or the named one has not completed."""


class TableFormatUnavailableError(ApiError):
    """A package that the format of a table needs is not installed."""


class AssetNotFoundError(ApiError):
    """A script or style of the pages is not of this version of the service."""


class ComparisonInvalidError(ApiError):
    """Too few or too many things are to be compared; the message states how many can be."""


class ColumnUnknownError(ApiError):
    """A table of a page has no such column."""


class AnalysisUnavailableError(ApiError):
    """The campaign has no analysis."""


class AccessUndeclaredError(ApiError):
    """A route has no rule in the table of access: a fault of ours."""


class FormTokenInvalidError(ApiError):
    """A form that a page sends has no token of its session, or that of another session."""


class SignInCodeSourceError(ApiError):
    """A session of a browser asked for a sign-in code, which only a token may."""


class SignInRefusedError(ApiError):
    """A code or a token does not sign in: it is wrong, or no longer valid."""


class SignInRoleError(SignInRefusedError):
    """A worker's token does not sign in."""


class SignInOwnerError(SignInRefusedError):
    """Whom a provider or a proxy names may not sign in; the message states why."""


class ProviderUnavailableError(SignInRefusedError):
    """The provider of sign-ins does not answer, or not as it should."""


class SignInTooOftenError(SignInRefusedError):
    """Too many wrong codes and tokens came from the address."""

    def __init__(self, message: str, *, wait_s: float) -> None:
        super().__init__(message)
        self.wait_s = wait_s
        """Seconds until the next attempt is accepted."""


class CampaignOwnedError(ApiError):
    """The campaign belongs to another user."""


class TrainerNotFoundError(ApiError):
    """No trainer of that name is known."""


class PresetFixedError(ApiError):
    """A preset cannot be replaced or deleted."""


class ServiceStartError(ApiError):
    """The service cannot start; the message states what to do."""


class ServiceRunsAlreadyError(ServiceStartError):
    """Another service runs on the data directory; the message states where, and what to do."""


class TokenFileInvalidError(ApiError):
    """A token file cannot be read, or has no token; the message states what to do."""


class ServiceUnstableError(ApiError):
    """A process of the service ended too often to be restarted again."""
