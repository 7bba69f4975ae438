"""What probes must beat is stored with the campaign, as its leaderboard has it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layout_tuner.protocol.outcome import Outcome
from layout_tuner.results_db.errors import DatabaseUnavailableError
from layout_tuner.results_db.leaderboard import leaderboard_memo
from layout_tuner.results_db.models.tables import Campaign
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec
from layout_tuner.search_spaces.campaigns.fidelity import Fidelity
from layout_tuner.search_spaces.layouts.layout import Layout
from tests.kit.api import CAMPAIGN, CLUSTER
from tests.kit.store import (
    TimelyStore,
    completed,
    failed,
    lease_one,
    make_worker,
    post_outcome,
    run_trial,
)
from tests.results_db import leaderboard_oracle as oracle
from tests.results_db.leaderboard.test_against_oracle import ROUNDINGS, SAME_EACH_TIME

pytestmark = pytest.mark.sqlite_is_enough

LAYOUTS = (
    Layout(num_microbatches=8),
    Layout(dp=2, num_microbatches=4),
    Layout(tp=2, num_microbatches=8),
    Layout(pp=2, num_microbatches=8),
    Layout(micro_batch_size=2, num_microbatches=4),
)
"""All of one batch."""
BEST, SLOW, OTHER, *_ = LAYOUTS
TWO = ["tokens_per_s", "memory_headroom"]
_names = itertools.count()


class Run:
    """A campaign whose description can be read, on a cluster of its own, with a worker."""

    def __init__(self, store: Store, **described: Any) -> None:
        name = f"to-beat-{next(_names)}"
        cluster = {**CLUSTER, "name": name, "devices_per_node": 8}
        spec = CampaignSpec.from_mapping(
            {**CAMPAIGN, "name": name, "cluster": cluster, **described}
        )
        self.store = store
        self.campaign = store.campaigns.create(spec.to_mapping(), num_legal_layouts=9)
        self.worker = make_worker(store, name, cluster=name).id

    def measure(self, layout: Layout, tokens_per_s: float = 1000.0, **changes: Any) -> int:
        outcome = completed(layout, tokens_per_s=tokens_per_s, **changes)
        return self.happen(layout, outcome)

    def happen(self, layout: Layout, outcome: Outcome) -> int:
        return run_trial(self.store, self.campaign.id, layout, outcome, worker=self.worker)

    @property
    def stored(self) -> float | list[list[float | None]] | None:
        with self.store._db.read() as session:
            return session.get_one(Campaign, self.campaign.id).to_beat

    @property
    def computed(self) -> float | list[list[float | None]] | None:
        return self.store.leaderboard.to_beat(self.campaign.id)

    def best(self) -> Any:
        """What changes with the winner, or with the front, by the oracle; and the low end."""
        with self.store._db.read() as session:
            whole = oracle.standings(session, self.campaign.id, self.campaign.objective)
            if not whole or whole[0].shortened:
                return None, None
            (first, *_) = whole
            front = oracle.front(session, self.campaign)
        return (first.trial_ids, first.value, front), first.value_low


@contextmanager
def without_leaderboards(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In the block, a leaderboard that is computed fails the test."""

    def refuse(*_: Any) -> None:
        raise AssertionError("a leaderboard was computed")

    with monkeypatch.context() as within:
        within.setattr(leaderboard_memo, "rank_layouts", refuse)
        within.setattr(leaderboard_memo.LeaderboardMemo, "get", refuse)
        yield


@contextmanager
def ending_before_it_is_computed(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In the block, outcomes are stored and what follows from them is not."""

    def gone(_campaign_id: int) -> None:
        raise DatabaseUnavailableError("the server has gone")

    with monkeypatch.context() as within:
        within.setattr(store.leaderboard, "to_beat", gone)
        yield


runs = st.fixed_dictionaries(
    {
        "layout": st.sampled_from(LAYOUTS),
        "tokens_per_s": st.sampled_from([800.0, 900.0, 950.0, 1000.0, 1020.0, 1500.0]),
        "loss_off": st.sampled_from([0.0, 0.0, 0.0, 1.0]),
        "shortened": st.sampled_from([False, False, True]),
        "oversubscribed": st.sampled_from([False] * 5 + [True]),
        "peak_memory_bytes": st.sampled_from([2 << 30, 5 << 30, 7 << 30]),
    }
)
described = st.fixed_dictionaries(
    {
        "objective": st.sampled_from(["tokens_per_s", "tokens_per_s_per_device", TWO]),
        "constraints": st.sampled_from([{}, {"memory_headroom": 0.2}]),
    }
)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [5, pytest.param(50, marks=pytest.mark.nightly)])
def test_the_stored_value_is_that_of_the_last_run_that_could_change_it(
    store: Store, number: int
) -> None:
    @settings(SAME_EACH_TIME, max_examples=number)
    @given(described=described, history=st.lists(runs, min_size=8, max_size=12))
    def follow(described: dict[str, Any], history: list[dict[str, Any]]) -> None:
        run = Run(store, **described)
        seen: set[Layout] = set()
        before, stored_before = run.best()[0], None
        for each in history:
            is_repeat = each["layout"] in seen
            seen.add(each["layout"])
            # Repeats are not stopped early.
            is_short = each["shortened"] and not is_repeat
            asked = {"iterations_asked": 10} if is_short else {}
            run.measure(**{**each, "shortened": is_short}, **asked)
            (now, low), stored = run.best(), run.stored
            if now != before or is_repeat:
                assert stored == run.computed
            if now is None:
                assert stored is None
            elif not isinstance(stored, list) and now != before:
                assert stored == pytest.approx(low, rel=ROUNDINGS, abs=0.0)
            assert stored in (stored_before, run.computed)
            before, stored_before = now, stored

    follow()


@pytest.mark.sqlite_is_enough(False)
def test_a_run_that_reaches_it_has_it_computed(store: Store) -> None:
    run = Run(store)
    assert run.stored is None
    run.measure(BEST, 1000.0)
    first = run.stored
    assert first == run.computed < 1000.0
    run.measure(OTHER, 1100.0)
    assert first < run.stored == run.computed < 1100.0


def test_a_run_that_does_not_reach_it_computes_no_leaderboard(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(store, constraints={"memory_headroom": 0.2})
    run.measure(BEST, 1000.0)
    before = run.stored
    with without_leaderboards(monkeypatch):
        run.measure(LAYOUTS[1], 700.0)
        run.measure(LAYOUTS[2], 2000.0, oversubscribed=True)
        run.measure(LAYOUTS[3], 2000.0, peak_memory_bytes=7 << 30)
        run.measure(LAYOUTS[4], 990.0, shortened=True, iterations_asked=10)
        run.happen(Layout(tp=2, dp=2, num_microbatches=4), failed("out_of_memory"))
        run.measure(Layout(dp=4, num_microbatches=2), 2000.0, loss_off=1.0)
    assert run.stored == before is not None


def test_a_cheap_probe_computes_no_leaderboard(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(store, strategy="guided", budget={"node_hours": 1.0})
    run.measure(BEST)
    before = run.stored
    part = Fidelity(num_microbatches=4, dp=1, num_layers=2)
    trial = store.trials.add(run.campaign.id, OTHER, fidelity=part)
    spec = run.campaign.stored.spec
    request = spec.probe_request(trial.layout, num_layers=trial.num_layers)
    outcome = completed(
        trial.layout, tokens_per_s=9000.0, model=request.model, timed=request.iterations
    )
    with without_leaderboards(monkeypatch):
        lease = lease_one(store, run.worker)
        assert post_outcome(store, trial.id, lease.attempt, outcome).state == "COMPLETED"
    assert run.stored == before is not None


@pytest.mark.parametrize(
    "described", [{"stop": {"early": False}}, {"strategy": "exhaustive"}], ids=["off", "exhaustive"]
)
def test_a_campaign_that_stops_nothing_early_computes_no_leaderboard(
    store: Store, monkeypatch: pytest.MonkeyPatch, described: dict[str, Any]
) -> None:
    run = Run(store, **described)
    with without_leaderboards(monkeypatch):
        run.measure(BEST)
    assert run.stored is None


@pytest.mark.sqlite_is_enough(False)
def test_that_of_a_rejected_winner_is_gone_with_it(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(store)
    winner = run.measure(BEST, 1500.0, loss_off=1.0)
    run.measure(SLOW, 1000.0)
    assert run.stored == run.computed > 1000.0
    with ending_before_it_is_computed(store, monkeypatch):
        run.measure(OTHER, 900.0)
    assert store.trials.get(winner).state == "FAILED"
    assert run.stored is None
    run.measure(LAYOUTS[3], 800.0)
    assert run.stored == run.computed < 1000.0


def test_that_of_a_winner_that_is_slower_when_repeated_is_gone_with_the_repeat(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(store)
    run.measure(BEST, 1500.0)
    with ending_before_it_is_computed(store, monkeypatch):
        run.measure(BEST, 500.0)
    assert run.stored is None
    run.measure(BEST, 500.0)
    assert run.stored == run.computed < 500.0


def test_that_of_assumed_tokens_is_gone_with_the_first_counted_ones(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(store)
    run.measure(BEST, 1500.0, tokens="assumed")
    assert run.stored == run.computed > 1000.0
    with ending_before_it_is_computed(store, monkeypatch):
        run.measure(OTHER, 800.0)
    assert run.stored is None
    run.measure(SLOW, 700.0)
    assert run.stored == run.computed < 800.0
    with without_leaderboards(monkeypatch):
        run.measure(LAYOUTS[3], 600.0)


def test_of_several_objectives_it_is_the_front(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(store, objective=TWO)
    run.measure(BEST, 1000.0, peak_memory_bytes=4 << 30)
    assert run.stored == [[1000.0, 0.5]]
    with without_leaderboards(monkeypatch):
        run.measure(SLOW, 990.0, peak_memory_bytes=5 << 30)
    run.measure(OTHER, 500.0, peak_memory_bytes=2 << 30)
    assert sorted(run.stored) == [[500.0, 0.75], [1000.0, 0.5]]


@pytest.mark.sqlite_is_enough(False)
def test_of_two_services_the_one_that_knows_the_last_end_wins(
    store: Store, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(store)
    with closing(TimelyStore(database_url, clock=store._clock)) as other:
        compute = store.leaderboard.to_beat

        def computed_too_early(campaign_id: int) -> Any:
            found = compute(campaign_id)
            run.store = other
            run.measure(OTHER, 1500.0)
            return found

        with monkeypatch.context() as within:
            within.setattr(store.leaderboard, "to_beat", computed_too_early)
            run.measure(BEST, 1000.0)
        assert run.stored == other.leaderboard.to_beat(run.campaign.id) > 1000.0
