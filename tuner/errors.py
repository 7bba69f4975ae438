"""Errors of the search; one base, so that a caller can catch them all."""


class TunerError(Exception):
    """Base of everything that `tuner` raises on purpose."""


class ObservationInvalidError(TunerError):
    """An observation contradicts itself, or its objective cannot be ranked."""


class ProblemInvalidError(TunerError):
    """A search was described by values that cannot be."""


class LayoutUnknownError(TunerError):
    """A layout was told that the campaign's legal set does not hold."""


class StrategyUnknownError(TunerError):
    """A campaign names a strategy that does not exist."""


class CampaignBrokenError(TunerError):
    """A campaign cannot be driven: its description or its strategy failed; the cause is chained."""


class ScenarioUnknownError(TunerError):
    """A simulation is asked for by a name that no scenario has."""
