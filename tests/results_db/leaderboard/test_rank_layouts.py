"""The leaderboard is that of the oracle: of imported tables, and what else is compared with it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from results_db.allocations.leases import LEASE_S
from results_db.leaderboard.leaderboard_records import RankedLayout
from results_db.records import CampaignRecord
from results_db.store import Store
from results_db.trials.filter import LeaderboardListing
from search_spaces.protocol.measurement import Iteration
from search_spaces.protocol.outcome import Outcome
from search_spaces.spec.layout import Layout
from search_spaces.spec.objectives import OBJECTIVES
from tests.kit.store import (
    TurnableClock,
    completed,
    failed,
    front,
    make_spec,
    make_worker,
    post_outcome,
    take_leases,
)
from tests.results_db import leaderboard_oracle as oracle
from tests.results_db.campaigns.test_imports import layouts as imported_layouts
from tests.results_db.campaigns.test_imports import make_import, make_row

pytestmark = pytest.mark.sqlite_is_enough

MEMORY = 8 << 30
LAYOUTS = (
    Layout(tp=1, dp=8),
    Layout(tp=2, dp=4, num_microbatches=2),
    Layout(tp=4, dp=2, num_microbatches=4, num_nodes=2),
    Layout(tp=8, num_microbatches=8, num_nodes=2),
    Layout(tp=8, num_microbatches=4),  # of another batch
)
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
        Iteration(
            index=index,
            kind="warmup" if index < 2 else "timed",
            step_time_s=seconds * (1 + 0.01 * (index - 2)),
            loss=(7.0 if happening.is_off else 6.0) - index / 10,
            grad_norm=1.5,
        )
        for index in range(2 + happening.num_timed)
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
            f"history-{next(self._names)}", cluster=f"c{next(self._names)}", **described
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


INTERVALS = ("low", "high", "step_time_low_s", "step_time_high_s")
ROUNDINGS = 1e-9
"""Relative. The oracle takes densities and quantiles from scipy, and adds variances as fractions.
Everything but the ends of intervals agrees to the last digit."""


def refuse_other_standings(found: Sequence[RankedLayout], expected: Sequence[RankedLayout]) -> None:
    without = [
        [replace(each, **dict.fromkeys(INTERVALS)) for each in standings]
        for standings in (found, expected)
    ]
    assert without[0] == without[1]
    intervals = [
        [getattr(each, name) for each in standings for name in INTERVALS]
        for standings in (found, expected)
    ]
    assert intervals[0] == [pytest.approx(end, rel=ROUNDINGS, abs=0.0) for end in intervals[1]]


def refuse_a_difference(
    store: Store, campaign: CampaignRecord, objectives: Sequence[str] = OBJECTIVES
) -> None:
    """Compares everything that is read of a leaderboard with the oracle."""
    with store._db.read() as session:
        on_front = oracle.front(session, campaign)
        for objective in objectives:
            expected = oracle.standings(session, campaign.id, objective)
            refuse_other_standings(
                store.leaderboard.ranked_layouts(campaign.id, objective), expected
            )
            refuse_other_standings(
                store.leaderboard.ranked_layouts(campaign.id, objective, limit=2, offset=1),
                expected[1:3],
            )
            won_by = store.leaderboard.winner(campaign.id, objective)
            full = [each for each in expected[:1] if not each.shortened]
            refuse_other_standings([won_by] if won_by is not None else [], full)
            refuse_other_standings(
                store.leaderboard.ranked_layouts(
                    campaign.id, objective, listing=LeaderboardListing(front=True)
                ),
                oracle.standings(session, campaign.id, objective, among=on_front),
            )
        own = oracle.standings(session, campaign.id, campaign.objective)[:1]
        best = own[0] if own and not own[0].shortened else None
        won = store.leaderboard.winners([campaign.id]).get(campaign.id)
        assert (won is None) == (best is None)
        if won is not None and best is not None:
            assert (won.value, won.trial_number) == (best.value, best.trial.number)
            assert store.leaderboard.values_to_beat([campaign.id])[campaign.id] == pytest.approx(
                best.low, rel=ROUNDINGS, abs=0.0
            )
        assert front(store, campaign.id) == on_front
        assert store.leaderboard.ranked_summary(campaign.id).num_ranked == oracle.count_ranked(
            session, campaign.id
        )
        found = store.leaderboard.page_of_layouts(campaign.id, limit=0).constrained
        assert found == oracle.count_constrained(session, campaign.id)


@settings(
    max_examples=5,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    rows=st.lists(
        st.tuples(
            st.integers(0, 4),
            st.sampled_from([0.4, 0.45, 0.6, 0.7]),
            st.sampled_from(["", 3_000_000_000, 5_000_000_000]),
        ),
        min_size=1,
        max_size=12,
    )
)
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
