"""Several objectives at once, constraints, and who is ranked."""

from itertools import product
from typing import Any

import numpy as np
import pytest

from results_db.leaderboard.leaderboard_listing import LeaderboardListing
from results_db.store import Store
from search_spaces.spec.layout import Layout
from tests.kit.store import failed, front, make_spec, make_worker, ranked_trials, run_trial

pytestmark = pytest.mark.sqlite_is_enough

MEMORY = 1000


def make_campaign(store: Store, **changes: object) -> int:
    spec = make_spec() | changes
    spec["cluster"] |= {"num_nodes": 4, "device_memory_bytes": MEMORY}
    make_worker(store, num_nodes=4)
    return store.campaigns.create(spec, num_legal_layouts=100).id


def test_the_front_is_over_all_objectives_of_the_campaign(store: Store) -> None:
    objective = ["tokens_per_s", "memory_headroom"]
    campaign = make_campaign(store, objective=objective)
    points = {}
    for size, (speed, peak) in enumerate(product((1000.0, 2000.0, 3000.0), (300, 600, 900)), 1):
        layout = Layout(micro_batch_size=size)
        kept = peak if speed < 3000.0 else peak + 50
        points[run_trial(store, campaign, layout, tokens_per_s=speed, peak_memory_bytes=kept)] = (
            speed,
            1 - kept / MEMORY,
        )
    found = front(store, campaign)
    values = np.array(list(points.values()))
    expected = {
        trial
        for trial, point in points.items()
        if not ((values >= point).all(axis=1) & (values > point).any(axis=1)).any()
    }
    assert found == expected
    assert len(found) == 2
    listed = ranked_trials(store, campaign, "tokens_per_s", listing=LeaderboardListing(front=True))
    assert [trial.objective("tokens_per_s") for trial in listed] == [3000.0, 2000.0]
    shares = [trial.objective("memory_headroom", device_memory_bytes=MEMORY) for trial in listed]
    assert shares == [0.65, 0.7]


def test_node_hours_count_the_nodes_that_a_layout_holds(store: Store) -> None:
    campaign = make_campaign(store, objective=["tokens_per_s", "tokens_per_node_hour"])
    small = run_trial(store, campaign, Layout(tp=8), tokens_per_s=1000.0)
    large = run_trial(store, campaign, Layout(num_nodes=4, tp=8, dp=4), tokens_per_s=3000.0)
    worse = run_trial(store, campaign, Layout(num_nodes=3, tp=8, dp=3), tokens_per_s=900.0)
    assert front(store, campaign) == {small, large}
    by_cost = [trial.id for trial in ranked_trials(store, campaign, "tokens_per_node_hour")]
    assert by_cost == [small, large, worse]
    assert store.trials.get(small).objective("tokens_per_node_hour") == 3_600_000.0


def test_rates_on_the_front_are_those_at_the_median_step_time(store: Store) -> None:
    campaign = make_campaign(store, objective=["tokens_per_s", "memory_headroom"])
    for speed in (128.0, 42.0):
        run_trial(store, campaign, Layout(), tokens_per_s=speed, peak_memory_bytes=300)
    best = run_trial(store, campaign, Layout(tp=2), tokens_per_s=100.0, peak_memory_bytes=300)
    assert front(store, campaign) == {best}


def test_a_campaign_without_trials_has_an_empty_front(store: Store) -> None:
    campaign = make_campaign(store, objective=["tokens_per_s", "memory_headroom"])
    assert front(store, campaign) == frozenset()
    assert (
        ranked_trials(store, campaign, "tokens_per_s", listing=LeaderboardListing(front=True)) == []
    )


def test_a_trial_that_breaks_a_constraint_is_kept_and_counted_and_not_ranked(store: Store) -> None:
    campaign = make_campaign(
        store,
        objective=["tokens_per_s", "memory_headroom"],
        constraints={"memory_headroom": 0.1},
    )
    assert store.campaigns.get(campaign).max_peak_memory_bytes == 900
    tight = run_trial(store, campaign, Layout(), tokens_per_s=9000.0, peak_memory_bytes=901)
    just = run_trial(store, campaign, Layout(tp=2), tokens_per_s=10.0, peak_memory_bytes=900)
    assert [trial.id for trial in ranked_trials(store, campaign, "tokens_per_s")] == [just]
    assert counts(store, campaign) == (1, 1)
    assert front(store, campaign) == {just}
    kept = store.trials.get(tight)
    assert kept.state == "COMPLETED"
    assert kept.measurement is not None
    assert kept.measurement.peak_memory_bytes == 901


@pytest.mark.parametrize(
    ("constraints", "changes", "expected"),
    [
        # What never counts is not counted as constrained.
        ({"memory_headroom": 0.1}, {"oversubscribed": True, "peak_memory_bytes": 999}, (0, 0)),
        ({"memory_headroom": 0.1}, {"outcome": failed()}, (0, 0)),
        # Without constraints a device may be full.
        ({}, {"peak_memory_bytes": 5 << 30}, (1, 0)),
    ],
)
def test_only_completed_measurements_are_counted_as_constrained(
    store: Store, constraints: dict[str, float], changes: dict[str, Any], expected: tuple[int, int]
) -> None:
    campaign = make_campaign(store, constraints=constraints)
    run_trial(store, campaign, **changes)
    assert counts(store, campaign) == expected


def counts(store: Store, campaign: int) -> tuple[int, int]:
    """The ranked layouts, and the trials that a constraint leaves out."""
    constrained = store.leaderboard.page_of_layouts(campaign, limit=0).constrained
    return store.leaderboard.ranked_summary(campaign).num_ranked, constrained
