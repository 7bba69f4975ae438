"""Errors of the vocabulary room; one base, so that a caller can catch them all."""


class SearchSpaceError(ValueError):
    """Base of everything that `search_spaces` raises about what a user wrote."""


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


class NoLegalLayoutError(SearchSpaceError):
    """No combination of the space is legal; the message says which rule excluded how many."""


class ModelTooLargeError(SearchSpaceError):
    """Every legal layout needs far more memory than a device has."""


class OutcomeInvalidError(SearchSpaceError):
    """A document that should describe an outcome or a probe does not."""
