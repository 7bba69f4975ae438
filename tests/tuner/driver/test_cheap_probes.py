"""What a campaign probes first: its baseline, and layouts in part before the best in full."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from layout_tuner.protocol.outcome import Outcome
from layout_tuner.results_db.records import CampaignRecord, TrialRecord
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec
from layout_tuner.search_spaces.campaigns.fidelity import (
    Fidelity,
    ProbeCosts,
    fidelities,
    fidelity_of,
)
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.tuner.driver.campaign_end import Spent, is_reserved
from layout_tuner.tuner.driver.campaign_search import CampaignSearch, full_probe_node_s
from layout_tuner.tuner.strategies import registry
from layout_tuner.tuner.strategies.ask_and_tell import History, Proposer
from layout_tuner.tuner.strategies.search_problem import SearchProblem
from tests.kit.store import completed, failed, post_outcome, take_leases
from tests.tuner.factories import (
    DrivenCampaign,
    FakeWorker,
    layouts_of,
    make_spec,
    measured,
    run_campaign,
    submit,
)

NUM_CHEAP = 4
"""Layouts that are probed in part before the best of them is measured in full."""
PROBE_S = 4.0
"""What a probe of the fake worker takes, of one node."""


class PartFirst(Proposer):
    """Probes the first layouts in part, then measures the best of them in full, then the others."""

    def __init__(self, problem: SearchProblem) -> None:
        self._problem = problem
        self._part: Fidelity | None = None
        self.least_node_s = 0.0
        """What the budget must have left for another proposal."""
        self.left_node_s: list[float | None] = []

    def propose(self, history: History) -> int | None:
        self.left_node_s.append(history.limits.left_node_s)
        if (
            history.limits.left_node_s is not None
            and history.limits.left_node_s < self.least_node_s
        ):
            return None
        waiting = [index for index in range(len(history.layouts)) if history.is_free(index)]
        probed = [index for index in waiting if index in history.cheap]
        is_exploring = len(history.cheap) + len(history.pending) < NUM_CHEAP
        chosen = waiting[0]
        if probed and not is_exploring:
            chosen = max(probed, key=lambda index: history.cheap[index].observation.objective or 0)
        elif is_exploring:
            chosen = next(index for index in waiting if index not in history.cheap)
        problem = self._problem
        parts = fidelities(history.layouts.layout(chosen), problem.model, problem.cluster)
        assert problem.costs is not None
        shortest = [each for each in parts if each.num_microbatches == parts[0].num_microbatches]
        self._part = shortest[-1] if parts and is_exploring else None
        return chosen

    def fidelity(self, _index: int) -> Fidelity | None:
        return self._part


@pytest.fixture
def proposers(monkeypatch: pytest.MonkeyPatch) -> list[PartFirst]:
    return part_first(monkeypatch)


def part_first(patch: pytest.MonkeyPatch) -> list[PartFirst]:
    """Every proposer that a search makes from here on in place of that of `guided`, in order."""
    made: list[PartFirst] = []

    def make(problem: SearchProblem, _seed: int) -> Proposer:
        made.append(PartFirst(problem))
        return made[-1]

    patch.setitem(registry.STRATEGIES, "guided", make)  # type: ignore[arg-type]
    return made


def make_large_spec(name: str = "large", *, probes: float = 7.5, **changes: object) -> CampaignSpec:
    """A campaign that cheap probes suit, whose budget is that of so many probes."""
    space = {"global_batch_size": 256, "tp": [1, 2], "pp": [1, 2], "micro_batch_size": [1, 2]}
    budget = {"node_hours": probes * PROBE_S / 3600.0}
    return make_spec(name, strategy="guided", space=space, budget=budget, **changes)


def run(store: Store, spec: CampaignSpec) -> CampaignRecord:
    return run_campaign(store, spec, fast)


def live_history(campaign: DrivenCampaign) -> History:
    return campaign.driver._searches[campaign.id]._strategy._history


def fast(layout: Layout) -> Outcome:
    """Its iterations take less than `PROBE_S`."""
    return completed(layout, tokens_per_s=1e6 * layout.num_devices / (layout.tp + layout.pp))


def cheap(trials: list[TrialRecord]) -> list[TrialRecord]:
    return [trial for trial in trials if trial.full_layout is not None]


@pytest.mark.usefixtures("proposers")
def test_cheap_probes_of_parts_come_first(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    spec = make_large_spec()
    with caplog.at_level(logging.INFO, logger="layout_tuner.tuner"):
        record = run(store, spec)
    trials = store.trials.find(record.id)
    assert cheap(trials) == trials[:NUM_CHEAP], "those of parts come first"
    for trial in trials[:NUM_CHEAP]:
        assert spec.legal_set().index_of(trial.full_layout) is not None
        assert trial.num_layers == 2 or trial.layout.pp > 1
        assert trial.layout.num_microbatches == 8 < trial.full_layout.num_microbatches
    assert "is n1-tp1-pp1-dp8-vpp1-mbs1-mb32-" in caplog.text
    assert ", a cheap probe: 8 of 32 micro-batches, 2 of 4 layers" in caplog.text


@pytest.mark.usefixtures("proposers")
def test_the_best_of_the_cheap_probes_is_measured_in_full_and_such_a_layout_wins(
    store: Store,
) -> None:
    record = run(store, make_large_spec())
    trials = store.trials.find(record.id)
    best = max(trials[:NUM_CHEAP], key=lambda trial: trial.objective(record.objective) or 0)
    assert trials[NUM_CHEAP].layout == best.full_layout
    assert (record.state, record.reason) == ("COMPLETED", "budget")
    assert record.message.endswith("completed)")
    winner = store.leaderboard.winner(record.id, record.objective)
    assert winner.trial.full_layout is None


def explored(store: Store) -> DrivenCampaign:
    """A campaign that has run three cheap probes, and proposed more."""
    campaign = DrivenCampaign(store, make_large_spec(), fast)
    campaign.turn(3)
    campaign.step()
    return campaign


@pytest.mark.usefixtures("proposers")
def test_the_search_hears_of_the_whole_layout_and_of_its_part(store: Store) -> None:
    campaign = explored(store)
    done = [trial for trial in campaign.trials if trial.state == "COMPLETED"]
    history = live_history(campaign)
    assert len(done) == len(history.cheap) == 3
    assert history.observations == {}
    for trial, (index, cheap_run) in zip(done, history.cheap.items(), strict=True):
        assert trial.full_layout == history.layouts.layout(index)
        part = fidelity_of(trial.full_layout, trial.layout, trial.num_layers)
        assert cheap_run.fidelity == part
        assert cheap_run.observation.step_time_s == trial.measurement.step_time_s
        has_all_layers = trial.num_layers == 4
        peak = trial.measurement.peak_memory_bytes if has_all_layers else None
        assert cheap_run.observation.peak_memory_bytes == peak, "fewer layers need less memory"
    assert {trial.num_layers for trial in done} == {2, 4}


@pytest.mark.usefixtures("proposers")
def test_a_search_that_is_rebuilt_has_heard_of_the_same_parts(store: Store) -> None:
    campaign = explored(store)
    history = live_history(campaign)
    rebuilt = CampaignSearch.rebuild(campaign.record, campaign.trials)._strategy._history
    assert list(rebuilt.pending) == list(history.pending) != []
    assert rebuilt.cheap == history.cheap


def test_the_search_hears_what_the_budget_has_left(
    store: Store, proposers: list[PartFirst]
) -> None:
    explored(store)
    budget_s = 7.5 * PROBE_S
    assert proposers[0].left_node_s[0] == pytest.approx(budget_s)
    assert proposers[0].left_node_s[-1] == pytest.approx(budget_s - 3 * PROBE_S)


@pytest.mark.parametrize(
    ("reason", "state"), [("out_of_memory", "infeasible"), ("crashed", "failed")]
)
@pytest.mark.usefixtures("proposers")
def test_a_part_that_fails_is_a_failure_of_its_layout(
    store: Store, reason: str, state: str
) -> None:
    campaign = DrivenCampaign(store, make_large_spec(), lambda _layout: failed(reason))
    campaign.turn()
    campaign.step()
    history = live_history(campaign)
    assert [observation.state for observation in history.observations.values()] == [state]
    assert history.cheap == {}


@pytest.mark.usefixtures("proposers")
def test_drivers_that_die_at_every_turn_search_as_one_driver(store: Store) -> None:
    ways = []
    for name, mortality in (("one", 0.0), ("other", 1.0)):
        campaign = DrivenCampaign(store, make_large_spec(name), fast, mortality=mortality)
        message = campaign.to_end().message
        ways.append((message, [trial.layout_key for trial in campaign.trials]))
    assert ways[0] == ways[1]


@pytest.mark.usefixtures("proposers")
def test_a_cancelled_cheap_probe_is_not_proposed_again(store: Store) -> None:
    campaign = DrivenCampaign(store, make_large_spec())
    campaign.step()
    first = campaign.trials[0]
    store.trials.cancel(first.id)
    campaign.step()
    history = live_history(campaign)
    assert first.full_layout not in [history.layouts.layout(index) for index in history.pending]
    assert not history.is_free(0)


@pytest.mark.usefixtures("proposers")
def test_the_baseline_is_never_probed_in_part(store: Store) -> None:
    baseline = {"tp": 2, "micro_batch_size": 2}
    campaign = DrivenCampaign(store, make_large_spec(baseline=baseline), fast)
    campaign.turn()
    campaign.step()
    first, second, *_ = campaign.trials
    assert (first.is_baseline, first.full_layout) == (True, None)
    assert second.full_layout is not None


@pytest.mark.usefixtures("proposers")
def test_a_campaign_that_measured_nothing_in_full_says_what_one_probe_takes(store: Store) -> None:
    spec = make_large_spec(probes=2.5)
    record = run(store, spec)
    trials = store.trials.find(record.id)
    assert len(cheap(trials)) == len(trials) > 1
    assert store.leaderboard.winner(record.id, record.objective) is None
    takes_s = full_probe_node_s(spec, trials)
    assert "3 completed); no layout was measured in full, so there is no winner" in record.message
    assert record.message.endswith(f"is expected to take {takes_s / 3600.0:.2g} node-hours")
    assert full_probe_node_s(spec, []) is None
    of_one_s = full_probe_node_s(spec, trials[:1])
    steps = spec.probe.warmup + spec.probe.iterations
    step_s = (of_one_s - ProbeCosts().start_s) / steps
    # Four times the micro-batches and twice the layers, of which neither is all of the work.
    assert 4.0 < step_s / trials[0].measurement.step_time_s < 8.5


@pytest.mark.usefixtures("proposers")
def test_a_campaign_is_not_converged_before_a_layout_was_measured_in_full(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        PartFirst, "possible_improvement", lambda _self, _history: 0.0, raising=False
    )
    spec = make_large_spec(probes=12, stop={"converged_within": 0.5, "remeasure": 0})
    monkeypatch.setattr("layout_tuner.tuner.driver.campaign_end.LEAST_COMPLETED", 2)
    record = run(store, spec)
    assert record.reason == "converged"
    assert store.leaderboard.winner(record.id, record.objective) is not None
    assert len(cheap(store.trials.find(record.id))) == NUM_CHEAP


def test_a_campaign_ends_when_its_rest_pays_for_no_full_probe(
    store: Store, proposers: list[PartFirst]
) -> None:
    campaign = DrivenCampaign(store, make_large_spec(probes=20), fast)
    campaign.step()
    proposers[0].least_node_s = 14.5 * PROBE_S
    record = campaign.to_end()
    trials = campaign.trials
    assert len(trials) == 7, "another one waited while the sixth ran"
    assert {trial.repeat_of for trial in trials} == {None}, "repeats would exceed the rest"
    assert (record.state, record.reason) == ("COMPLETED", "budget")
    left = 13 * PROBE_S / 3600
    assert record.message == (
        f"{left:.3g} of {20 * PROBE_S / 3600:g} node-hours left, too few for a full probe "
        "(7 completed)"
    )


@pytest.mark.parametrize("trials", [1, 3])
def test_the_last_trial_of_a_budget_runs_in_full_where_none_did(store: Store, trials: int) -> None:
    budget = {"node_hours": 1e5, "trials": trials}
    space = {"global_batch_size": 1 << 20, "tp": [1, 2], "pp": [1, 2], "micro_batch_size": [1, 2]}
    record = run(store, make_spec(strategy="guided", budget=budget, space=space))
    *parts, last = store.trials.find(record.id)
    assert cheap(parts) == parts
    assert len(parts) == trials - 1
    assert not last.is_cheap
    assert last.layout in [part.full_layout for part in parts] or not parts
    assert store.leaderboard.winner(record.id, record.objective) is not None


def test_campaigns_of_full_fidelity_or_a_budget_of_trials_have_no_cheap_probes(
    store: Store, proposers: list[PartFirst]
) -> None:
    for changes in ({"probe": {"fidelity": "full"}}, {"budget": {"trials": 3}}):
        spec = make_large_spec()
        other = CampaignSpec.from_mapping({**spec.to_mapping(), **changes})
        assert not other.uses_cheap_probes
        CampaignSearch.rebuild(submit(store, replace(other, name=f"other-{len(proposers)}")), [])
        assert proposers[-1]._problem.costs is None


def test_the_reserve_is_counted_by_what_full_probes_took() -> None:
    budget = make_large_spec(probes=90).budget  # 360 node-seconds
    spent = Spent(trials=40, node_seconds=280.0, wall_time_s=0.0)
    assert not is_reserved(budget, spent, 6), "six average trials of seven seconds"
    none_in_full = replace(spent, full_trials=0, full_node_seconds=0.0)
    assert not is_reserved(budget, replace(none_in_full, node_seconds=359.0), 6)
    some = replace(spent, full_trials=3, full_node_seconds=120.0)
    assert is_reserved(budget, some, 2), "two trials of forty seconds each"
    assert some.of_full_trial(140.0) == pytest.approx(20.0), "of any other cost, as much a share"


INSIDE = {"tp": 4, "pp": 2, "micro_batch_size": 2}
OUTSIDE = {"tp": 2, "recompute": "full"}
every_baseline = pytest.mark.parametrize("baseline", [INSIDE, OUTSIDE], ids=["inside", "outside"])


def with_baseline(baseline: dict[str, Any] = INSIDE, **changes: Any) -> CampaignSpec:
    return make_spec(**{"baseline": baseline, **changes})


@pytest.mark.parametrize(
    ("strategy", "baseline"),
    [("random", OUTSIDE), ("deephyper", INSIDE), ("guided", OUTSIDE), ("model-only", INSIDE)],
)
def test_a_baseline_is_measured_first_and_counts_in_the_budget(
    store: Store, strategy: str, baseline: dict[str, Any]
) -> None:
    spec = with_baseline(baseline, strategy=strategy, budget={"trials": 3})
    campaign = run_campaign(store, spec)
    trials = store.trials.find(campaign.id)
    assert campaign.message == "3 of 3 trials done (3 completed)"
    assert trials[0].layout == spec.baseline
    first = [trial for trial in trials if trial.repeat_of is None]
    assert [trial.is_baseline for trial in first] == [True] + [False] * (len(first) - 1)
    assert len(set(layouts_of(first))) == len(first)


@pytest.mark.parametrize(("baseline", "more"), [(INSIDE, 0), (OUTSIDE, 1)])
def test_an_exhaustive_campaign_measures_no_layout_twice(
    store: Store, baseline: dict[str, Any], more: int
) -> None:
    space = {"global_batch_size": 16, "tp": [1, 4], "pp": [1, 2], "micro_batch_size": 2}
    spec = with_baseline(baseline, strategy="exhaustive", budget={}, space=space)
    campaign = run_campaign(store, spec)
    tried = layouts_of(store.trials.find(campaign.id))
    assert campaign.reason == "exhausted"
    assert tried[0] == spec.baseline
    assert len(tried) == len(set(tried)) == len(spec.legal_set()) + more


def test_several_workers_start_with_the_baseline_and_go_on_beside_it(store: Store) -> None:
    campaign = DrivenCampaign(store, with_baseline(strategy="guided"))
    campaign.workers += [FakeWorker(store, name=f"w{number}") for number in range(2, 4)]
    campaign.step()
    assert len(campaign.trials) > 2
    (first,) = take_leases(store, campaign.worker.id, 1)
    assert first.layout == campaign.trials[0].layout == with_baseline().baseline
    campaign.until_completed(5)
    post_outcome(store, first.trial_id, first.attempt, measured(first.layout))
    campaign.to_end()
    assert len(set(layouts_of(campaign.trials))) == 6


@every_baseline
def test_drivers_that_die_at_every_turn_propose_the_baseline_once_and_search_as_one_driver(
    store: Store, baseline: dict[str, Any]
) -> None:
    ways = []
    for name, mortality in (("a", 0.0), ("b", 1.0)):
        spec = with_baseline(baseline, name=name, strategy="guided", knowledge="none")
        campaign = DrivenCampaign(store, spec, mortality=mortality)
        campaign.to_end()
        ways.append(layouts_of(campaign.trials))
        first = [trial for trial in campaign.trials if trial.repeat_of is None]
        assert [trial.number for trial in first if trial.is_baseline] == [1]
        assert len(set(layouts_of(first))) == len(first)
    assert len(campaign.drivers) > 3
    assert ways[0] == ways[1]


def test_a_cancelled_baseline_is_not_proposed_again(store: Store) -> None:
    campaign = DrivenCampaign(store, with_baseline(budget={"trials": 2}), mortality=1.0)
    campaign.step()
    store.trials.cancel(store.trials.by_number(campaign.id, 1).id)
    campaign.to_end()
    assert [trial.state for trial in campaign.trials if trial.is_baseline] == ["CANCELLED"]


@pytest.mark.parametrize(("baseline", "reason"), [(INSIDE, "out_of_memory"), (OUTSIDE, "crashed")])
def test_a_baseline_that_fails_is_reported_and_the_campaign_goes_on(
    store: Store, baseline: dict[str, Any], reason: str
) -> None:
    spec = with_baseline(baseline, budget={"trials": 2})

    def judge(layout: Layout) -> Outcome:
        return failed(reason) if layout == spec.baseline else measured(layout)

    campaign = run_campaign(store, spec, judge)
    found = store.baselines.of_campaigns([campaign])[campaign.id]
    assert (found.trial_number, found.reason) == (1, reason)
    assert (found.value, found.gain) == (None, None)
    assert store.campaigns.count_trials(campaign.id)["COMPLETED"] == 1
    assert campaign.state == "COMPLETED"


@every_baseline
def test_the_search_learns_from_a_baseline_inside_and_one_outside_is_no_warning(
    store: Store, caplog: pytest.LogCaptureFixture, baseline: dict[str, Any]
) -> None:
    spec = with_baseline(baseline, strategy="guided", budget={"trials": 2})
    with caplog.at_level(logging.WARNING, logger="layout_tuner.tuner"):
        campaign = run_campaign(store, spec)
        trials = store.trials.find(campaign.id)
        search = CampaignSearch.rebuild(campaign, trials)
    assert caplog.records == []
    index = spec.legal_set().index_of(spec.baseline)
    told = search._strategy._history.observations.get(index)
    expected = None if baseline == OUTSIDE else trials[0].objective(spec.objective)
    assert (told and told.objective) == expected


def test_a_campaign_whose_winner_is_outside_of_the_space_ends_in_order(store: Store) -> None:
    spec = with_baseline(OUTSIDE, strategy="guided", stop={"remeasure": 2}, budget={"trials": 8})

    def judge(layout: Layout) -> Outcome:
        fast = completed(layout, tokens_per_s=1e5)
        return fast if layout == spec.baseline else measured(layout)

    campaign = run_campaign(store, spec, judge)
    assert (campaign.state, campaign.reason) == ("COMPLETED", "budget")
    gain = store.baselines.of_campaigns([campaign])[campaign.id].gain
    assert (gain.ratio, gain.ratio_low, gain.ratio_high) == (1.0, 1.0, 1.0)


def test_a_campaign_that_starts_from_another_measures_its_own_baseline(store: Store) -> None:
    spec = with_baseline(budget={"trials": 1})
    run_campaign(store, spec)
    changes = {"strategy": "guided", "budget": {"trials": 1}, "start_from": ["first"]}
    again = run_campaign(store, with_baseline(name="second", **changes))
    (first, *_) = store.trials.find(again.id)
    assert first.layout == spec.baseline
    assert first.is_baseline
