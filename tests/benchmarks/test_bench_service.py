"""The benchmark of the service in small: it runs, and what it says is what the database holds."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks.service.load_watchers import Heard
from benchmarks.service.load_workers import Told
from benchmarks.service.made_outcome import completed_outcome
from benchmarks.service.service_load import Load, load_figures, percentile, put_load_on
from benchmarks.workers.outcome_check import OutcomeFaults, check_outcomes, missed_events
from results_db.store import Store
from search_spaces.protocol.outcome import Outcome, ProbeRequest
from search_spaces.spec.layout import Layout
from search_spaces.spec.presets.models import resolve_model
from tests.kit.postgres import upgraded
from tests.kit.store import lease_one, make_campaign, make_worker, post_outcome

LAYOUT = Layout(num_microbatches=8, pp=2)
REQUEST = ProbeRequest(model=resolve_model("tiny"), layout=LAYOUT).to_mapping()


def make_load(**changes: object) -> Load:
    told = Told(
        first_s=1.0, last_s=2.0, posted=dict.fromkeys(range(301), 1.0), lease_s=[0.01] * 300
    )
    told.outcome_s = [0.02] * 300
    values = {
        "told": told,
        "heard": [Heard(campaign=1, after=0, seqs=[1, 2], kinds=["a", "b"], late_s=[0.2, 0.3])],
        "faults": OutcomeFaults(lost=0, twice=0),
        "missed": 0,
        "memory_bytes": [120_000_000],
        "cpu_s": {"api": 1.0},
    }
    return Load(**{**values, **changes})  # type: ignore[arg-type]


def test_a_made_outcome_is_a_whole_one() -> None:
    outcome = Outcome.from_mapping(completed_outcome(REQUEST, random.Random(1)))
    measured = outcome.measurement
    assert measured is not None
    assert [iteration.kind for iteration in measured.iterations].count("timed") == 10
    assert len(measured.peak_memory_bytes_by_stage) == 2
    assert len(outcome.log_tail.splitlines()) == 50


def test_a_load_that_lost_or_missed_anything_misses_what_is_asked() -> None:
    assert all(figure.reached is not False for figure in load_figures(make_load()))
    slow = Heard(campaign=1, after=0, seqs=[1], kinds=["a"], late_s=[1.5])
    for what, wrong in (
        ("faults", OutcomeFaults(lost=1, twice=0)),
        ("faults", OutcomeFaults(lost=0, twice=1)),
        ("missed", 1),
        ("memory_bytes", [160_000_000]),
        ("heard", [slow]),
    ):
        figures = load_figures(make_load(**{what: wrong}))
        assert [figure.reached for figure in figures].count(False) == 1, what


def test_an_outcome_that_is_not_in_the_database_as_it_was_posted_is_lost(tmp_path: Path) -> None:
    with closing(Store.open(upgraded(tmp_path))) as store:
        campaign = make_campaign(store)
        trial = store.trials.add(campaign, LAYOUT)
        lease_one(store, make_worker(store).id)
        document = completed_outcome(REQUEST, random.Random(1))
        post_outcome(store, trial.id, 1, Outcome.from_mapping(document))
        posted = document["measurement"]["tokens_per_s"]
        assert check_outcomes(store, {trial.id: posted}) == OutcomeFaults(lost=0, twice=0)
        assert check_outcomes(store, {trial.id: posted + 1}).lost == 1
        assert check_outcomes(store, {trial.id: posted, 99: 1.0}).lost == 1
        assert check_outcomes(store, {}).lost == 1


def test_a_watcher_that_did_not_hear_each_event_once_and_in_order_missed_some(
    tmp_path: Path,
) -> None:
    with closing(Store.open(upgraded(tmp_path))) as store:
        campaign = make_campaign(store)
        store.campaigns.pause(campaign)
        store.campaigns.resume(campaign)

        def missed(after: int, seqs: list[int]) -> int:
            return missed_events(store, [Heard(campaign=campaign, after=after, seqs=seqs)])

        assert missed(0, [1, 2, 3]) == 0
        assert missed(1, [2, 3]) == 0
        assert missed(0, [1, 3]) == 1
        assert missed(0, [2, 1, 3]) == 1
        assert missed(0, [1, 2, 2, 3]) == 1
        assert missed(-1, []) == 3


def test_percentiles_are_values_that_were_measured() -> None:
    assert percentile([5.0, 1.0], 99) == 5.0
    assert percentile([float(i) for i in range(1000)], 99) == 990.0


@pytest.mark.slow
def test_a_small_load_loses_nothing(tmp_path: Path) -> None:
    load = put_load_on(tmp_path, 2, num_campaigns=4, num_workers=8, num_watchers=8, num_api=2)
    assert len(load.told.posted) == 8
    assert load.told.refused == []
    assert load.faults == OutcomeFaults(lost=0, twice=0)
    assert load.missed == 0
    assert sum(len(one.seqs) for one in load.heard) == 32
