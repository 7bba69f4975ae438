from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from results_db.records import TrialRecord
from results_db.store import Store
from results_db.trials import pages as pages_module
from results_db.trials.filter import TrialFilter
from results_db.trials.sort_order import SORT_KEYS, PageEnd, SortKey, TrialOrder
from search_spaces.protocol.metrics import METRICS
from search_spaces.spec.layout import PRECISIONS, RECOMPUTE_MODES, Layout
from tests.kit.store import (
    completed,
    failed,
    lease_one,
    make_campaign,
    make_worker,
    post_outcome,
    take_leases,
)

LAYOUTS = (
    Layout(),
    Layout(tp=2, recompute="full", precision="bf16"),
    Layout(pp=2, recompute="selective", zero_stage=1, precision="fp16"),
    Layout(dp=2, num_nodes=2, vpp=2, zero_stage=1, zero_replicas=2, sequence_parallel=True, tp=2),
    Layout(micro_batch_size=2, sequence_parallel=True),
    Layout(num_microbatches=2),
)
TOKENS_PER_S = (300.0, 100.0, 200.0, 100.0)


def run(store: Store, worker_id: str, layout: Layout, tokens_per_s: float) -> int:
    lease = lease_one(store, worker_id)
    # Losses that agree, and shares of the peak that go with the rate.
    shares = {"mfu": tokens_per_s / 1000}
    memory = {"peak_memory_bytes": int(1e9 - tokens_per_s)}
    outcome = completed(layout, tokens_per_s=tokens_per_s, **shares, **memory)
    post_outcome(store, lease.trial_id, lease.attempt, outcome)
    return lease.trial_id


@pytest.fixture
def campaign(store: Store) -> int:
    """Four trials measured (two alike), one failed, one that waits."""
    campaign = make_campaign(store)
    worker = make_worker(store, num_nodes=2)
    for layout, tokens_per_s in zip(LAYOUTS, TOKENS_PER_S, strict=False):
        store.trials.add(campaign, layout)
        run(store, worker.id, layout, tokens_per_s)
    store.trials.add(campaign, LAYOUTS[4])
    lease = lease_one(store, worker.id)
    post_outcome(store, lease.trial_id, lease.attempt, failed("crashed"))
    store.trials.add(campaign, LAYOUTS[5])
    return campaign


def pages(
    store: Store,
    campaign: int,
    limit: int,
    *,
    wanted: TrialFilter | None = None,
    order: TrialOrder,
    after: PageEnd | None = None,
) -> Iterator[tuple[TrialRecord, ...]]:
    while True:
        page = store.trial_pages.page(
            campaign, wanted=wanted or TrialFilter(), order=order, after=after, limit=limit
        )
        yield page.trials
        after = page.end
        if after is None:
            return


def numbers(store: Store, campaign: int, limit: int, **how: Any) -> list[int]:
    return [trial.number for page in pages(store, campaign, limit, **how) for trial in page]


def value_of(trial: TrialRecord, key: SortKey) -> Any:
    """What Python would sort by."""
    if key == "ended_at":
        return trial.ended_seq
    if key in METRICS or key == "node_seconds":
        if trial.ended_seq is None:
            return None
        if key == "tokens_per_node_hour":
            return trial.objective(key)
        holder: Any = trial if key == "node_seconds" else trial.measurement
        return None if holder is None else getattr(holder, key)
    words: dict[str, tuple[str, ...]] = {"recompute": RECOMPUTE_MODES, "precision": PRECISIONS}
    holder = trial if key == "number" else trial.layout
    value = getattr(holder, key)
    return words[key].index(value) if key in words else value


def in_order(trials: list[TrialRecord], order: TrialOrder) -> list[int]:
    """The numbers as the list must have them."""
    valued = [trial for trial in trials if value_of(trial, order.key) is not None]
    valued.sort(key=lambda trial: trial.id)
    sign = -1 if order.descending else 1
    valued.sort(key=lambda trial: sign * value_of(trial, order.key))
    rest = [trial for trial in trials if value_of(trial, order.key) is None]
    return [trial.number for trial in [*valued, *sorted(rest, key=lambda trial: trial.id)]]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("key", SORT_KEYS)
def test_every_key_sorts_both_ways_with_ties_by_age_and_the_valueless_last(
    store: Store, campaign: int, key: SortKey
) -> None:
    trials = store.trials.find(campaign)
    for descending in (False, True):
        order = TrialOrder(key=key, descending=descending)
        right = in_order(trials, order)
        assert sorted(right) == [1, 2, 3, 4, 5, 6]
        for limit in (1, 2, 4, 6, 7):
            assert numbers(store, campaign, limit, order=order) == right, (limit, descending)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("key", SORT_KEYS)
def test_pages_are_the_same_backwards(store: Store, campaign: int, key: SortKey) -> None:
    for descending, limit in product((False, True), (1, 2, 4)):
        order = TrialOrder(key=key, descending=descending)
        forward = [store.trial_pages.page(campaign, order=order, limit=limit)]
        while (end := forward[-1].end) is not None:
            forward.append(store.trial_pages.page(campaign, order=order, limit=limit, after=end))
        # What ends meanwhile changes no page of this list.
        backward = [forward[-1]]
        while (start := backward[-1].start) is not None:
            backward.append(
                store.trial_pages.page(campaign, order=order, limit=limit, before=start)
            )
        assert len(backward) == len(forward) == -(-6 // limit)
        for there, back in zip(forward[-2::-1], backward[1:], strict=True):
            assert [each.number for each in back.trials] == [each.number for each in there.trials]
            assert back.end == there.end
        assert forward[0].start is None


def test_a_page_before_another_is_of_the_same_moment(store: Store, campaign: int) -> None:
    """A trial that ends between two pages stays where the list of the first page had it."""
    by_rate = TrialOrder(key="tokens_per_s", descending=True)
    first = store.trial_pages.page(campaign, order=by_rate, limit=2)
    second = store.trial_pages.page(campaign, order=by_rate, limit=2, after=first.end)
    run(store, store.workers.find()[0].id, LAYOUTS[5], tokens_per_s=900.0)
    last = store.trial_pages.page(campaign, order=by_rate, limit=2, after=second.end)
    assert [trial.number for trial in last.trials] == [5, 6]
    again = store.trial_pages.page(campaign, order=by_rate, limit=2, before=last.start)
    assert [trial.number for trial in again.trials] == [2, 4]
    again = store.trial_pages.page(campaign, order=by_rate, limit=2, before=again.start)
    assert [trial.number for trial in again.trials] == [1, 3]
    assert again.start is None


def test_trials_of_a_list_are_counted_up_to_a_bound(
    store: Store, campaign: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = TrialFilter(min_tokens_per_s=150.0)
    assert store.trial_pages.count(campaign) == (6, True)
    assert store.trial_pages.count(campaign, wanted=fast) == (2, True)
    assert store.trial_pages.count(campaign, wanted=TrialFilter(states=("PENDING",))) == (1, True)
    assert store.trial_pages.count(campaign + 1) == (0, True)
    run(store, store.workers.find()[0].id, LAYOUTS[5], tokens_per_s=900.0)
    assert store.trial_pages.count(campaign, wanted=fast) == (3, True)
    for bound, expected in ((7, (6, True)), (6, (6, True)), (5, (5, False))):
        monkeypatch.setattr(pages_module, "MAX_COUNTED", bound)
        assert store.trial_pages.count(campaign) == expected


def test_a_page_has_no_next_when_nothing_is_left(store: Store, campaign: int) -> None:
    by_rate = TrialOrder(key="tokens_per_s", descending=True)
    assert [len(page) for page in pages(store, campaign, 3, order=by_rate)] == [3, 3]
    assert [len(page) for page in pages(store, campaign, 4, order=by_rate)] == [4, 2]
    assert [len(page) for page in pages(store, campaign, 4, order=TrialOrder())] == [4, 2]
    nobody = TrialFilter(tp=(64,))
    assert store.trial_pages.page(campaign, wanted=nobody, limit=4).end is None
    assert store.trial_pages.page(campaign + 1, limit=4).trials == ()


def test_filters_hold_in_both_parts_of_a_list(store: Store, campaign: int) -> None:
    by_rate = TrialOrder(key="tokens_per_s", descending=True)
    few = {"limit": 1, "order": by_rate}
    one_device = TrialFilter(num_devices=(1,))
    assert numbers(store, campaign, wanted=one_device, **few) == [1, 5, 6]
    fast = TrialFilter(min_tokens_per_s=150.0)
    assert numbers(store, campaign, wanted=fast, **few) == [1, 3]
    by_memory = TrialOrder(key="peak_memory_bytes")
    assert numbers(store, campaign, 1, wanted=fast, order=by_memory) == [1, 3]
    assert numbers(store, campaign, 1, wanted=fast, order=TrialOrder(key="tp")) == [1, 3]
    assert numbers(store, campaign, 2, wanted=TrialFilter(states=("FAILED",)), order=by_rate) == [5]


def test_a_trial_that_ends_between_two_pages_is_not_missed(store: Store, campaign: int) -> None:
    """It had no value when the list began, and its value is before the end of the first page."""
    by_rate = TrialOrder(key="tokens_per_s", descending=True)
    reading = pages(store, campaign, 2, order=by_rate)
    first = next(reading)
    assert [trial.number for trial in first] == [1, 3]
    worker = store.workers.find()[0]
    run(store, worker.id, LAYOUTS[5], tokens_per_s=900.0)
    rest = [trial.number for page in reading for trial in page]
    assert rest == [2, 4, 5, 6]
    assert numbers(store, campaign, 2, order=by_rate) == [6, 1, 3, 2, 4, 5], "a new list knows"


ADDED = (Layout(tp=4), Layout(tp=8), Layout(pp=4), Layout(pp=8), Layout(dp=4), Layout(dp=8))


@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    key=st.sampled_from(SORT_KEYS),
    descending=st.booleans(),
    limit=st.integers(1, 4),
    happenings=st.lists(st.sampled_from(["added", "measured", "failed"]), max_size=5),
)
def test_whatever_happens_between_pages_each_trial_that_was_there_comes_once(
    store: Store, key: SortKey, descending: bool, limit: int, happenings: list[str]
) -> None:
    name = f"c{len(store.campaigns.find())}"
    campaign = make_campaign(store, name, cluster=name)
    worker = make_worker(store, name, cluster=name, num_nodes=2)
    for layout, rate in zip(LAYOUTS, (*TOKENS_PER_S, None, None), strict=True):
        store.trials.add(campaign, layout)
        if rate is not None:
            run(store, worker.id, layout, rate)
    there = {trial.number for trial in store.trials.find(campaign)}
    left, new = iter(happenings), iter(ADDED)
    listed: list[int] = []
    for page in pages(store, campaign, limit, order=TrialOrder(key=key, descending=descending)):
        listed += [trial.number for trial in page]
        happening = next(left, None)
        if happening == "added":
            store.trials.add(campaign, next(new))
        elif happening is not None and store.trials.count_open(campaign):
            (lease,) = take_leases(store, worker.id, 1)
            rate = 50.0 * (1 + len(listed))
            outcome = (
                completed(lease.layout, tokens_per_s=rate)
                if happening == "measured"
                else failed("crashed")
            )
            post_outcome(store, lease.trial_id, lease.attempt, outcome)
    assert len(listed) == len(set(listed)), "none twice"
    assert there <= set(listed), "none missed"
