"""Models and clusters of the users' own."""

from __future__ import annotations

from functools import partial

import pytest

from layout_tuner.results_db.actor import Actor
from layout_tuner.results_db.campaigns import models_and_clusters
from layout_tuner.results_db.campaigns.models_and_clusters import DescriptionKind
from layout_tuner.results_db.errors import (
    DescriptionLimitError,
    DescriptionNotFoundError,
    DescriptionOwnedError,
)
from layout_tuner.results_db.store import Store
from tests.kit.store import TurnableClock, at_once

pytestmark = pytest.mark.sqlite_is_enough


@pytest.mark.parametrize("kind", ["model", "cluster"])
def test_a_description_is_stored(store: Store, clock: TurnableClock, kind: DescriptionKind) -> None:
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


def test_a_submitter_changes_nobody_elses_whatever_the_gate_saw_before(store: Store) -> None:
    kind: DescriptionKind = "model"
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
def test_of_many_submitters_that_put_one_name_at_once_one_owns_it(store: Store) -> None:
    def put(name: str) -> str | None:
        by = store.by(Actor(name=name, role="submitter"))
        try:
            _record, is_new = by.catalogue.put("model", "mine", {"by": name})
        except DescriptionOwnedError:
            return None
        assert is_new
        return name

    (owner,) = filter(None, at_once(*(partial(put, name) for name in "abcdef")))
    kept = store.catalogue.get("model", "mine")
    assert (kept.created_by, kept.description) == (owner, {"by": owner})


@pytest.mark.sqlite_is_enough(False)
def test_of_deletions_at_once_one_finds_it(store: Store) -> None:
    def delete() -> bool:
        try:
            store.catalogue.delete("model", "mine")
        except DescriptionNotFoundError:
            return False
        return True

    store.catalogue.put("model", "mine", {})
    assert at_once(*[delete] * 6).count(True) == 1
    assert store.catalogue.find("model") == []


def test_each_kind_of_description_has_its_names(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.catalogue.put("model", "b", {})
    store.catalogue.put("model", "a", {})
    assert [each.name for each in store.catalogue.find("model")] == ["a", "b"]
    assert store.catalogue.find("cluster") == []
    with pytest.raises(DescriptionNotFoundError, match="no cluster named 'a'"):
        store.catalogue.get("cluster", "a")
    with pytest.raises(DescriptionNotFoundError, match="no model named 'mine'"):
        store.catalogue.delete("model", "mine")
    monkeypatch.setattr(models_and_clusters, "MAX_DESCRIPTIONS", 2)
    with pytest.raises(DescriptionLimitError, match="2 models already"):
        store.catalogue.put("model", "c", {})
    store.catalogue.put("model", "a", {"size": 2})
