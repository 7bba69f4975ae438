"""The prediction that a search made of a layout when it proposed it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal, Self, get_args

PredictionSource = Literal["estimates", "calibrated"]
"""estimates: the closed forms alone. calibrated: corrected by measurements of this campaign or of
others."""

PREDICTION_SOURCES: Final[tuple[PredictionSource, ...]] = get_args(PredictionSource)

_MOST_LOG_S: Final = 690.0
"""Largest logarithm of a step time: its exponential is just below the database's bound of 1e300."""
_MOST_BYTES: Final = 1 << 62
"""Largest peak that the database keeps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """The predicted step time and memory of a layout, as of its proposal."""

    step_time_s: float
    """Predicted median of the step time, in seconds."""
    log_step_time_sd: float
    """Standard deviation of the logarithm of the step time."""
    peak_memory_bytes: int
    """Predicted peak of the fullest device."""
    fit_probability: float
    """Probability that the layout runs within the allowed memory."""
    source: PredictionSource
    """Whether measurements had corrected the estimates."""

    @classmethod
    def of(
        cls,
        *,
        log_step_time: float,
        log_step_time_sd: float,
        peak_memory_bytes: float,
        fit_probability: float,
        source: PredictionSource,
    ) -> Self:
        """A prediction from the mean of the logarithm of the step time in seconds.

        Figures beyond what the database keeps are set to the largest that it keeps: estimates of
        absurd layouts may be arbitrarily large.
        """
        return cls(
            step_time_s=math.exp(min(max(log_step_time, -_MOST_LOG_S), _MOST_LOG_S)),
            log_step_time_sd=log_step_time_sd,
            peak_memory_bytes=int(min(peak_memory_bytes, _MOST_BYTES)),
            fit_probability=min(max(fit_probability, 0.0), 1.0),
            source=source,
        )
