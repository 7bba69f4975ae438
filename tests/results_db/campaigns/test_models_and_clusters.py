"""Models and clusters of the users' own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from results_db.actor import Actor
from results_db.campaigns import models_and_clusters
from results_db.campaigns.models_and_clusters import DescriptionKind
from results_db.errors import (
    DescriptionLimitError,
    DescriptionNotFoundError,
    DescriptionOwnedError,
)
from results_db.store import Store
from tests.kit.store import TurnableClock

pytestmark = pytest.mark.sqlite_is_enough

KINDS: list[DescriptionKind] = ["model", "cluster"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_or_cluster_is_stored_replaced_and_deleted(
    store: Store, clock: TurnableClock, kind: DescriptionKind
) -> None:
    physics = store.by(Actor(name="physics", role="submitter"))
    made, is_new = physics.catalogue.put(kind, "mine", {"size": 1}, notes="guessed")
    assert (is_new, made.created_by, made.notes) == (True, "physics", "guessed")
    clock.forward(60)
    again, is_new = store.catalogue.put(kind, "mine", {"size": 2})
    assert (is_new, again.created_by, again.description) == (False, "physics", {"size": 2})
    assert again.created_at < again.updated_at
    assert store.catalogue.get(kind, "mine") == again
    store.catalogue.delete(kind, "mine")
    assert store.catalogue.find(kind) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_submitter_changes_nobody_elses_whatever_the_gate_saw_before(
    store: Store, kind: DescriptionKind
) -> None:
    physics = store.by(Actor(name="physics", role="submitter"))
    chemistry = store.by(Actor(name="chemistry", role="submitter"))
    made, _ = physics.catalogue.put(kind, "mine", {"size": 1})
    with pytest.raises(DescriptionOwnedError, match="belongs to 'physics'"):
        chemistry.catalogue.put(kind, "mine", {"size": 2})
    with pytest.raises(DescriptionOwnedError, match="belongs to 'physics'"):
        chemistry.catalogue.delete(kind, "mine")
    assert store.catalogue.get(kind, "mine") == made
    store.by(Actor(name="chemistry", role="admin")).catalogue.put(kind, "mine", {"size": 3})
    physics.catalogue.delete(kind, "mine")


@pytest.mark.sqlite_is_enough(False)
@pytest.mark.parametrize("kind", KINDS)
def test_of_many_submitters_that_put_one_name_at_once_one_owns_it(
    store: Store, kind: DescriptionKind
) -> None:
    def put(name: str) -> str | None:
        try:
            store.by(Actor(name=name, role="submitter")).catalogue.put(kind, "mine", {"by": name})
        except DescriptionOwnedError:
            return None
        return name

    with ThreadPoolExecutor(6) as pool:
        (owner,) = filter(None, pool.map(put, "abcdef"))
    kept = store.catalogue.get(kind, "mine")
    assert (kept.created_by, kept.description) == (owner, {"by": owner})


def test_a_model_and_a_cluster_may_share_a_name_and_unknown_names_are_errors(store: Store) -> None:
    store.catalogue.put("model", "b", {})
    store.catalogue.put("model", "a", {})
    assert [each.name for each in store.catalogue.find("model")] == ["a", "b"]
    assert store.catalogue.find("cluster") == []
    with pytest.raises(DescriptionNotFoundError, match="no cluster named 'a'"):
        store.catalogue.get("cluster", "a")
    with pytest.raises(DescriptionNotFoundError, match="no model named 'mine'"):
        store.catalogue.delete("model", "mine")


def test_the_number_of_models_and_clusters_is_limited(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models_and_clusters, "MAX_DESCRIPTIONS", 1)
    store.catalogue.put("model", "a", {})
    with pytest.raises(DescriptionLimitError, match="1 models already"):
        store.catalogue.put("model", "b", {})
    store.catalogue.put("model", "a", {"size": 2})


@pytest.mark.sqlite_is_enough(False)
@pytest.mark.parametrize("kind", KINDS)
def test_of_many_that_put_one_name_at_once_one_creates_it(
    store: Store, kind: DescriptionKind
) -> None:
    def put(number: int) -> bool:
        _record, is_new = store.catalogue.put(kind, "mine", {"size": number})
        return is_new

    with ThreadPoolExecutor(6) as pool:
        assert sorted(pool.map(put, range(12))) == [False] * 11 + [True]
    with ThreadPoolExecutor(6) as pool:
        gone = list(pool.map(lambda _: _deleted(store, kind), range(6)))
    assert sorted(gone) == [False] * 5 + [True]


def _deleted(store: Store, kind: DescriptionKind) -> bool:
    try:
        store.catalogue.delete(kind, "mine")
    except DescriptionNotFoundError:
        return False
    return True
