"""The leaderboard, and its lists by any filter and order, are those of the oracle and of Python."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from layout_tuner.protocol.metrics import METRICS
from layout_tuner.protocol.outcome import Outcome
from layout_tuner.results_db.allocations.leases import LEASE_S
from layout_tuner.results_db.errors import (
    CampaignNotFoundError,
    ListingInvalidError,
    ObjectiveUnknownError,
)
from layout_tuner.results_db.leaderboard.leaderboard_records import RankedLayout
from layout_tuner.results_db.records import CampaignRecord
from layout_tuner.results_db.store import Store
from layout_tuner.results_db.trials.filter import (
    KNOB_FIELDS,
    LISTING_SORT_KEYS,
    LeaderboardListing,
    TrialFilter,
)
from layout_tuner.search_spaces.layouts.job_settings import JobSettings
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.objectives import OBJECTIVES
from layout_tuner.units import SECONDS_PER_HOUR
from tests.kit.store import (
    JOB_KNOBS,
    TurnableClock,
    completed,
    failed,
    front,
    make_campaign,
    make_iterations,
    make_spec,
    make_worker,
    post_outcome,
    take_leases,
)
from tests.results_db import leaderboard_oracle as oracle
from tests.results_db.campaigns.test_imported_tables import layouts as imported_layouts
from tests.results_db.campaigns.test_imported_tables import make_import, make_row
from tests.results_db.trials.test_trial_pages import value_of

pytestmark = pytest.mark.sqlite_is_enough

MEMORY = 8 << 30
LAYOUTS = (
    Layout(tp=1, dp=8),
    Layout(tp=2, dp=4, num_microbatches=2),
    Layout(tp=4, dp=2, num_microbatches=4, num_nodes=2),
    Layout(tp=8, num_microbatches=8, num_nodes=2),
    Layout(tp=8, num_microbatches=4),  # of another batch
    Layout(tp=1, dp=8, job=JobSettings({"compile": True})),
    Layout(tp=1, dp=8, job=JobSettings({"bucket": 4, "attention": "math"})),
)
DEFAULTS = {name: knob["default"] for name, knob in JOB_KNOBS.items()}
STEP_TIMES_S = (0.3, 0.35, 0.36, 0.6, 0.7)
PEAKS = (2 << 30, 5 << 30, 7 << 30)


@dataclass(frozen=True, kw_only=True)
class Happening:
    """What becomes of one more run of a layout."""

    layout: Layout
    step_time_s: float = 0.3
    how: str = "measured"
    """measured, crashed, out_of_memory, or late: measured after its lease was lost."""
    is_off: bool = False
    """Whether its losses are those of another computation."""
    shortened: bool = False
    oversubscribed: bool = False
    num_timed: int = 3
    peak_memory_bytes: int = 2 << 30


rarely = st.sampled_from([False, False, False, True])
happenings = st.builds(
    Happening,
    layout=st.sampled_from(LAYOUTS),
    step_time_s=st.sampled_from(STEP_TIMES_S),
    how=st.sampled_from(["measured", "measured", "measured", "late", "crashed", "out_of_memory"]),
    is_off=rarely,
    shortened=rarely,
    oversubscribed=st.sampled_from([False] * 7 + [True]),
    num_timed=st.integers(1, 4),
    peak_memory_bytes=st.sampled_from(PEAKS),
)
campaigns = st.fixed_dictionaries(
    {
        "objective": st.sampled_from(
            [
                *OBJECTIVES,
                ["tokens_per_s", "memory_headroom"],
                ["tokens_per_s_per_device", "tokens_per_node_hour", "memory_headroom"],
            ]
        ),
        "constraints": st.sampled_from([{}, {"memory_headroom": 0.2}]),
    }
)


def outcome(happening: Happening) -> Outcome:
    if happening.how in ("crashed", "out_of_memory"):
        return failed(happening.how)
    seconds, layout = happening.step_time_s, happening.layout
    iterations = tuple(
        replace(each, step_time_s=seconds * (1 + 0.01 * (each.index - 2)))
        for each in make_iterations(
            seconds, timed=happening.num_timed, loss_off=float(happening.is_off)
        )
    )
    return completed(
        layout,
        tokens_per_s=512 / seconds,
        iterations=iterations,
        shortened=happening.shortened,
        iterations_asked=9 if happening.shortened else None,
        oversubscribed=happening.oversubscribed,
        peak_memory_bytes=happening.peak_memory_bytes,
        peak_memory_bytes_by_stage=(happening.peak_memory_bytes,) * layout.pp,
    )


class History:
    """A campaign to which things happen."""

    _names = itertools.count()

    def __init__(self, store: Store, clock: TurnableClock, **described: Any) -> None:
        self.store = store
        self._clock = clock
        spec = make_spec(
            f"history-{next(self._names)}",
            cluster=f"c{next(self._names)}",
            space={"job": JOB_KNOBS},
            **described,
        )
        spec["cluster"] |= {"num_nodes": 2, "device_memory_bytes": MEMORY}
        self.campaign = store.campaigns.create(spec, num_legal_layouts=100)
        self._worker = make_worker(
            store, f"w{self.campaign.id}", cluster=spec["cluster"]["name"], num_nodes=2
        ).id
        self._first_of: dict[Layout, int] = {}

    def happen(self, happening: Happening) -> None:
        layout = happening.layout
        if layout in self._first_of:
            trial = self.store.trials.repeat(self._first_of[layout])
        else:
            trial = self.store.trials.add(self.campaign.id, layout)
            self._first_of[layout] = trial.id
        (lease,) = take_leases(self.store, self._worker, 1)
        if happening.how == "late":
            self._clock.forward(LEASE_S + 1)
            self.store.leases.expire()
            take_leases(self.store, self._worker, 1)
        post_outcome(self.store, trial.id, lease.attempt, outcome(happening))


INTERVALS = ("value_low", "value_high", "step_time_low_s", "step_time_high_s")
ROUNDINGS = 1e-9
"""Relative. The oracle takes densities and quantiles from scipy, and adds variances as fractions.
Everything but the ends of intervals agrees to the last digit."""


def refuse_other_standings(found: Sequence[RankedLayout], expected: Sequence[RankedLayout]) -> None:
    for each, other in zip(found, expected, strict=True):
        ends = {name: getattr(each, name) for name in INTERVALS}
        assert each == replace(other, **ends)
        of_other = {name: getattr(other, name) for name in INTERVALS}
        assert ends == pytest.approx(of_other, rel=ROUNDINGS, abs=0.0)


def refuse_a_difference(
    store: Store, campaign: CampaignRecord, objectives: Sequence[str] = OBJECTIVES
) -> None:
    """Compares everything that is read of a leaderboard with the oracle."""
    ranked_layouts = partial(store.leaderboard.ranked_layouts, campaign.id)
    with store._db.read() as session:
        on_front = oracle.front(session, campaign)
        for objective in objectives:
            expected = oracle.standings(session, campaign.id, objective)
            refuse_other_standings(ranked_layouts(objective), expected)
            refuse_other_standings(ranked_layouts(objective, limit=2, offset=1), expected[1:3])
            won_by = store.leaderboard.winner(campaign.id, objective)
            full = [each for each in expected[:1] if not each.shortened]
            refuse_other_standings([won_by] if won_by is not None else [], full)
            in_front = ranked_layouts(objective, listing=LeaderboardListing(front=True))
            expected = oracle.standings(session, campaign.id, objective, among=on_front)
            refuse_other_standings(in_front, expected)
        ranked = oracle.standings(session, campaign.id, campaign.objective)
        best = ranked[0] if ranked and not ranked[0].shortened else None
        won = store.leaderboard.winners([campaign.id]).get(campaign.id)
        assert (won is None) == (best is None)
        if won is not None and best is not None:
            assert (won.value, won.trial_number) == (best.value, best.trial.number)
        to_beat = store.leaderboard.to_beat(campaign.id)
        if best is None:
            assert to_beat is None
        elif len(campaign.objectives) == 1:
            assert to_beat == pytest.approx(best.value_low, rel=ROUNDINGS, abs=0.0)
        else:
            assert len(to_beat) == len(on_front)
        assert front(store, campaign.id) == on_front
        assert store.leaderboard.ranked_summary(campaign.id).num_ranked == len(ranked)
        found = store.leaderboard.page_of_layouts(campaign.id, limit=0).constrained
        assert found == oracle.count_constrained(session, campaign.id)


SAME_EACH_TIME = settings(
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
table_rows = st.tuples(
    st.integers(0, 4),
    st.sampled_from([0.4, 0.45, 0.6, 0.7]),
    st.sampled_from(["", 3_000_000_000, 5_000_000_000]),
)


@settings(SAME_EACH_TIME, max_examples=5)
@given(rows=st.lists(table_rows, min_size=1, max_size=12))
def test_an_imported_table_is_ranked(store: Store, rows: list[tuple[int, float, Any]]) -> None:
    written = [
        make_row(
            **imported_layouts()[place],
            peak_memory_bytes=peak,
            # A layout that is completed in one row is in all.
            **({"status": "out_of_memory"} if place == 4 else {"step_time_s": seconds}),
        )
        # A table of which nothing completed is refused.
        for place, seconds, peak in [*rows, (5, 0.5, "")]
    ]
    name = f"import-{len(store.campaigns.find())}"
    (campaign,) = store.imports.add([make_import(name, *written)])
    refuse_a_difference(store, campaign)


SORT_KEYS = (*LISTING_SORT_KEYS, *(f"job.{name}" for name in JOB_KNOBS))
filters = st.one_of(
    st.just(TrialFilter()),
    st.builds(lambda values: TrialFilter(tp=tuple(values)), st.sets(st.sampled_from([1, 2, 4, 8]))),
    st.builds(lambda value: TrialFilter(global_batch_size=(value,)), st.sampled_from([4, 8])),
    st.builds(
        lambda most, least: TrialFilter(max_step_time_s=most, min_peak_memory_bytes=least),
        st.sampled_from(STEP_TIMES_S),
        st.sampled_from(PEAKS),
    ),
    st.sampled_from(
        [
            TrialFilter(**{"job.compile": (True,)}),
            TrialFilter(**{"job.compile": (False,), "job.attention": ("math", "fused")}),
            TrialFilter(**{"min_job.bucket": 5}, tp=(1,)),
            TrialFilter(**{"max_job.bucket": 7}),
        ]
    ),
    st.builds(lambda number: TrialFilter(numbers=tuple(range(1, number))), st.integers(2, 9)),
    st.just(TrialFilter(states=("COMPLETED",), num_nodes=(2,))),
    st.just(TrialFilter(min_tokens_per_node_hour=3600 * 512 / 0.6)),
)
queries = st.builds(
    lambda sort, descending, **more: LeaderboardListing(
        sort=sort, descending=descending and sort is not None, **more
    ),
    sort=st.one_of(st.none(), st.sampled_from(SORT_KEYS)),
    descending=st.booleans(),
    wanted=filters,
    front=st.sampled_from([False, False, True]),
    within_percent=st.sampled_from([None, None, 0.0, 20.0]),
)


def job_value(layout: RankedLayout, name: str) -> Any:
    return layout.trial.layout.job.get(name, DEFAULTS[name])


def value_at_the_median(layout: RankedLayout, key: Any) -> Any:
    """What a layout is filtered and sorted by: its figures at the median step time of its runs."""
    if key.startswith("job."):
        value = job_value(layout, key.removeprefix("job."))
        return JOB_KNOBS["attention"]["values"].index(value) if isinstance(value, str) else value
    value, measured = value_of(layout.trial, key), layout.trial.measurement
    if key == "step_time_s":
        return layout.step_time_s
    if key not in METRICS or key == "peak_memory_bytes" or value is None or measured is None:
        return value
    longer = layout.step_time_s / measured.step_time_s
    if key == "tokens_per_node_hour":
        return measured.tokens_per_s / longer * SECONDS_PER_HOUR / layout.trial.layout.num_nodes
    return value / longer


def is_wanted(layout: RankedLayout, wanted: TrialFilter) -> bool:
    for name in KNOB_FIELDS:
        values = getattr(wanted, name)
        if values and getattr(layout.trial.layout, name) not in values:
            return False
    for name in JOB_KNOBS:
        value = job_value(layout, name)
        if value not in wanted.stated.get(f"job.{name}", (value,)):
            return False
        if value < wanted.stated.get(f"min_job.{name}", value):
            return False
        if value > wanted.stated.get(f"max_job.{name}", value):
            return False
    if wanted.numbers and layout.trial.number not in wanted.numbers:
        return False
    for name in METRICS:
        low, high = wanted.bounds(name)
        value = value_at_the_median(layout, name)
        if low is not None and (value is None or value < low):
            return False
        if high is not None and (value is None or value > high):
            return False
    return True


def listed(
    whole: list[RankedLayout], front: frozenset[int], query: LeaderboardListing
) -> list[RankedLayout]:
    """The layouts of a whole leaderboard that a query lists, in its order."""
    found = [each for each in whole if is_wanted(each, query.wanted)]
    if query.front:
        found = [each for each in found if each.trial.id in front]
    if query.within_percent is not None:
        least = whole[0].value * (1.0 - query.within_percent / 100.0)
        found = [each for each in found if each.value >= least]
        if not whole[0].shortened:
            found = [each for each in found if not each.shortened]
    natural = sorted(found, key=lambda each: (-each.value, each.trial.id))
    if query.sort is not None:
        sign = -1 if query.descending else 1
        values = {each.trial.id: value_at_the_median(each, query.sort) for each in natural}
        known = [each for each in natural if values[each.trial.id] is not None]
        known.sort(key=lambda each: sign * values[each.trial.id])
        return [*known, *(each for each in natural if values[each.trial.id] is None)]
    if query.within_percent is not None:
        # At the median step time, as the leaderboard's value.
        def per_node_hour(each: RankedLayout) -> float:
            times_faster = each.trial.measurement.step_time_s / each.step_time_s
            return each.trial.objective("tokens_per_node_hour") * times_faster

        return sorted(natural, key=per_node_hour, reverse=True)
    return found


def whole_leaderboard(run: History, objective: str) -> tuple[list[RankedLayout], frozenset[int]]:
    """The oracle's layouts, and its front."""
    with run.store._db.read() as session:
        whole = oracle.standings(session, run.campaign.id, objective)
        return whole, oracle.front(session, run.campaign) if whole else frozenset()


def refuse_another_list(run: History, objective: str, query: LeaderboardListing) -> None:
    """Compares a list, its pages, its total, ranks and values of knobs with the oracle."""
    leaderboard, asked = run.store.leaderboard, (run.campaign.id, objective)
    whole, front = whole_leaderboard(run, objective)
    expected = listed(whole, front, query) if whole else []
    refuse_other_standings(leaderboard.ranked_layouts(*asked, listing=query), expected)
    for offset in (0, 1, 3):
        found = leaderboard.ranked_layouts(*asked, listing=query, limit=2, offset=offset)
        refuse_other_standings(found, expected[offset : offset + 2])
    page = leaderboard.page_of_layouts(*asked, listing=query, limit=2, offset=1)
    assert page.total == len(expected)
    assert [each.trial.id for each in page.layouts] == [each.trial.id for each in expected[1:3]]
    tied = leaderboard.tied_layouts(*asked, among=3)
    refuse_other_standings(tied, [each for each in whole[:3] if each.tied_with_first])
    for each in whole:
        for trial_id in each.trial_ids:
            assert leaderboard.rank_of(run.campaign.id, trial_id, objective) == each.rank
    listed_values, values = (
        {name: Counter(getattr(each.trial.layout, name) for each in some) for name in KNOB_FIELDS}
        | {f"job.{name}": Counter(job_value(each, name) for each in some) for name in JOB_KNOBS}
        for some in (expected, whole)
    )
    knobs = run.campaign.stored.searched_knobs
    assert leaderboard.constant_knobs(*asked, listing=query, knobs=knobs) == {
        name: next(iter(found)) for name, found in listed_values.items() if len(found) == 1
    }
    everywhere = leaderboard.knob_values(run.campaign.id, *values, knobs=knobs)
    assert list(everywhere) == list(values)
    assert everywhere == values
    for each in whole:
        found_again = leaderboard.ranked_layout(run.campaign, each.trial.layout)
        assert found_again is not None
        assert found_again.trial.id == each.trial.id or objective != run.campaign.objective


@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [5, pytest.param(50, marks=pytest.mark.nightly)])
def test_whatever_happens_the_leaderboard_and_its_lists_are_those_of_the_oracle(
    store: Store, clock: TurnableClock, number: int
) -> None:
    steps = st.tuples(happenings, queries, st.sampled_from(OBJECTIVES))

    @settings(SAME_EACH_TIME, max_examples=number)
    @given(described=campaigns, history=st.lists(steps, min_size=10, max_size=14))
    def follow(described: dict[str, Any], history: list[Any]) -> None:
        # Each history is a campaign of its own, on a cluster of its own.
        run = History(store, clock, **described)
        for happening, query, objective in history:
            run.happen(happening)
            refuse_a_difference(store, run.campaign, [run.campaign.objective])
            refuse_another_list(run, objective, query)
        refuse_a_difference(store, run.campaign)

    follow()


def full_history(store: Store, clock: TurnableClock) -> History:
    """Layouts of equal values, a shortened one with the largest, and one that was repeated."""
    run = History(store, clock, objective="tokens_per_s")
    for tp, seconds, shortened, peak in (
        (1, 0.3, True, 0),
        (2, 0.35, False, 1),
        (4, 0.35, False, 2),
        (8, 0.35, False, 2),
        (2, 0.35, False, 0),
        (1, 0.6, False, 1),
        (8, 0.6, False, 0),
    ):
        run.happen(
            Happening(
                layout=Layout(tp=tp, dp=8 // tp, num_microbatches=tp),
                step_time_s=seconds,
                shortened=shortened,
                peak_memory_bytes=PEAKS[peak],
            )
        )
    for layout, seconds in zip(LAYOUTS[-2:], (0.32, 0.5), strict=True):
        run.happen(Happening(layout=layout, step_time_s=seconds, peak_memory_bytes=PEAKS[1]))
    return run


def test_every_key_sorts_both_ways(store: Store, clock: TurnableClock) -> None:
    run = full_history(store, clock)
    whole, front = whole_leaderboard(run, "tokens_per_s")
    for place, (key, descending) in enumerate(product(SORT_KEYS, (False, True))):
        # Of every two keys each direction is filtered for one.
        wanted = TrialFilter(tp=(1, 2, 8)) if place % 4 in (0, 3) else TrialFilter()
        query = LeaderboardListing(sort=key, descending=descending, wanted=wanted)
        refuse_other_standings(
            store.leaderboard.ranked_layouts(run.campaign.id, "tokens_per_s", listing=query),
            listed(whole, front, query),
        )


@pytest.mark.sqlite_is_enough(False)
def test_layouts_without_a_value_come_last_in_both_directions(store: Store) -> None:
    known = imported_layouts()
    rows = [
        make_row(**known[place], step_time_s=seconds, peak_memory_bytes=peak)
        for place, (seconds, peak) in enumerate(
            ((0.4, ""), (0.5, 3_000_000_000), (0.6, 5_000_000_000), (0.7, ""))
        )
    ]
    (campaign,) = store.imports.add([make_import("import", *rows)])

    def peaks(**sorting: Any) -> list[int | None]:
        query = LeaderboardListing(sort="peak_memory_bytes", **sorting)
        found = store.leaderboard.ranked_layouts(campaign.id, "tokens_per_s", listing=query)
        measured = [each.trial.measurement for each in found]
        return [each and each.peak_memory_bytes for each in measured]

    assert peaks() == [3_000_000_000, 5_000_000_000, None, None]
    assert peaks(descending=True) == [5_000_000_000, 3_000_000_000, None, None]


def test_an_order_that_no_list_has_is_refused_with_the_choices() -> None:
    with pytest.raises(ListingInvalidError, match=r"sort='ttp' is unknown \(did you mean 'tp'\?\)"):
        LeaderboardListing(sort="ttp")
    with pytest.raises(ListingInvalidError, match=r"order=desc needs a sort key.*add sort=KEY"):
        LeaderboardListing(descending=True)


def test_what_is_not_ranked_has_no_rank_and_no_knobs(store: Store, clock: TurnableClock) -> None:
    run = full_history(store, clock)
    waiting = store.trials.add(run.campaign.id, Layout(pp=8, num_microbatches=8))
    assert store.leaderboard.rank_of(run.campaign.id, waiting.id) is None
    assert store.leaderboard.rank_of(run.campaign.id, 10**6) is None
    other = make_campaign(store, "other")
    assert store.leaderboard.rank_of(other, 1) is None
    assert (
        store.leaderboard.constant_knobs(other),
        store.leaderboard.knob_values(other, "tp"),
    ) == ({}, {"tp": {}})
    none = LeaderboardListing(wanted=TrialFilter(tp=(64,)))
    assert store.leaderboard.constant_knobs(run.campaign.id, listing=none) == {}
    assert store.leaderboard.knob_values(run.campaign.id) == {}
    for read in (
        lambda: store.leaderboard.rank_of(10**6, 1),
        lambda: store.leaderboard.constant_knobs(10**6),
    ):
        with pytest.raises(CampaignNotFoundError):
            read()
    with pytest.raises(ObjectiveUnknownError, match="'mood' is not one of tokens_per_s_per_device"):
        store.leaderboard.rank_of(run.campaign.id, 1, "mood")


@pytest.fixture
def plotted(store: Store, clock: TurnableClock) -> int:
    """The full history, and a layout that runs out of memory."""
    run = full_history(store, clock)
    run.happen(Happening(layout=Layout(pp=8, num_microbatches=8), how="out_of_memory"))
    return run.campaign.id


@pytest.mark.sqlite_is_enough(False)
def test_a_plot_has_a_point_for_each_ranked_layout(store: Store, plotted: int) -> None:
    plot = store.plot_data.points(plotted)
    whole = store.leaderboard.ranked_layouts(plotted, "tokens_per_s")
    assert (plot.num_left_out, plot.num_ranked, plot.num_unranked) == (0, len(whole), 1)
    for point, layout in zip(plot.points, whole, strict=False):
        trial = layout.trial
        assert (point.trial_id, point.number) == (trial.id, trial.number)
        assert (point.state, point.reason) == ("COMPLETED", None)
        assert (point.rank, point.value) == (layout.rank, layout.value)
        assert point.peak_memory_bytes == trial.measurement.peak_memory_bytes
        assert point.shortened == layout.shortened
        assert point.knobs == trial.layout.without_job.to_mapping(every_knob=True)
        assert (point.job, point.layout_key) == (trial.layout.job, trial.layout_key)


@pytest.mark.sqlite_is_enough(False)
def test_a_layout_that_failed_is_the_last_point(store: Store, plotted: int) -> None:
    *_, last = store.plot_data.points(plotted).points
    assert (last.state, last.reason) == ("INFEASIBLE", "out_of_memory")
    assert (last.rank, last.value) == (None, None)


@pytest.mark.sqlite_is_enough(False)
def test_a_plot_has_the_front_the_best_and_a_sample(store: Store, plotted: int) -> None:
    whole = store.plot_data.points(plotted)
    some = store.plot_data.points(plotted, limit=4)
    assert (len(some.points), some.num_left_out) == (4, len(whole.points) - 4)
    assert front(store, plotted) <= {point.trial_id for point in some.points}
    assert some.points[0].rank == 1
    assert [point.rank for point in some.points][-2:] == [whole.num_ranked, None]


@pytest.mark.sqlite_is_enough(False)
def test_a_plot_of_a_campaign_without_trials_is_empty(store: Store) -> None:
    assert len(store.plot_data.points(make_campaign(store, "empty")).points) == 0
