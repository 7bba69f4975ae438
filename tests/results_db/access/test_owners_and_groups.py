"""Owners and groups: who puts whom where, all or nothing, and what the audit says of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

import pytest

from benchmarks.service.postgres_server import PostgresServer
from layout_tuner.results_db.access import owners_and_groups
from layout_tuner.results_db.access.owners_and_groups import Sharing
from layout_tuner.results_db.actor import Actor
from layout_tuner.results_db.errors import (
    OwnerInvalidError,
    OwnerNotFoundError,
    TokenInvalidError,
)
from layout_tuner.results_db.store import Store
from tests.kit.postgres import is_anybody_waiting
from tests.kit.store import at_once, make_spec
from tests.results_db.access.test_visibility import by, make
from tests.results_db.campaigns.test_imported_tables import make_import, varied_rows

pytestmark = pytest.mark.sqlite_is_enough(False)


@pytest.fixture
def lab(store: Store) -> Store:
    """Of the owners ann, bob and cid, the first is in the group lab."""
    store.owners.put_group("all", members=["ann", "bob", "cid"], known_members=False)
    store.owners.put_group("lab", members=["ann"], known_members=False)
    return store


def members(store: Store, group: str = "lab") -> tuple[str, ...]:
    return {each.name: each.members for each in store.owners.groups()}[group]


def test_members_come_and_go_one_by_one_or_many(lab: Store) -> None:
    assert lab.owners.put_group("lab", join=["cid", "bob"]).members == ("ann", "bob", "cid")
    assert lab.owners.put_group("lab", join=["bob"]).members == ("ann", "bob", "cid")
    assert lab.owners.put_group("lab", leave=["cid", "ann"]).members == ("bob",)
    assert members(lab) == ("bob",)
    assert members(lab, "all") == ("ann", "bob", "cid")
    entries = lab.access.audit(action="group.put", target="lab")[:3]
    assert [{kind: entry.details[kind] for kind in ("joined", "left")} for entry in entries] == [
        {"joined": [], "left": ["ann", "cid"]},
        {"joined": [], "left": []},
        {"joined": ["bob", "cid"], "left": []},
    ]


REFUSED: dict[str, tuple[Callable[[Store], Any], type[Exception], str]] = {
    "unknown owner": (
        lambda store: store.owners.put_group("lab", join=["bob", "amm"]),
        OwnerNotFoundError,
        "there is no owner 'amm'; `layout-tuner owner set` adds one",
    ),
    "unknown member": (
        lambda store: store.owners.put_group("lab", members=["bob", "amm"]),
        OwnerNotFoundError,
        "there is no owner 'amm'",
    ),
    "no member": (
        lambda store: store.owners.put_group("lab", join=["bob"], leave=["cid"]),
        OwnerNotFoundError,
        "'cid' is not in the group 'lab'",
    ),
    "unknown group": (
        lambda store: store.owners.put_group("lap", join=["bob"]),
        OwnerNotFoundError,
        "there is no group 'lap'",
    ),
    "deleted twice": (
        lambda store: store.owners.delete_group("lap"),
        OwnerNotFoundError,
        "there is no group 'lap'",
    ),
    "odd member": (
        lambda store: store.owners.put_group("lab", members=["bob", "a b"], known_members=False),
        TokenInvalidError,
        "members='a b' is not 1 to 64 characters",
    ),
    "odd group": (
        lambda store: store.owners.put_group("-lab"),
        TokenInvalidError,
        "group='-lab' is not 1 to 64 characters",
    ),
    "one too many": (
        lambda store: store.owners.put_group("all", join=["dan"]),
        OwnerInvalidError,
        "the group 'all' would have 4 members; a group has at most 3",
    ),
    "weight": (
        lambda store: store.owners.put_group(
            "lab", members=["bob"], weight=1001.0, known_members=False
        ),
        OwnerInvalidError,
        "weight=1001.0 is not from 0.001 to 1000",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_changes_nothing(
    lab: Store, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.owners.put_owner("dan", weight=1.0)
    monkeypatch.setattr(owners_and_groups, "MAX_MEMBERS", 3)
    change, error, said = REFUSED[case]
    before = lab.owners.all(), lab.owners.groups(), lab.access.audit()
    with pytest.raises(error, match=said):
        change(lab)
    assert (lab.owners.all(), lab.owners.groups(), lab.access.audit()) == before


def test_a_large_group_is_set_and_a_larger_one_refused(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owners_and_groups, "MAX_MEMBERS", 40)
    names = [f"p{number}" for number in range(41)]
    store.owners.put_group("lab", members=names[:40], known_members=False)
    assert len(members(store)) == 40
    with pytest.raises(OwnerInvalidError, match="would have 41 members; a group has at most 40"):
        store.owners.put_group("lab", members=names, known_members=False)
    assert len(members(store)) == 40
    assert len(store.owners.all()) == 40


def test_an_administrator_keeps_a_claimed_member(lab: Store) -> None:
    lab.owners.note_claimed_groups("bob", ["lab"])
    lab.owners.note_claimed_groups("cid", ["lab"])
    lab.owners.put_group("lab", join=["bob"])
    for owner in ("bob", "cid"):
        lab.owners.note_claimed_groups(owner, [])
    assert members(lab) == ("ann", "bob")


def test_members_that_many_add_at_once_are_all_there(store: Store) -> None:
    names = [f"p{number}" for number in range(8)]
    store.owners.put_group("all", members=names, known_members=False)
    store.owners.put_group("lab")
    added = [
        threading.Thread(target=store.owners.put_group, args=("lab",), kwargs={"join": [name]})
        for name in names
    ]
    for thread in added:
        thread.start()
    for thread in added:
        thread.join()
    assert members(store) == tuple(names)


def test_a_claim_and_an_administrator_may_act_at_once(lab: Store) -> None:
    for number in range(8):
        name = f"g{number}"
        lab.owners.put_group(name)
        at_once(
            partial(lab.owners.note_claimed_groups, "bob", [name]),
            partial(lab.owners.note_claimed_groups, "bob", [name]),
            partial(lab.owners.put_group, name, join=["bob"]),
        )
        assert members(lab, name) == ("bob",)


def test_a_deleted_group_hides_its_campaigns_for_good(lab: Store) -> None:
    lab.owners.put_group("lab", join=["bob"])
    ids = [make(lab, "ann", name, visibility="group", group="lab") for name in ("one", "two")]
    lab.campaigns.cancel(ids[1])
    lab.campaigns.delete(ids[1])
    lab.events.number()
    assert len(by(lab, "bob").campaigns.find()) == 1
    assert by(lab, "bob").events.find(after=0, limit=99)
    lab.owners.delete_group("lab")
    lab.owners.put_group("lab", members=["bob"], known_members=False)
    assert by(lab, "bob").campaigns.find() == []
    assert by(lab, "bob").events.find(after=0, limit=99) == []
    (campaign,) = by(lab, "ann").campaigns.find()
    assert (campaign.visibility, campaign.group) == ("private", "lab")
    (entry,) = lab.access.audit(action="group.delete")
    assert entry.details == {"campaigns_hidden": 1}


@pytest.mark.sqlite_is_enough
def test_a_group_is_not_deleted_below_a_new_campaign(
    postgres_url: str, postgres_server: PostgresServer
) -> None:
    """SQLite has one writer at a time."""
    with closing(Store(postgres_url)) as store:
        store.owners.put_group("lab", members=["ann"], known_members=False)
        ann = by(store, "ann")
        audit = ann.campaigns._audit
        ends = threading.Thread(target=store.owners.delete_group, args=("lab",))

        def delete_meanwhile(*said: Any, **details: Any) -> None:
            ends.start()
            while ends.is_alive() and not is_anybody_waiting(postgres_server, postgres_url):
                pass
            audit(*said, **details)

        ann.campaigns._audit = delete_meanwhile
        sharing = Sharing(visibility="group")
        ann.campaigns.create(make_spec("x"), num_legal_layouts=1, sharing=sharing)
        ends.join()
        (campaign,) = ann.campaigns.find()
        assert campaign.visibility == "private"


def test_a_token_acts_for_its_owner_and_so_does_its_import(store: Store) -> None:
    record, _ = store.access.create_token("ann-laptop", "submitter", owner="ann")
    assert (record.name, record.owner) == ("ann-laptop", "ann")
    assert store.access.create_token("bob", "viewer")[0].owner == "bob"
    laptop = store.by(Actor(name="dan-laptop", role="submitter", owner="dan"))
    (campaign,) = laptop.imports.add([make_import("theirs", *varied_rows())])
    assert campaign.created_by == "dan"
    assert [each.name for each in store.owners.all()] == ["ann", "bob", "dan"]
    with pytest.raises(TokenInvalidError, match=r"owner='a\\x00' is not 1 to 64"):
        store.access.create_token("eve", "viewer", owner="a\0")
