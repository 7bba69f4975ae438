"""Errors of the search; one base, so that a caller can catch them all."""

from __future__ import annotations

from layout_tuner.errors import LayoutTunerError


class TunerError(LayoutTunerError):
    """Base of everything that `tuner` raises on purpose."""


class ProblemInvalidError(TunerError):
    """A search problem has an impossible value."""


class LayoutUnknownError(TunerError):
    """A layout is not in the campaign's legal set."""


class StrategyUnknownError(TunerError):
    """A campaign names a strategy that does not exist."""


class StrategyUnavailableError(TunerError):
    """A package that the strategy needs is not installed."""


class CampaignBrokenError(TunerError):
    """A campaign cannot go on: its description or its strategy failed; the cause is chained."""


class OpeningStuckError(TunerError):
    """A campaign's search was not opened in time."""


class ReplayFailedError(TunerError):
    """A replay cannot be run: no such cell, or the strategy failed; the cause is chained."""
