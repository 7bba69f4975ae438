"""Pages of the leaderboard as plain values say what the records say, on every database."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from results_db.errors import CampaignNotFoundError, ValueUnstorableError
from results_db.leaderboard.ranked_layout import WHOLE, LeaderboardQuery, RankedLayout
from results_db.store import Store
from results_db.trials.filter import TrialFilter
from search_spaces.spec.layout import Layout
from tests.results_db.factories import completed, lease_one, make_spec, make_worker

LAYOUTS = [
    Layout(pp=pp, num_microbatches=8, micro_batch_size=size) for pp in (1, 2) for size in (1, 2)
]


@pytest.fixture
def measured(store: Store) -> Store:
    """Four layouts of one stage and of two, the first of which was measured three times."""
    spec = make_spec(objective=["tokens_per_s", "tokens_per_node_hour"])
    store.create_campaign(spec, num_legal_layouts=9)
    worker = make_worker(store)
    for speed, layout in enumerate(LAYOUTS):
        store.add_trial(1, layout)
        _measure(store, worker.id, 1000.0 + speed)
    for speed in (1002.0, 1050.0):
        store.repeat_trial(1)
        _measure(store, worker.id, speed)
    return store


def _measure(store: Store, worker_id: str, tokens_per_s: float) -> None:
    lease = lease_one(store, worker_id)
    outcome = completed(
        lease.layout,
        tokens_per_s=tokens_per_s,
        peak_reserved_bytes_by_stage=(6 << 30,) * lease.layout.pp,
    )
    store.post_outcome(lease.trial_id, lease.attempt, outcome)


def as_document(standing: RankedLayout) -> dict[str, Any]:
    """The fields that a record of the store has under the same names."""
    trial = asdict(standing.trial)
    for name in ("peak_memory_bytes_by_stage", "peak_reserved_bytes_by_stage"):
        trial["measurement"][name] = list(trial["measurement"][name])
    trial["cost"]["total"] = standing.trial.cost.total
    return {
        **trial,
        "num_devices": standing.trial.layout.num_devices,
        "value": standing.value,
        "value_low": standing.low,
        "value_high": standing.high,
        "step_time_s": standing.step_time_s,
        "num_runs": standing.num_runs,
        "tied_with_first": standing.is_tied,
    }


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("objective", "listing", "offset"),
    [
        (None, WHOLE, 0),
        (None, WHOLE, 1),
        ("tokens_per_s_per_device", WHOLE, 0),
        (None, LeaderboardQuery(wanted=TrialFilter(pp=(2,))), 0),
        (None, LeaderboardQuery(within_percent=3.0), 0),
    ],
)
def test_a_page_says_what_the_records_say(
    measured: Store, objective: str | None, listing: LeaderboardQuery, offset: int
) -> None:
    page = measured.page_of_layouts("first", objective, listing=listing, limit=3, offset=offset)
    found = measured.ranked_layouts(
        1, objective or "tokens_per_s", listing=listing, limit=3, offset=offset
    )
    assert len(page.layouts) >= 2
    for layout, expected in zip(page.layouts, map(as_document, found), strict=True):
        assert layout | {name: expected[name] for name in layout.keys() & expected.keys()} == layout
    assert page.objective == (objective or "tokens_per_s")
    assert page.objectives == ("tokens_per_s", "tokens_per_node_hour")


def test_a_campaign_is_found_by_its_id_too(measured: Store) -> None:
    assert measured.page_of_layouts(1, limit=2) == measured.page_of_layouts("first", limit=2)


def test_who_knows_the_mark_ends_the_reading(measured: Store) -> None:
    def know(mark: str) -> None:
        assert mark == measured.page_version(1)
        raise LookupError(mark)

    with pytest.raises(LookupError):
        measured.page_of_layouts("first", check_version=know, limit=2)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("nothing", ["second", 2, 2**31 - 1, "x" * 300])
def test_a_campaign_that_is_not_there_has_no_page(measured: Store, nothing: int | str) -> None:
    with pytest.raises(CampaignNotFoundError, match=str(nothing)):
        measured.page_of_layouts(nothing, limit=2)


@pytest.mark.parametrize("unstorable", ["a\0", 2**31])
def test_what_no_database_can_keep_is_refused_before_it_is_asked(
    measured: Store, unstorable: int | str
) -> None:
    with pytest.raises(ValueUnstorableError):
        measured.page_of_layouts(unstorable, limit=2)
