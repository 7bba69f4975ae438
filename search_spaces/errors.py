"""Errors of the vocabulary room; one base, so that a caller can catch them all."""

from __future__ import annotations

from typing import Self


class SearchSpaceError(ValueError):
    """Base of everything that `search_spaces` raises about what a user wrote."""

    def __init__(self, problem: str, *, field: str = "") -> None:
        super().__init__(f"{field}: {problem}" if field else problem)
        self.problem = problem
        self.field = field
        """Where in the document the problem is, as "space.tp"; empty: the document as a whole."""

    def within(self, parent: str) -> Self:
        """The same error as seen from the document that holds this one in its field `parent`."""
        field = f"{parent}.{self.field}" if self.field else parent
        return type(self)(self.problem, field=field)


class LayoutInvalidError(SearchSpaceError):
    """A layout's own fields contradict each other or are out of range."""


class ModelShapeInvalidError(SearchSpaceError):
    """A model's shape is impossible, or its preset is unknown."""


class ClusterInvalidError(SearchSpaceError):
    """A cluster's description is impossible."""


class SpaceInvalidError(SearchSpaceError):
    """A search space names an unknown knob or gives a knob impossible values."""


class CampaignInvalidError(SearchSpaceError):
    """A campaign's description is malformed; the message names the field."""


class ObjectiveInvalidError(SearchSpaceError):
    """Nothing is judged by this name, or not in this place."""


class NoLegalLayoutError(SearchSpaceError):
    """No combination of the space is legal; the message says which rule excluded how many."""


class ModelTooLargeError(SearchSpaceError):
    """Every legal layout needs far more memory than a device has."""


class OutcomeInvalidError(SearchSpaceError):
    """A document that should describe an outcome or a probe does not."""


class MeasuredConstantsInvalidError(SearchSpaceError):
    """A file of measured constants holds something else, or cannot be written."""


class CertificateUnreadableError(SearchSpaceError):
    """The file of a service's certificate cannot be read, or holds none."""
