"""Losses that are off: what differs, how layouts vote, and the one verdict that is kept."""

from __future__ import annotations

import tempfile
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import repeat
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layout_tuner.protocol.measurement import Iteration
from layout_tuner.protocol.outcome import Outcome
from layout_tuner.results_db.database.data_dir import DataDir
from layout_tuner.results_db.records import TrialRecord
from layout_tuner.results_db.store import Store
from layout_tuner.results_db.trials.loss_check import (
    MAX_TOLERANCE,
    MeasuredRun,
    first_difference,
    loss_tolerance,
    vote,
)
from layout_tuner.search_spaces.layouts.job_settings import JobSettings, JobValue
from layout_tuner.search_spaces.layouts.layout import PRECISIONS, Layout, Precision
from tests.kit.postgres import upgraded
from tests.kit.store import (
    at_once,
    completed,
    failed,
    lease_one,
    make_campaign,
    make_iterations,
    make_measurement,
    make_worker,
    post_outcome,
    ranked_trials,
    run_trial,
)

pytestmark = pytest.mark.sqlite_is_enough

LAYOUTS = {
    "A": Layout(num_microbatches=8),
    "B": Layout(dp=2, num_microbatches=4),
    "C": Layout(tp=2, num_microbatches=8),
    "D": Layout(pp=2, num_microbatches=8),
    "E": Layout(micro_batch_size=2, num_microbatches=4),
}
"""All of one batch."""

OFFSETS = {"x": 0.0, "y": 0.5, "z": 1.0, "p": 5e-4, "q": 7e-4}
"""Differences of the losses from those of the factory, from the third iteration on. At a loss of
5.8, p is within the fp32 tolerance of x, q is not, and p and q agree with each other."""


def trained(layout: Layout, losses: str, **changes: object) -> Outcome:
    """A completed outcome with other losses, which start alike."""
    iterations = tuple(
        replace(i, loss=i.loss + (OFFSETS[losses] if i.index >= 2 else 0.0))
        for i in make_measurement(layout, **changes).iterations
    )
    return completed(layout, **{"iterations": iterations, **changes})


class Run:
    """A campaign in a store, to which runs are told as words: "Ax" is layout A with losses x."""

    def __init__(self, store: Store, name: str = "first", **fields: object) -> None:
        self.store = store
        self.campaign = make_campaign(store, name, **fields)
        self.worker = make_worker(store, f"{name}-worker").id

    def tell(
        self, words: str, job: Mapping[str, JobValue] | None = None, **changes: object
    ) -> None:
        for layout_name, losses in words.split():
            layout = replace(LAYOUTS[layout_name], job=JobSettings(job or {}))
            outcome = trained(layout, losses, **changes)
            run_trial(self.store, self.campaign, layout, outcome, worker=self.worker)

    def trial(self, number: int) -> TrialRecord:
        return self.store.trials.by_number(self.campaign, number)

    def off(self) -> list[int]:
        """Numbers of the trials that do not count."""
        return [t.number for t in self.store.trials.find(self.campaign) if t.state == "FAILED"]


@pytest.fixture
def run(store: Store) -> Run:
    return Run(store)


WORDS = {
    "Ax Bx Cy": {
        3: "loss 6.3 of trial 3 at iteration 2 is off the 5.8 of trial 1 by more than 0.0001 of it, "
        "which is what fp32 allows there; several layouts agree with trial 1"
    },
    "Ax By": {2: "trial 1 was first and stands, and both are measured twice"},
    # A third layout turns the vote against the first.
    "Ax By Ax By Cy": {
        1: "loss 5.8 of trial 1 at iteration 2 is off the 6.3 of trial 2",
        3: "is off the 6.3 of trial 2",
    },
    "Ax By Ay": {1: "which does not reproduce itself", 3: "trial 1"},
    # A repeat that agrees with its layout's first run is steady, at the edge of what is allowed,
    # and another layout is compared with the first run of the same losses.
    "Ax Bp Bq Cq": {4: "trial 1"},
}
"""By runs that are told, what is said of those that do not count."""


@pytest.mark.parametrize("told", WORDS)
def test_a_trial_whose_losses_are_off_fails_as_diverged_and_says_why(run: Run, told: str) -> None:
    run.tell(told)
    assert run.off() == list(WORDS[told])
    for number, words in WORDS[told].items():
        assert run.trial(number).reason == "diverged"
        assert words in run.trial(number).message
    counting = [t for t in run.store.trials.find(run.campaign) if t.number not in WORDS[told]]
    assert {(t.state, t.reason, t.message) for t in counting} == {("COMPLETED", None, "")}
    ranked = run.store.leaderboard.ranked_layouts(run.campaign)
    assert {id_ for each in ranked for id_ in each.trial_ids} == {t.id for t in counting}


def test_a_fast_layout_that_is_off_does_not_win_and_its_measurement_is_kept(run: Run) -> None:
    run.tell("Ax Bx")
    with run.store._db.write() as session:  # as if they had never been compared
        session.connection().exec_driver_sql("UPDATE measurements SET same_losses_as = NULL")
    run.tell("Cy", tokens_per_s=1e6)
    ranked = ranked_trials(run.store, run.campaign, "tokens_per_s")
    assert {trial.number for trial in ranked} == {1, 2}
    detail = run.store.trials.detail(run.trial(3).id)
    assert detail.trial.measurement.tokens_per_s == 1e6
    assert detail.iterations[2].loss == pytest.approx(6.3)


def test_two_layouts_that_disagree_are_both_measured_again_and_not_for_ever(run: Run) -> None:
    run.tell("Ax By")
    assert run.store.trials.in_doubt(run.campaign) == [run.trial(1).id, run.trial(2).id]
    for left in ([run.trial(2).id], []):
        (first, *_) = run.store.trials.in_doubt(run.campaign)
        run.store.trials.repeat(first)
        assert run.store.trials.in_doubt(run.campaign) == left
        lease = lease_one(run.store, run.worker)
        post_outcome(run.store, lease.trial_id, lease.attempt, failed("timeout"))
    assert run.store.trials.in_doubt(run.campaign) == [], "a repeat that failed is not repeated"
    assert run.trial(1).state == "COMPLETED"


def test_whoever_reads_endings_in_order_hears_of_a_verdict_only_when_it_turns(run: Run) -> None:
    heard = 0
    for words, news in (
        ("Ax By", [(1, "COMPLETED"), (2, "FAILED")]),
        ("Cx", [(3, "COMPLETED")]),
        ("Dy", [(4, "FAILED")]),
        (
            "Ey",
            [(5, "COMPLETED"), (1, "FAILED"), (2, "COMPLETED"), (3, "FAILED"), (4, "COMPLETED")],
        ),
    ):
        run.tell(words)
        told = run.store.trials.ended_since(run.campaign, heard)
        assert [(t.number, t.state) for t in told] == news
        heard = told[-1].ended_seq or 0


def test_precisions_batches_and_campaigns_are_not_compared_with_each_other(run: Run) -> None:
    run.tell("Ax")
    for changes in ({"precision": "bf16"}, {"num_microbatches": 2}):
        layout = replace(LAYOUTS["B"], **changes)  # type: ignore[arg-type]
        run_trial(run.store, run.campaign, layout, trained(layout, "z"))
    other = Run(run.store, "second")
    other.tell("By")
    assert run.off() == other.off() == []


KNOBS = {
    "bucket": {"search": [1, 2], "kind": "count", "values": [1, 2], "default": 1},
    "moments": {"search": ["fp32", "bf16"], "kind": "word", "values": ["fp32", "bf16"]}
    | {"default": "fp32", "losses": "other"},
}


def test_jobs_of_one_layout_are_compared_also_where_a_knob_should_not_change_losses(
    store: Store,
) -> None:
    run = Run(store, space={"job": KNOBS})
    run.tell("Ax Bx")
    run.tell("Cx Cy", job={"bucket": 2})
    run.tell("Ay", job={"bucket": 2})
    assert run.off() == [3, 4, 5]
    assert "several layouts agree with trial 1" in run.trial(5).message


def test_jobs_that_differ_in_a_knob_of_other_losses_are_not_compared(store: Store) -> None:
    run = Run(store, space={"job": KNOBS})
    run.tell("Ax Bx")
    run.tell("Az Bz Cz", job={"moments": "bf16"})
    assert run.off() == []
    run.tell("Ey", job={"moments": "bf16", "bucket": 2})
    assert run.off() == [6]
    assert "several layouts agree with trial 3" in run.trial(6).message


def test_a_job_alone_in_its_group_is_not_in_doubt(store: Store) -> None:
    run = Run(store, space={"job": KNOBS})
    run.tell("Ax")
    run.tell("Ay", job={"moments": "bf16"})
    assert store.trials.in_doubt(run.campaign) == []
    run.tell("By", job={"bucket": 2})
    assert store.trials.in_doubt(run.campaign) == [run.trial(number).id for number in (1, 3)]


def test_an_outcome_that_is_posted_again_is_answered_as_the_first_time(run: Run) -> None:
    run.tell("Ax Bx")
    layout = LAYOUTS["C"]
    trial = run.store.trials.add(run.campaign, layout)
    lease_one(run.store, run.worker)
    first = post_outcome(run.store, trial.id, 1, trained(layout, "y"))
    assert (first.accepted, first.state) == (True, "FAILED")
    before = run.store.trials.find(run.campaign)
    assert post_outcome(run.store, trial.id, 1, trained(layout, "y")) == first
    assert not post_outcome(run.store, trial.id, 1, failed("diverged")).accepted
    assert run.store.trials.find(run.campaign) == before


@pytest.mark.sqlite_is_enough(False)
def test_outcomes_that_come_at_once_are_judged_as_one(run: Run) -> None:
    words = ["Ax", "By", "Cy", "Dx", "Ey"]
    for layout_name, _ in words:
        run.store.trials.add(run.campaign, LAYOUTS[layout_name])
    leases = [lease_one(run.store, run.worker).trial_id for _ in words]

    def report(trial_id: int, told: str) -> bool:
        outcome = trained(LAYOUTS[told[0]], told[1])
        return post_outcome(run.store, trial_id, 1, outcome).accepted

    assert all(at_once(*map(partial, repeat(report), leases, words)))
    assert run.off() == [1, 4], "three layouts against two, in whatever order they came"


def assert_one_verdict(store: Store, trials: list[TrialRecord]) -> None:
    """What counts has the same losses, and no layout that has others too."""
    by_losses: dict[str, set[float]] = {}
    for trial in trials:
        losses = store.trials.detail(trial.id).iterations
        by_losses.setdefault(trial.layout_key, set()).add(losses[2].loss)
    steady = {key: next(iter(found)) for key, found in by_losses.items() if len(found) == 1}
    counting = [trial for trial in trials if trial.state == "COMPLETED"]
    assert bool(counting) == bool(steady)
    assert len({steady[trial.layout_key] for trial in counting}) <= 1


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    words=st.lists(
        st.sampled_from([f"{a}{b}" for a in "ABCD" for b in "xy"]), min_size=1, max_size=7
    )
)
def test_any_order_of_outcomes_leaves_one_verdict_that_outlives_restarts(words: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = Store.open(upgraded(Path(folder)))
        run = Run(store)
        for word in words:
            run.tell(word)
        trials = store.trials.find(run.campaign)
        assert_one_verdict(store, trials)
        places = [trial.ended_seq for trial in store.trials.ended_since(run.campaign, 0)]
        assert len(places) == len(set(places)) == len(trials)
        doubtful = store.trials.in_doubt(run.campaign)
        store.close()
        again = Store.open(DataDir(Path(folder)))
        assert again.trials.find(run.campaign) == trials
        assert again.trials.in_doubt(run.campaign) == doubtful
        again.close()


def iterations(losses: Sequence[float], *, skipped: Sequence[int] = ()) -> list[Iteration]:
    return [
        replace(each, loss=loss, grad_norm=None if each.index in skipped else 1.0)
        for each, loss in zip(
            make_iterations(1.0, timed=len(losses), warmup=0), losses, strict=True
        )
    ]


LOSSES = st.lists(st.floats(0, 1e4), min_size=1, max_size=20)


@given(losses=LOSSES, precision=st.sampled_from(PRECISIONS), data=st.data())
def test_losses_agree_just_as_far_as_the_precision_allows(
    losses: list[float], precision: Precision, data: st.DataObject
) -> None:
    allowed = [loss_tolerance(precision, i) * max(loss, 1.0) for i, loss in enumerate(losses)]
    shares = data.draw(st.lists(st.floats(-0.99, 0.99), min_size=len(losses), max_size=len(losses)))
    # A share of what is allowed, downwards as far as there is loss.
    moved = [
        max(loss + share * more, 0.0)
        for loss, share, more in zip(losses, shares, allowed, strict=True)
    ]
    own, other = iterations(losses), iterations(moved)
    assert first_difference(own, other, precision) is None
    place = data.draw(st.integers(0, len(losses) - 1))
    other[place] = replace(other[place], loss=losses[place] + 1.6 * allowed[place])
    found = first_difference(own, other, precision)
    assert (found.index, found.loss) == (place, losses[place])
    assert found.other_loss == other[place].loss


@given(one=LOSSES, other=LOSSES, precision=st.sampled_from(PRECISIONS))
def test_a_difference_is_the_same_both_ways(
    one: list[float], other: list[float], precision: Precision
) -> None:
    here = first_difference(iterations(one), iterations(other), precision)
    there = first_difference(iterations(other), iterations(one), precision)
    assert (here and here.index) == (there and there.index)


def test_fp32_is_held_to_more_than_bf16() -> None:
    own, other = iterations([6.9, 6.5]), iterations([6.9, 6.51])
    found = first_difference(own, other, "fp32")
    assert (found.index, found.loss, found.other_loss, found.tolerance) == (1, 6.5, 6.51, 1e-4)
    assert first_difference(own, other, "bf16") is None
    assert first_difference(own, other, "fp16") is None
    # What only one of the two has is not compared.
    assert first_difference(iterations([6.9]), iterations([6.9, 1.0]), "fp32") is None


@pytest.mark.parametrize(("both", "is_found"), [(True, True), (False, False)])
def test_after_a_step_that_only_one_skipped_nothing_is_compared(both: bool, is_found: bool) -> None:
    own = iterations([6.9, 6.5, 6.1], skipped=[0])
    other = iterations([6.9, 6.9, 6.5], skipped=[0] if both else [])
    assert (first_difference(own, other, "fp16") is not None) == is_found
    # The loss of the skipped step itself was computed before it.
    other[0] = replace(other[0], loss=9.0)
    assert first_difference(own, other, "fp16") is not None


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_tolerance_is_steady_at_first_then_grows_to_its_cap(precision: Precision) -> None:
    tolerances = [loss_tolerance(precision, index) for index in range(40)]
    assert len(set(tolerances[:4])) == 1
    assert tolerances[4] == 2 * tolerances[3]
    assert tolerances == sorted(tolerances)
    assert tolerances[-1] == MAX_TOLERANCE == loss_tolerance(precision, 10_000)


def runs_of(told: str) -> list[MeasuredRun]:
    """Runs as words: the layout, then its losses, each a letter; "Ax" is A with losses x."""
    first: dict[str, int] = {}
    runs = []
    for trial_id, (layout, losses) in enumerate(told.split(), start=1):
        earliest = first.setdefault(losses, trial_id)
        told_of = {"layout_key": layout, "state": "COMPLETED", "same_losses_as": earliest}
        runs.append(MeasuredRun(trial_id=trial_id, number=trial_id, **told_of))
    return runs


@pytest.mark.parametrize(
    ("told", "faults", "again"),
    [
        ("", [], []),
        ("Ax Bx Cx", [], []),
        # Nobody knows: the first stands, both are measured again.
        ("Ax By", [2], [1, 2]),
        ("Ax By Ax", [2], [2]),
        ("Ax By Cz", [2, 3], [1, 2, 3]),
        # A third one decides.
        ("Ax By Cx", [2], []),
        ("Ax By Cy", [1], []),
        ("Ax By Ax By Cy", [1, 3], []),
        # One that does not reproduce itself has no vote, and no run that counts.
        ("Ax By Ay", [1, 3], []),
        ("Ax By Ax Bx", [2, 4], []),
        ("Ax Ay", [1, 2], []),
        # Many against one, and a majority that turns.
        ("Ax Bx Cy Dy", [3, 4], []),
        ("Ax Bx Cy Dy Ey", [1, 2], []),
        # A repeat is no second vote.
        ("Ax By By By Cx", [2, 3, 4], []),
    ],
)
def test_layouts_vote_on_which_losses_count(told: str, faults: list[int], again: list[int]) -> None:
    result = vote(runs_of(told))
    assert sorted(result.faults) == faults
    assert list(result.again) == again


RUNS = st.lists(st.sampled_from([f"{a}{b}" for a in "ABCDE" for b in "xyz"]), max_size=14).map(
    lambda words: runs_of(" ".join(words))
)


@given(runs=RUNS)
def test_the_losses_that_count_are_those_of_most_layouts(runs: list[MeasuredRun]) -> None:
    result = vote(runs)
    losses_of: dict[str, set[int | None]] = defaultdict(set)
    for run in runs:
        losses_of[run.layout_key].add(run.same_losses_as)
    steady = {key: next(iter(found)) for key, found in losses_of.items() if len(found) == 1}
    votes = Counter(steady.values())
    counting = [run for run in runs if run.trial_id not in result.faults]
    assert bool(counting) == bool(steady), "where a layout reproduces itself, somebody counts"
    assert len({run.same_losses_as for run in counting}) <= 1
    for run in counting:
        assert run.layout_key in steady
        assert votes[run.same_losses_as] == max(votes.values())
    by_id = {run.trial_id: run for run in runs}
    for trial_id, fault in result.faults.items():
        assert by_id[fault.against].same_losses_as != by_id[trial_id].same_losses_as
        assert (fault.against in result.faults) == (fault.kind == "unsteady")


@given(runs=RUNS)
def test_a_layout_is_measured_again_once_while_all_are_alone(runs: list[MeasuredRun]) -> None:
    result = vote(runs)
    times = Counter(run.layout_key for run in runs)
    by_id = {run.trial_id: run for run in runs}
    assert all(times[by_id[trial_id].layout_key] == 1 for trial_id in result.again)
    if any(fault.kind == "off" and fault.is_settled for fault in result.faults.values()):
        assert not result.again
