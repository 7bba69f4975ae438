"""Pages of trials: every order, there and back, what happens meanwhile, and every filter."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from itertools import cycle, product
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import select

from layout_tuner.protocol.metrics import METRICS
from layout_tuner.results_db.errors import TrialFilterInvalidError
from layout_tuner.results_db.models.tables import MeasurementRow, Trial
from layout_tuner.results_db.records import TrialRecord
from layout_tuner.results_db.store import Store
from layout_tuner.results_db.trials import pages as pages_module
from layout_tuner.results_db.trials.filter import (
    KNOB_FIELDS,
    SORT_KEYS,
    LeaderboardListing,
    SortKey,
    TrialFilter,
    TrialOrder,
)
from layout_tuner.results_db.trials.filter_sql import conditions
from layout_tuner.search_spaces.layouts.job_settings import JobSettings
from layout_tuner.search_spaces.layouts.layout import LAYOUT_FIELDS, PRECISIONS, Layout
from layout_tuner.search_spaces.layouts.recomputation import RECOMPUTE_MODES
from tests.kit.store import (
    JOB_KNOBS,
    ODD,
    completed,
    failed,
    lease_one,
    make_campaign,
    make_worker,
    post_outcome,
    run_trial,
)

pytestmark = pytest.mark.sqlite_is_enough

LAYOUTS = (
    Layout(),
    Layout(tp=2, recompute="full", precision="bf16"),
    Layout(pp=2, recompute="selective", zero_stage=1, precision="fp16"),
    Layout(dp=2, num_nodes=2, vpp=2, zero_stage=1, zero_replicas=2, sequence_parallel=True, tp=2),
    Layout(micro_batch_size=2, sequence_parallel=True, job=JobSettings({"attention": "math"})),
    Layout(num_microbatches=2, job=JobSettings({"compile": True, "bucket": 4})),
)
JOB_KEYS = tuple(f"job.{name}" for name in JOB_KNOBS)
TOKENS_PER_S = (300.0, 100.0, 200.0, 100.0)
BY_RATE = TrialOrder(key="tokens_per_s", descending=True)


def run(store: Store, worker_id: str, tokens_per_s: float) -> None:
    """Runs the oldest trial that waits; shares of the peak go with the rate."""
    lease = lease_one(store, worker_id)
    figures = {"mfu": tokens_per_s / 1000, "peak_memory_bytes": int(1e9 - tokens_per_s)}
    outcome = completed(lease.layout, tokens_per_s=tokens_per_s, **figures)
    post_outcome(store, lease.trial_id, lease.attempt, outcome)


def fill(store: Store, name: str = "first") -> tuple[int, str]:
    """A campaign with four trials measured (two alike) and two that wait, and its worker."""
    campaign = make_campaign(store, name, cluster=name, space={"job": JOB_KNOBS})
    worker = make_worker(store, name, cluster=name, num_nodes=2).id
    for layout, tokens_per_s in zip(LAYOUTS, (*TOKENS_PER_S, None, None), strict=True):
        store.trials.add(campaign, layout)
        if tokens_per_s is not None:
            run(store, worker, tokens_per_s)
    return campaign, worker


@pytest.fixture
def campaign(store: Store) -> int:
    """Four trials measured (two alike), one failed, one that waits."""
    campaign, worker = fill(store)
    post_outcome(store, lease_one(store, worker).trial_id, 1, failed("crashed"))
    return campaign


def pages(store: Store, campaign: int, limit: int, **how: Any) -> Iterator[Any]:
    """The pages of a list, each asked for when the one before was read."""
    page = store.trial_pages.page(campaign, limit=limit, **how)
    yield page
    while page.end is not None:
        page = store.trial_pages.page(campaign, limit=limit, after=page.end, **how)
        yield page


def pages_back(store: Store, campaign: int, limit: int, last: Any, **how: Any) -> Iterator[Any]:
    """The pages before the last one of a list, from the last but one to the first."""
    while last.start is not None:
        last = store.trial_pages.page(campaign, limit=limit, before=last.start, **how)
        yield last


def shown(page: Any) -> list[int]:
    return [trial.number for trial in page.trials]


def numbers(store: Store, campaign: int, limit: int, **how: Any) -> list[int]:
    return [number for page in pages(store, campaign, limit, **how) for number in shown(page)]


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
    if key in JOB_KEYS:
        knob = JOB_KNOBS[key.removeprefix("job.")]
        value = trial.layout.job.get(key.removeprefix("job."), knob["default"])
        return knob["values"].index(value) if isinstance(value, str) else int(value)
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


def test_every_key_sorts_both_ways_and_pages_go_there_and_back(store: Store, campaign: int) -> None:
    trials = store.trials.find(campaign)
    # Each key with two of the limits, each limit with both directions.
    orders = zip(product((*SORT_KEYS, *JOB_KEYS), (False, True)), cycle((1, 2, 4)), strict=False)
    for (key, descending), limit in orders:
        order = TrialOrder(key=key, descending=descending)
        forward = list(pages(store, campaign, limit, order=order))
        listed = [number for page in forward for number in shown(page)]
        assert listed == in_order(trials, order), (order, limit)
        assert len(forward) == -(-6 // limit), (order, limit)
        assert forward[0].start is None
        back = list(pages_back(store, campaign, limit, forward[-1], order=order))
        assert [(shown(page), page.end) for page in back] == [
            (shown(page), page.end) for page in forward[-2::-1]
        ], (order, limit)


@pytest.mark.sqlite_is_enough(False)
def test_the_pages_of_a_list_are_of_one_moment(store: Store, campaign: int) -> None:
    reading = pages(store, campaign, 2, order=BY_RATE)
    assert shown(next(reading)) == [1, 3]
    # It had no value when the list began, and now has one before the end of the first page.
    run(store, store.workers.find()[0].id, 900.0)
    second, last = reading
    assert (shown(second), shown(last)) == ([2, 4], [5, 6])
    back = pages_back(store, campaign, 2, last, order=BY_RATE)
    assert [shown(page) for page in back] == [[2, 4], [1, 3]]
    assert numbers(store, campaign, 2, order=BY_RATE) == [6, 1, 3, 2, 4, 5], "a new list knows"


def test_filters_hold_in_lists_and_counts(
    store: Store, campaign: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = TrialFilter(min_tokens_per_s=150.0)
    for wanted, order, expected in (
        (TrialFilter(num_devices=(1,)), BY_RATE, [1, 5, 6]),
        (fast, BY_RATE, [1, 3]),
        (fast, TrialOrder(key="peak_memory_bytes"), [1, 3]),
        (fast, TrialOrder(key="tp"), [1, 3]),
        (TrialFilter(states=("FAILED",)), BY_RATE, [5]),
        (TrialFilter(**{"job.compile": (True,)}), BY_RATE, [6]),
        (TrialFilter(**{"job.compile": (False,)}), BY_RATE, [1, 3, 2, 4, 5]),
        (TrialFilter(**{"job.attention": ("math", "fused")}), BY_RATE, [5]),
        (TrialFilter(**{"min_job.bucket": 8}), TrialOrder(key="job.attention"), [1, 2, 3, 4, 5]),
        (TrialFilter(**{"max_job.bucket": 7}, tp=(1,)), BY_RATE, [6]),
        (TrialFilter(**{"job.bucket": (9,)}), BY_RATE, []),
    ):
        assert numbers(store, campaign, 1, wanted=wanted, order=order) == expected, (wanted, order)
        assert store.trial_pages.count(campaign, wanted=wanted) == (len(expected), True)
    run(store, store.workers.find()[0].id, 900.0)
    assert store.trial_pages.count(campaign, wanted=fast) == (3, True)
    assert store.trial_pages.count(campaign + 1) == (0, True)
    for bound, expected_count in ((7, (6, True)), (6, (6, True)), (5, (5, False))):
        monkeypatch.setattr(pages_module, "MAX_COUNTED", bound)
        assert store.trial_pages.count(campaign) == expected_count


ADDED = (Layout(tp=4), Layout(tp=8), Layout(pp=4), Layout(pp=8), Layout(dp=4), Layout(dp=8))


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    key=st.sampled_from((*SORT_KEYS, *JOB_KEYS)),
    descending=st.booleans(),
    limit=st.integers(1, 4),
    happenings=st.lists(st.sampled_from(["added", "measured", "failed"]), max_size=5),
)
def test_whatever_happens_between_pages_each_trial_that_was_there_comes_once(
    store: Store, key: SortKey, descending: bool, limit: int, happenings: list[str]
) -> None:
    campaign, worker = fill(store, f"c{len(store.campaigns.find())}")
    there = {trial.number for trial in store.trials.find(campaign)}
    left, new = iter(happenings), iter(ADDED)
    listed: list[int] = []
    for page in pages(store, campaign, limit, order=TrialOrder(key=key, descending=descending)):
        listed += shown(page)
        happening = next(left, None)
        if happening == "added":
            store.trials.add(campaign, next(new))
        elif happening is not None and store.trials.count_open(campaign):
            if happening == "measured":
                run(store, worker, 50.0 * (1 + len(listed)))
            else:
                post_outcome(store, lease_one(store, worker).trial_id, 1, failed("crashed"))
    assert len(listed) == len(set(listed)), "none twice"
    assert there <= set(listed), "none missed"


@pytest.fixture
def two(store: Store) -> Store:
    """Trial 1 is plain and measured 100 tokens/s, trial 2 the odd one and measured 300."""
    campaign = make_campaign(store)
    make_worker(store, num_nodes=2, devices_per_node=32)
    for layout, tokens_per_s in ((Layout(), 100.0), (ODD, 300.0)):
        peaks = {"mfu": tokens_per_s / 1000, "peak_memory_bytes": int(tokens_per_s)}
        run_trial(store, campaign, layout, tokens_per_s=tokens_per_s, **peaks)
    return store


def found(store: Store, **stated: Any) -> list[int]:
    wanted = TrialFilter(**stated)
    query = select(Trial.number).outerjoin(MeasurementRow, MeasurementRow.trial_id == Trial.id)
    with store._db.read() as session:
        held = conditions(session, 1, wanted)
        return list(session.scalars(query.where(*held).order_by(Trial.number)))


def test_each_knob_of_a_layout_holds_trials_to_its_values(two: Store) -> None:
    assert set(LAYOUT_FIELDS) < set(KNOB_FIELDS)
    for knob in KNOB_FIELDS:
        plain, odd = getattr(Layout(), knob), getattr(ODD, knob)
        assert found(two, **{knob: (odd,)}) == [2], knob
        assert found(two, **{knob: (plain,)}) == [1], knob
        assert found(two, **{knob: (plain, odd)}) == [1, 2], knob


def test_each_metric_has_a_least_and_a_most_that_include_their_ends(two: Store) -> None:
    first, second = (two.trials.get(id_) for id_ in (1, 2))
    for metric in METRICS:
        values = [
            trial.objective(metric)
            if metric == "tokens_per_node_hour"
            else getattr(trial.measurement, metric)
            for trial in (first, second)
        ]
        low, high = sorted(values)
        assert found(two, **{f"max_{metric}": low}) == [1 + values.index(low)], metric
        assert found(two, **{f"min_{metric}": high}) == [1 + values.index(high)], metric
        assert found(two, **{f"min_{metric}": low, f"max_{metric}": high}) == [1, 2], metric


@pytest.mark.sqlite_is_enough(False)
def test_all_conditions_of_a_filter_must_hold(two: Store) -> None:
    campaign = two.campaigns.by_name("first").id
    run_trial(two, campaign, Layout(tp=4), failed("crashed"))
    two.trials.add(campaign, Layout(tp=8))
    expected: list[tuple[dict[str, Any], list[int]]] = [
        ({}, [1, 2, 3, 4]),
        ({"states": ("FAILED", "PENDING")}, [3, 4]),
        ({"reasons": ("crashed",)}, [3]),
        ({"nodes": ("node-1",)}, [3]),
        ({"nodes": ("node-2",)}, []),
        ({"tp": (2,), "min_tokens_per_s": 200.0}, [2]),
        ({"tp": (1,), "min_tokens_per_s": 200.0}, []),
        ({"min_tokens_per_s": 0.0}, [1, 2]),  # what was not measured is left out
    ]
    assert [(stated, found(two, **stated)) for stated, _ in expected] == expected


def test_a_filter_by_a_metric_needs_a_measurement() -> None:
    assert TrialFilter(min_mfu=0.0).needs_measurement
    assert not TrialFilter(tp=(1,)).needs_measurement


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        ({"tp": (0, -1)}, "tp=-1 is not a whole number from 0 to 2147483647"),
        ({"tp": (True,)}, "tp=True is not a whole number"),
        ({"tp": (2**31,)}, "is not a whole number from 0 to 2147483647"),
        ({"tp": [1]}, "is not a tuple"),
        ({"tp": tuple(range(101))}, "tp lists 101 values; at most 100"),
        (
            {"precision": ("fp4",)},
            "'fp4' is not one of fp32, bf16, fp16, fp8, fp8_block, mxfp8, nvfp4",
        ),
        ({"sequence_parallel": (1,)}, "1 is not one of False, True"),
        ({"states": ("DONE",)}, "'DONE' is not one of PENDING"),
        ({"nodes": ("a\x00b",)}, "is not a text in printable characters"),
        ({"reasons": ("x" * 41,)}, "is longer than 40 characters"),
        ({"min_mfu": float("nan")}, "min_mfu=nan is not a finite number"),
        ({"min_peak_memory_bytes": 1.5}, "min_peak_memory_bytes=1.5 is not a whole number"),
        ({"max_peak_memory_bytes": 2**63}, "is not a whole number up to"),
        ({"min_mfu": 0.5, "max_mfu": 0.4}, "min_mfu=0.5 is over max_mfu=0.4"),
        ({"min_job.b": 10, "max_job.b": 5}, "min_job.b=10 is over max_job.b=5"),
    ],
)
def test_a_filter_that_no_trial_can_meet_is_refused(stated: dict[str, Any], words: str) -> None:
    with pytest.raises(TrialFilterInvalidError, match=words):
        TrialFilter(**stated)


@pytest.mark.sqlite_is_enough(False)
@pytest.mark.parametrize(
    ("stated", "words"),
    [
        ({"job.complie": (True,)}, "job.complie is no job knob of this campaign.*compile"),
        ({"job.compile": (1,)}, "job.compile: 1 is not a switch"),
        ({"job.attention": ("none",)}, "job.attention: .*not one of own, fused, math"),
        ({"min_job.compile": 1}, "min_job.compile: compile is a switch, which has no bounds"),
    ],
)
def test_a_filter_of_jobs_that_the_campaign_does_not_have_is_refused(
    store: Store, campaign: int, stated: dict[str, Any], words: str
) -> None:
    wanted = TrialFilter(**stated)
    for read in (
        lambda: store.trial_pages.page(campaign, wanted=wanted, limit=1),
        lambda: store.trial_pages.count(campaign, wanted=wanted),
        lambda: store.leaderboard.page_of_layouts(
            campaign, listing=LeaderboardListing(wanted=wanted), limit=1
        ),
    ):
        with pytest.raises(TrialFilterInvalidError, match=words):
            read()
    with pytest.raises(TrialFilterInvalidError, match=r"job\.cores is no job knob"):
        store.trial_pages.page(campaign, order=TrialOrder(key="job.cores"), limit=1)


def test_a_filter_is_a_value_and_has_no_other_fields() -> None:
    one, same = TrialFilter(min_mfu=0.3, tp=(2,)), TrialFilter(tp=(2,), min_mfu=0.3, pp=())
    assert one == same
    assert hash(one) == hash(same)
    assert one != TrialFilter(tp=(2,))
    assert pickle.loads(pickle.dumps(one)) == one
    assert (one.tp, one.pp, one.min_mfu, one.max_mfu) == ((2,), (), 0.3, None)
    assert TrialFilter(tp=(), min_mfu=None) == TrialFilter()
    with pytest.raises(TypeError, match="TrialFilter has no field 'tpp'"):
        TrialFilter(tpp=(2,))
    with pytest.raises(AttributeError, match="TrialFilter has no field 'tpp'"):
        _ = TrialFilter().tpp


def test_a_filter_takes_any_spelling_of_a_text() -> None:
    wanted = TrialFilter(pipeline_layout=("Ettt|tL", "split"))
    assert wanted.pipeline_layout == ("Et*3|tL", "split")
    assert TrialFilter(recompute=("mlp+core_attention",)).recompute == ("core_attention+mlp",)
    with pytest.raises(TrialFilterInvalidError, match=r"pipeline_layout='ttt' does not begin"):
        TrialFilter(pipeline_layout=("ttt",))
