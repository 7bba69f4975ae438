"""Errors of replays."""

from __future__ import annotations

from tuner.errors import TunerError


class ReplayFailedError(TunerError):
    """A replay cannot be run: no such cell, or the strategy failed; the cause is chained."""
