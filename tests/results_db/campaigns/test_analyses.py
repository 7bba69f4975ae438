"""A campaign's analysis: kept whole, in place of the one before."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy.exc import IntegrityError

from layout_tuner.results_db.records import Analysis, KnobStepRead
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.layouts.pipeline_layout import MAX_TEXT, layout_text
from tests.kit.store import START, TurnableClock, run_trial

pytestmark = pytest.mark.sqlite_is_enough


def make_step(**changes: Any) -> KnobStepRead:
    values: dict[str, Any] = {
        "knob": "tp",
        "direction": "up",
        "value": "1",
        "stepped_value": "2",
        "also": ("dp", "num_microbatches"),
        "layout_key": Layout(tp=2).key,
        "source": "predicted",
        "state": "completed",
        "effect": -0.1,
        "is_apart": None,
        "trial_id": None,
    }
    return KnobStepRead(**{**values, **changes})


def make_analysis(winner_id: int, **changes: Any) -> Analysis:
    values: dict[str, Any] = {
        "winner_id": winner_id,
        "objective": "tokens_per_s",
        "num_trials": 9,
        "last_ended_seq": 12,
        "method": "fANOVA",
        "importances": {"tp": 0.7, "micro_batch_size": 0.2, "pp": 0.1},
        "steps": (
            make_step(direction="down", stepped_value="1", state="out_of_memory", effect=None),
            make_step(source="measured", is_apart=True, trial_id=winner_id),
        ),
    }
    return Analysis(**{**values, **changes})


@pytest.mark.sqlite_is_enough(False)
def test_a_step_keeps_the_longest_text(store: Store, campaign: int) -> None:
    text = layout_text([9, *(10 + stage % 2 for stage in range(30)), 8])
    assert len(text) == MAX_TEXT - 1
    step = make_step(knob="pipeline_layout", value=text, stepped_value=text)
    analysis = make_analysis(run_trial(store, campaign), steps=(step,))
    store.reports.keep_analysis(campaign, analysis)
    kept = store.reports.analysis(campaign)
    assert kept is not None
    assert kept.steps == (step,)


@pytest.mark.sqlite_is_enough(False)
def test_a_younger_analysis_replaces_the_one_before(
    store: Store, clock: TurnableClock, campaign: int
) -> None:
    assert store.reports.analysis(campaign) is None
    winner = run_trial(store, campaign)
    analysis = make_analysis(winner)
    store.reports.keep_analysis(campaign, analysis)
    kept = store.reports.analysis(campaign)
    assert kept == replace(analysis, computed_at=START)
    assert list(kept.importances) == ["tp", "micro_batch_size", "pp"]
    clock.forward(60.0)
    younger = make_analysis(winner, importances={"pp": 1.0}, steps=(), num_trials=10)
    store.reports.keep_analysis(campaign, younger)
    assert store.reports.analysis(campaign) == replace(younger, computed_at=clock.now)


def test_a_prediction_claims_no_trial(store: Store, campaign: int) -> None:
    winner = run_trial(store, campaign)
    with pytest.raises(IntegrityError):
        store.reports.keep_analysis(
            campaign, make_analysis(winner, steps=(make_step(trial_id=winner),))
        )
    assert store.reports.analysis(campaign) is None
