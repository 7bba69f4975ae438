"""What contradicts an outcome: its lease, its campaign and the service's clock.

An outcome itself refuses, when it is made, figures that contradict each other. A refusal is a
MeasurementInvalidError with the figure and what contradicts it.
"""

from __future__ import annotations

import math
from datetime import datetime
from typing import Final

from layout_tuner.errors import OutcomeInvalidError
from layout_tuner.protocol.measurement import FIGURE_TOLERANCE, Measurement
from layout_tuner.protocol.measurement_checks import refuse_contradictions
from layout_tuner.protocol.worker_messages import OutcomeReport
from layout_tuner.results_db.errors import MeasurementInvalidError
from layout_tuner.results_db.models.tables import Attempt, Campaign, Trial
from layout_tuner.results_db.rows import trial_layout
from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec
from layout_tuner.search_spaces.campaigns.stored_campaign import Damaged
from layout_tuner.trainers.embedded import EMBEDDED_TRAINER
from layout_tuner.trainers.simulator import is_simulator

CLOCK_MARGIN_S: Final = 30.0
"""How much longer than its lease a probe may seem to have taken: the service's clock may have been
set back meanwhile. The campaign is never charged for these seconds."""

_ROUNDING: Final = 1 + FIGURE_TOLERANCE


def longest_s(attempt: Attempt, now: datetime, *, is_simulated: bool) -> float:
    """The most seconds that an attempt may have held its nodes: simulated ones have no limit.

    0 where the clock was set back to before the lease.
    """
    return math.inf if is_simulated else max((now - attempt.started_at).total_seconds(), 0.0)


def refuse_other_lease(
    report: OutcomeReport, campaign: Campaign, trial: Trial, attempt: Attempt, now: datetime
) -> None:
    """Refuses an outcome that took longer than its lease, or held other nodes than its layout."""
    measured, nodes = report.outcome.measurement, report.nodes_held
    duration_s = report.outcome.duration_s
    passed_s = longest_s(attempt, now, is_simulated=is_simulator(campaign.trainer))
    timed_s = sum(each.step_time_s for each in measured.iterations) if measured else 0.0
    iterations_s = duration_s if report.iterations_s is None else report.iterations_s
    is_counted = measured is not None and measured.trainer == EMBEDDED_TRAINER
    least_s = min(timed_s, duration_s) if is_counted else 0.0
    # A probe on one node may share it.
    least_nodes = trial.num_nodes if trial.num_nodes > 1 else 0
    for holds, problem in (
        (
            duration_s <= passed_s + CLOCK_MARGIN_S or now < attempt.started_at,
            f"duration_s={duration_s:g}, and {passed_s:.3f} s have passed since the trial was leased",
        ),
        (
            least_s <= iterations_s * _ROUNDING and iterations_s <= duration_s * _ROUNDING,
            f"iterations_s={iterations_s:g}, for iterations of {timed_s:g} s in "
            f"duration_s={duration_s:g}",
        ),
        (
            nodes is None or least_nodes / _ROUNDING <= nodes <= trial.num_nodes * _ROUNDING,
            f"nodes_held={nodes}, and the layout is on num_nodes={trial.num_nodes}",
        ),
    ):
        if not holds:
            raise MeasurementInvalidError(f"the outcome has {problem}")


def refuse_other_probe(
    measured: Measurement, campaign: Campaign, trial: Trial, spec: CampaignSpec | Damaged
) -> None:
    """Refuses a measurement that is not of the trial's probe.

    Of a campaign whose description is damaged, only the trainer is compared.
    """
    if measured.trainer != campaign.trainer:
        raise MeasurementInvalidError(
            f"the measurement was made by trainer {measured.trainer!r}; campaign {campaign.name!r} "
            f"measures with {campaign.trainer!r}"
        )
    if isinstance(spec, Damaged):
        return
    layout, num_layers, is_repeat = trial_layout(trial), trial.num_layers, trial.repeat_of
    try:
        refuse_contradictions(
            measured,
            spec.probe_request(layout, num_layers=num_layers),
            device_memory_bytes=spec.cluster.device_memory_bytes,
            may_be_shortened=spec.stops_early(layout, is_repeat is not None, num_layers),
        )
    except OutcomeInvalidError as error:
        raise MeasurementInvalidError(f"the measurement of {layout.key}: {error}") from error
