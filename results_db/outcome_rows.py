"""The rows that outcomes leave, collected and written a table at a time: few statements for many outcomes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from sqlalchemy.orm import Session

from results_db.base import Base
from results_db.many_rows import insert_many
from results_db.models import (
    BreakdownRow,
    EnvironmentRow,
    IterationRow,
    MeasurementRow,
    StageMemory,
    Trial,
    TrialLog,
)
from results_db.rows import environment_columns, measurement_columns
from search_spaces.outcome import Measurement, Outcome

_ORDER: Final[tuple[type[Base], ...]] = (
    TrialLog,
    EnvironmentRow,
    MeasurementRow,
    BreakdownRow,
    StageMemory,
    IterationRow,
)
"""What refers to another comes after it."""


@dataclass(slots=True)
class OutcomeRows:
    """Rows that are not written yet."""

    _rows: defaultdict[type[Base], list[dict[str, Any]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def keep(self, trial: Trial, outcome: Outcome, *, kin: int | None) -> None:
        """Keeps what an outcome says beyond the trial's own row.

        Args:
            trial: that ended with it.
            outcome: how.
            kin: of its measurement; None where it is to be compared yet.
        """
        of_trial = {"trial_id": trial.id}
        if outcome.log_tail:
            self._rows[TrialLog].append(of_trial | {"tail": outcome.log_tail})
        if outcome.environment is not None:
            self._rows[EnvironmentRow].append(of_trial | environment_columns(outcome.environment))
        if outcome.measurement is not None:
            trial.iterations_done = len(outcome.measurement.iterations)
            self._keep_measurement(trial, outcome.measurement, kin)

    def _keep_measurement(self, trial: Trial, measured: Measurement, kin: int | None) -> None:
        of_trial = {"trial_id": trial.id}
        self._rows[MeasurementRow].append(
            {**of_trial, "campaign_id": trial.campaign_id, "kin": kin}
            | measurement_columns(measured)
        )
        if measured.breakdown is not None:
            self._rows[BreakdownRow].append(of_trial | asdict(measured.breakdown))
        peaks = measured.peak_memory_bytes_by_stage
        reserved = measured.peak_reserved_bytes_by_stage or (None,) * len(peaks)
        self._rows[StageMemory] += [
            {**of_trial, "stage": stage, "peak_memory_bytes": peak, "peak_reserved_bytes": held}
            for stage, (peak, held) in enumerate(zip(peaks, reserved, strict=True))
        ]
        self._rows[IterationRow] += [
            {
                **of_trial,
                "index": iteration.index,
                "kind": iteration.kind,
                "step_time_s": iteration.step_time_s,
                "loss": iteration.loss,
                "grad_norm": iteration.grad_norm,
            }
            for iteration in measured.iterations
        ]

    def write(self, session: Session) -> None:
        """Writes them; the trials' own rows come first, which says what they are of."""
        session.flush()
        for kind in _ORDER:
            insert_many(session, kind, self._rows.pop(kind, []))
