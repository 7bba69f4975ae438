"""The vote of layouts on whose losses are right."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from results_db.trials.loss_check import MeasuredRun, Vote, vote


def runs_of(told: str) -> list[MeasuredRun]:
    """Runs as words: the layout, then its losses, each a letter; "Ax" is A with losses x."""
    first: dict[str, int] = {}
    runs = []
    for trial_id, (layout, losses) in enumerate(told.split(), start=1):
        earliest = first.setdefault(losses, trial_id)
        runs.append(
            MeasuredRun(
                trial_id=trial_id,
                number=trial_id,
                layout_key=layout,
                state="COMPLETED",
                same_losses_as=earliest,
            )
        )
    return runs


def vote_on(told: str) -> Vote:
    return vote(runs_of(told))


@pytest.mark.parametrize(
    ("told", "faults", "again"),
    [
        ("", [], []),
        ("Ax", [], []),
        ("Ax Bx Cx", [], []),
        # Nobody knows: the first stands, both are measured again.
        ("Ax By", [2], [1, 2]),
        ("Ax By Ax", [2], [2]),
        ("Ax By Ax By", [2, 4], []),
        ("Ax By Cz", [2, 3], [1, 2, 3]),
        # A third one decides.
        ("Ax By Cx", [2], []),
        ("Ax By Cy", [1], []),
        ("Ax By Ax By Cy", [1, 3], []),
        # One that does not reproduce itself has no vote, and no run that counts.
        ("Ax By Az", [1, 3], []),
        ("Ax By Ay", [1, 3], []),
        ("Ax By Ax Bx", [2, 4], []),
        ("Ax Ay", [1, 2], []),
        ("Ax Ay Bx", [1, 2], []),
        # Many against one, and a majority that turns.
        ("Ax Bx Cy", [3], []),
        ("Ax Bx Cy Dy", [3, 4], []),
        ("Ax Bx Cy Dy Ey", [1, 2], []),
        # A repeat is no second vote.
        ("Ax By By By Cx", [2, 3, 4], []),
    ],
)
def test_the_vote(told: str, faults: list[int], again: list[int]) -> None:
    result = vote_on(told)
    assert sorted(result.faults) == faults
    assert list(result.again) == again


def test_a_fault_names_a_run_that_counts_and_whether_it_is_settled() -> None:
    open_fault = vote_on("Ax By").faults[2]
    assert (open_fault.kind, open_fault.against, open_fault.is_settled) == ("off", 1, False)
    settled = vote_on("Ax Bx Cy").faults[3]
    assert (settled.kind, settled.against, settled.is_settled) == ("off", 1, True)
    # Trial 1 has the right losses, and its layout does not always have them.
    off = vote_on("Ax Bx Ay Cy").faults
    assert (off[4].kind, off[4].against) == ("off", 2)
    assert (off[1].kind, off[1].against, off[3].against) == ("unsteady", 3, 1)


RUNS = st.lists(st.sampled_from([f"{a}{b}" for a in "ABCDE" for b in "xyz"]), max_size=14).map(
    lambda words: runs_of(" ".join(words))
)


@given(runs=RUNS)
def test_what_counts_has_the_same_losses_and_no_others_have_more_layouts(
    runs: list[MeasuredRun],
) -> None:
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
def test_measured_again_is_each_layout_once_and_only_while_all_are_alone(
    runs: list[MeasuredRun],
) -> None:
    result = vote(runs)
    times = Counter(run.layout_key for run in runs)
    by_id = {run.trial_id: run for run in runs}
    assert all(times[by_id[trial_id].layout_key] == 1 for trial_id in result.again)
    if any(fault.kind == "off" and fault.is_settled for fault in result.faults.values()):
        assert not result.again
