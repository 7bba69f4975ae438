"""Whether a measurement is disturbed, and whether a layout is, wherever the store says so."""

from __future__ import annotations

from sqlalchemy import select

from layout_tuner.results_db.models.tables import MeasurementRow
from layout_tuner.results_db.store import Store
from layout_tuner.results_db.trials.filter_sql import IS_DISTURBED
from tests.kit.disturbances import LAYOUTS, RUNS
from tests.kit.store import make_campaign, run_trial


def test_statement_record_plot_and_leaderboard_agree_on_every_case(
    store: Store, campaign: int
) -> None:
    expected = {
        run_trial(store, campaign, layout, **figures): is_disturbed
        for layout, (runs, _) in zip(LAYOUTS, RUNS, strict=True)
        for figures, is_disturbed in runs
    }
    of_records = {
        trial.id: trial.measurement.is_disturbed
        for trial in store.trials.find(campaign)
        if trial.measurement is not None
    }
    with store._db.read() as session:
        of_database = dict(session.execute(select(MeasurementRow.trial_id, IS_DISTURBED)).all())
        quiet = set(session.scalars(select(MeasurementRow.trial_id).where(~IS_DISTURBED)))
    assert of_records == expected
    assert {id_: bool(value) for id_, value in of_database.items()} == expected
    assert quiet == {id_ for id_, is_disturbed in expected.items() if not is_disturbed}
    assert store.plot_data.disturbed_ids(campaign) == set(expected) - quiet
    ranked = store.leaderboard.ranked_layouts(campaign)
    assert {each.trial.layout: each.disturbed for each in ranked} == {
        layout: is_disturbed for layout, (_, is_disturbed) in zip(LAYOUTS, RUNS, strict=True)
    }
    for each in ranked:
        assert {expected[id_] for id_ in each.trial_ids} == {each.disturbed}, "as its trials are"


def test_a_campaigns_winner_is_disturbed_as_its_layout_is(store: Store) -> None:
    expected = {}
    for number, (runs, is_disturbed) in enumerate(RUNS[::5]):
        campaign = make_campaign(store, f"campaign-{number}")
        for figures, _ in runs:
            run_trial(store, campaign, **figures)
        expected[campaign] = is_disturbed
    found = store.leaderboard.winners(expected)
    assert {id_: winner.disturbed for id_, winner in found.items()} == expected
    for id_, is_disturbed in expected.items():
        winner = store.leaderboard.winner(id_)
        assert winner is not None
        assert winner.disturbed is is_disturbed
