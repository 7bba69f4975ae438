"""A node that fails probes which others complete is quarantined, and nothing else is."""

from __future__ import annotations

import pytest

from search_spaces.protocol.outcome import FailureReason, Outcome
from workers.worker.roster import NodeHistory


def failure(reason: FailureReason = "crashed", *, node: str = "") -> Outcome:
    return Outcome(state="failed", reason=reason, message="rank 3 was killed", node=node)


def strike(history: NodeHistory, probe: int, node: str, *, elsewhere: str = "z") -> dict[str, str]:
    assert history.failed(probe, [node], failure(node=node))
    return history.completed(probe, [elsewhere])


def test_a_node_that_fails_two_probes_which_others_complete_is_quarantined() -> None:
    history = NodeHistory()
    assert strike(history, 7, "a") == {}
    why = "failed trials 7, 9 that other nodes completed; last crashed: rank 3 was killed"
    assert strike(history, 9, "a", elsewhere="b") == {"a": why}
    assert strike(history, 11, "a") == {}, "it is in quarantine"


def test_a_layout_that_fails_everywhere_blames_no_node() -> None:
    history = NodeHistory()
    for probe in range(5):
        assert history.failed(probe, ["a"], failure(node="a"))
        assert not history.failed(probe, ["b"], failure(node="b"))
        assert history.completed(probe, ["b"]) == {}
    assert not history.strikes("a")
    assert not history.strikes("b")


@pytest.mark.parametrize(
    ("state", "reason", "is_doubted"),
    [
        ("failed", "crashed", True),
        ("failed", "timeout", True),
        ("failed", "node_lost", True),
        ("infeasible", "out_of_memory", False),
        ("failed", "diverged", False),
        ("cancelled", "cancelled", False),
        ("failed", "unsupported", False),
    ],
)
def test_failures_that_may_be_the_nodes_get_a_second_opinion_and_no_others(
    state: str, reason: str, is_doubted: bool
) -> None:
    outcome = Outcome.from_mapping({"state": state, "reason": reason, "message": "so"})
    assert bool(NodeHistory().failed(1, ["a"], outcome)) is is_doubted


@pytest.mark.parametrize(
    ("named", "struck"),
    [("b", {"b"}), ("elsewhere", {"a", "b"})],
    ids=["a-node-of-the-probe", "a-node-of-another-probe"],
)
def test_the_node_that_the_failure_names_is_blamed_alone(named: str, struck: set[str]) -> None:
    history = NodeHistory()
    history.failed(1, ["a", "b"], failure(node=named))
    history.completed(1, ["c", "d"])
    nodes = ("a", "b", "elsewhere")
    assert {node for node in nodes if [one.probe for one in history.strikes(node)] == [1]} == struck


def test_a_node_that_two_failures_without_a_name_share_is_found() -> None:
    history = NodeHistory()
    history.failed(1, ["a", "b"], failure("timeout"))
    assert history.completed(1, ["a", "d"]) == {}
    assert not history.strikes("a"), "it gave the second opinion"
    assert history.strikes("b")[0].is_alone
    history.failed(2, ["b", "c"], failure("timeout"))
    assert history.completed(2, ["d", "e"]).keys() == {"b"}


def test_a_node_that_completes_a_probe_is_rid_of_shared_blame_and_not_of_its_own() -> None:
    history = NodeHistory()
    history.failed(1, ["a", "b"], failure("timeout"))
    history.completed(1, ["c", "d"])
    history.completed(2, ["a"])
    assert not history.strikes("a")
    assert history.strikes("b")
    strike(history, 3, "a")
    history.completed(4, ["a"])
    assert strike(history, 5, "a").keys() == {"a"}


def test_a_second_opinion_that_never_came_says_nothing_and_a_released_node_starts_anew() -> None:
    history = NodeHistory()
    history.failed(1, ["a"], failure())
    history.forget(1)
    history.completed(1, ["b"])
    assert not history.strikes("a")
    strike(history, 2, "a")
    assert strike(history, 3, "a").keys() == {"a"}
    history.release("a")
    assert strike(history, 4, "a") == {}
    assert strike(history, 5, "a").keys() == {"a"}
