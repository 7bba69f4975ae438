"""Analyses: what a campaign's trials say about its knobs, kept for whoever asks."""

from __future__ import annotations

from typing import cast

from sqlalchemy import delete, select
from sqlalchemy.orm import selectinload

from results_db.analysis_tables import AnalysisRow, ImportanceRow, StepRow
from results_db.events import emit
from results_db.lifecycle import locked_campaign
from results_db.part import StorePart
from results_db.records import Analysis, KnobStep, StepDirection, StepSource, StepState


class Analyses(StorePart):
    """The analyses' part of the store."""

    def keep_analysis(self, campaign_id: int, analysis: Analysis) -> None:
        """Keeps an analysis in place of the campaign's earlier one."""
        with self._db.write() as session:
            locked_campaign(session, campaign_id)
            session.execute(delete(AnalysisRow).where(AnalysisRow.campaign_id == campaign_id))
            session.add(
                AnalysisRow(
                    campaign_id=campaign_id,
                    winner_id=analysis.winner_id,
                    objective=analysis.objective,
                    num_trials=analysis.num_trials,
                    last_ended_seq=analysis.last_ended_seq,
                    method=analysis.method,
                    computed_at=self._clock(),
                )
            )
            session.flush()
            session.add_all(
                ImportanceRow(campaign_id=campaign_id, knob=knob, importance=importance)
                for knob, importance in analysis.importances.items()
            )
            session.add_all(_step_row(campaign_id, step) for step in analysis.steps)
            emit(session, campaign_id, "campaign.analysed", now=self._clock())

    def analysis(self, campaign_id: int) -> Analysis | None:
        """The campaign's youngest analysis; None while there is none."""
        query = (
            select(AnalysisRow)
            .where(AnalysisRow.campaign_id == campaign_id)
            .options(selectinload(AnalysisRow.importances), selectinload(AnalysisRow.steps))
        )
        with self._db.read() as session:
            row = session.scalar(query)
            if row is None:
                return None
            return Analysis(
                winner_id=row.winner_id,
                objective=row.objective,
                num_trials=row.num_trials,
                last_ended_seq=row.last_ended_seq,
                method=row.method,
                importances={each.knob: each.importance for each in row.importances},
                steps=tuple(_step(each) for each in row.steps),
                computed_at=row.computed_at,
            )


def _step_row(campaign_id: int, step: KnobStep) -> StepRow:
    return StepRow(
        campaign_id=campaign_id,
        knob=step.knob,
        direction=step.direction,
        value=step.value,
        stepped_value=step.stepped_value,
        also=",".join(step.also),
        layout_key=step.layout_key,
        source=step.source,
        state=step.state,
        effect=step.effect,
        is_apart=step.is_apart,
        trial_id=step.trial_id,
    )


def _step(row: StepRow) -> KnobStep:
    return KnobStep(
        knob=row.knob,
        direction=cast("StepDirection", row.direction),
        value=row.value,
        stepped_value=row.stepped_value,
        also=tuple(filter(None, row.also.split(","))),
        layout_key=row.layout_key,
        source=cast("StepSource", row.source),
        state=cast("StepState", row.state),
        effect=row.effect,
        is_apart=row.is_apart,
        trial_id=row.trial_id,
    )
