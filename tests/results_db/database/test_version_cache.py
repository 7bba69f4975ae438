"""A cache of results: exact for a version, and bounded."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from results_db.database.version_cache import VersionCache


def counting(value: object) -> tuple[Callable[[], object], list[object]]:
    """A function that computes a value, and the list of its calls."""
    calls: list[object] = []

    def compute() -> object:
        calls.append(value)
        return value

    return compute, calls


def test_a_result_is_computed_once_for_each_version_and_question() -> None:
    cache = VersionCache()
    compute, calls = counting("result")
    for _ in range(3):
        assert cache.get(1, "v1", ("a", 1), compute) == "result"
    assert len(calls) == 1
    for campaign, version, asked in ((1, "v2", ("a", 1)), (1, "v2", ("a", 2)), (2, "v2", "a")):
        assert cache.get(campaign, version, asked, compute) == "result"
    assert len(calls) == 4


def test_a_result_of_none_is_kept_too() -> None:
    cache = VersionCache()
    compute, calls = counting(None)
    assert cache.get(1, "v", "a", compute) is cache.get(1, "v", "a", compute) is None
    assert len(calls) == 1


def test_a_newer_version_replaces_the_older_one() -> None:
    cache = VersionCache()
    old, new = counting("old"), counting("new")
    assert cache.get(1, "v1", "a", old[0]) == "old"
    assert cache.get(1, "v2", "a", new[0]) == "new"
    # A transaction that began before the change still gets what it sees.
    assert cache.get(1, "v1", "a", old[0]) == "old"
    assert len(old[1]) == 2


def test_the_results_that_were_used_last_are_kept_within_the_bound() -> None:
    ids = np.zeros(1000, np.int64)
    cache = VersionCache(max_bytes=3 * ids.nbytes)
    made = {name: counting(ids) for name in "abcd"}
    for name in "abcabd":
        cache.get(1, "v", name, made[name][0])
    for name in "abd":
        cache.get(1, "v", name, made[name][0])
    assert [len(made[name][1]) for name in "abcd"] == [1, 1, 1, 1]
    cache.get(1, "v", "c", made["c"][0])
    assert len(made["c"][1]) == 2


def test_a_result_larger_than_the_bound_displaces_nothing() -> None:
    small, large = np.zeros(10, np.int64), np.zeros(1000, np.int64)
    cache = VersionCache(max_bytes=small.nbytes)
    kept, too_large = counting(small), counting(large)
    cache.get(1, "v", "small", kept[0])
    assert cache.get(1, "v", "large", too_large[0]) is large
    cache.get(1, "v", "small", kept[0])
    assert len(kept[1]) == 1
