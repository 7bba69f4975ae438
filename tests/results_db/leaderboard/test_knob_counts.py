from __future__ import annotations

from results_db.leaderboard.knob_counts import KnobCell
from results_db.store import Store
from search_spaces.spec.layout import Layout
from tests.kit.store import completed, failed, lease_one, make_campaign, make_worker

LAYOUTS = [
    (Layout(tp=1), 100.0),
    (Layout(tp=1, sequence_parallel=False, pp=2), 300.0),
    (Layout(tp=2, sequence_parallel=True), 200.0),
]


def test_cells_have_the_best_of_all_ranked_layouts(store: Store) -> None:
    campaign, worker = make_campaign(store), make_worker(store)
    assert store.knobs.cells(campaign, "tp") == []
    for layout, tokens_per_s in LAYOUTS:
        trial = store.trials.add(campaign, layout)
        attempt = lease_one(store, worker.id).attempt
        store.outcomes.post(trial.id, attempt, completed(layout, tokens_per_s=tokens_per_s))
    trial = store.trials.add(campaign, Layout(tp=4))
    store.outcomes.post(trial.id, lease_one(store, worker.id).attempt, failed())
    assert sorted(store.knobs.cells(campaign, "tp")) == [
        KnobCell((1,), 2, 150.0),
        KnobCell((2,), 1, 100.0),
    ]
    both = sorted(store.knobs.cells(campaign, "tp", "sequence_parallel"))
    assert both == [KnobCell((1, False), 2, 150.0), KnobCell((2, True), 1, 100.0)]
    assert [type(cell.values[1]) for cell in both] == [bool, bool]
