"""Errors about what a user wrote; one base, so that a caller can catch them all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Self

MAX_PARTS: Final = 20
"""Most errors of one document that are reported together."""


class LayoutTunerError(Exception):
    """Base of the errors that the packages raise on purpose: a log needs their message alone."""

    is_logged = False
    """Whether the log of an outage has this error already."""


class SearchSpaceError(LayoutTunerError, ValueError):
    """Base of the errors that `search_spaces` raises about what a user wrote.

    Args:
        problem: what is wrong.
        field: where in the document, as "space.tp"; empty: the document as a whole.
        shown_field: the beginning of the message, where the problem itself names the last part of
            the field; None: the field.
    """

    def __init__(self, problem: str, *, field: str = "", shown_field: str | None = None) -> None:
        shown_field = field if shown_field is None else shown_field
        super().__init__(f"{shown_field}: {problem}" if shown_field else problem)
        self.problem = problem
        self.field = field
        self._shown_field = shown_field
        self._parts: tuple[SearchSpaceError, ...] = ()
        """Without the error itself: in that cycle it would keep its traceback, and so the request
        that it refuses, until a garbage collection."""

    @property
    def parts(self) -> tuple[SearchSpaceError, ...]:
        """The errors that were found together; usually only this one."""
        return self._parts or (self,)

    @classmethod
    def of_field(cls, field: str, problem: str) -> Self:
        """An error about a field whose problem already names the field."""
        return cls(problem, field=field, shown_field="")

    def within(self, parent: str) -> SearchSpaceError:
        """The same error for the enclosing document, whose field `parent` is this document."""
        if len(self.parts) > 1:
            return joined(part.within(parent) for part in self.parts)
        return type(self)(
            self.problem,
            field=_below(parent, self.field),
            shown_field=_below(parent, self._shown_field),
        )


def _below(parent: str, field: str) -> str:
    return f"{parent}.{field}" if field else parent


def joined(errors: Iterable[SearchSpaceError]) -> SearchSpaceError:
    """Errors of one document as one error, of the first one's class, without repetitions."""
    parts = tuple({str(part): part for error in errors for part in error.parts}.values())
    if len(parts) == 1:
        return parts[0]
    sentences = [str(part) for part in parts[:MAX_PARTS]]
    if len(parts) > MAX_PARTS:
        sentences.append(f"and {len(parts) - MAX_PARTS} more")
    whole = type(parts[0])("; ".join(sentences))
    whole._parts = parts
    return whole


class DocumentMalformedError(SearchSpaceError):
    """A document is not JSON or YAML, or its file cannot be read; the message states the line."""


class DocumentInvalidError(DocumentMalformedError):
    """A document is nested too deeply, or has a number or text that no field accepts."""


class LayoutInvalidError(SearchSpaceError):
    """A layout's own fields contradict each other or are out of range."""


class ModelShapeInvalidError(SearchSpaceError):
    """A model's shape is impossible, or its preset is unknown."""


class ClusterInvalidError(SearchSpaceError):
    """A cluster's description is impossible."""


class SiteInvalidError(SearchSpaceError):
    """The description of a Slurm site is impossible; the message names the field."""


class SpaceInvalidError(SearchSpaceError):
    """A search space names an unknown knob or gives a knob impossible values."""


class CampaignInvalidError(SearchSpaceError):
    """A campaign's description is malformed; the message names the field."""


class ObjectiveInvalidError(SearchSpaceError):
    """An objective is unknown, or cannot be used here."""


class NoLegalLayoutError(SearchSpaceError):
    """No combination of the space is legal; the message says which rule excluded how many."""


class ModelTooLargeError(SearchSpaceError):
    """Every legal layout needs far more memory than a device has."""


class TrainingJobInvalidError(SearchSpaceError):
    """The description of a training job is impossible, or the job would never end."""


class OutcomeInvalidError(SearchSpaceError):
    """A document is not a valid description of an outcome or a probe."""


class MeasuredConstantsInvalidError(SearchSpaceError):
    """A file of measured constants is invalid, or cannot be written."""


class ServiceNotFoundError(SearchSpaceError):
    """The address of the service or its token is not known; the message says what to name."""


class UrlInvalidError(ServiceNotFoundError):
    """The address of the service is not an HTTP address."""


class ServiceUnansweredError(LayoutTunerError):
    """The service did not answer a request."""

    def __init__(self, message: str, *, may_be_down: bool) -> None:
        super().__init__(message)
        self.may_be_down = may_be_down
        """Whether the service may not be running; False: the message states another cause."""


class TokenFileUnusableError(SearchSpaceError):
    """A token file cannot be read, or holds no token."""


class CertificateUnreadableError(SearchSpaceError):
    """The file of a service's certificate cannot be read, or holds no certificate."""


class TableInvalidError(SearchSpaceError):
    """A measurement table cannot be read, or contradicts itself; the message names the row."""
