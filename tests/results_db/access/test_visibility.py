"""Owners see what they may see, in every query alike."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import func, select
from sqlalchemy.orm import aliased

from layout_tuner.errors import CampaignInvalidError
from layout_tuner.results_db.access.owners_and_groups import Sharing
from layout_tuner.results_db.actor import Actor
from layout_tuner.results_db.errors import (
    CampaignDuplicateError,
    CampaignNotFoundError,
    OwnerInvalidError,
    TrialNotFoundError,
)
from layout_tuner.results_db.models.tables import Campaign, Trial
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.layouts.layout import Layout
from tests.kit.store import make_spec

pytestmark = pytest.mark.sqlite_is_enough(False)


def by(store: Store, owner: str) -> Store:
    return store.by(Actor(name=f"token-of-{owner}", role="submitter", owner=owner))


def make(store: Store, owner: str, name: str, **sharing: Any) -> int:
    own = by(store, owner)
    made = own.campaigns.create(make_spec(name), num_legal_layouts=100, sharing=Sharing(**sharing))
    own.trials.add(made.id, Layout())
    return made.id


@pytest.fixture
def ids(store: Store) -> dict[str, int]:
    store.owners.put_group("lab", members=["ann", "bob"], known_members=False)
    return {
        "private": make(store, "ann", "private", visibility="private"),
        "group": make(store, "ann", "group", visibility="group"),
        "everyone": make(store, "ann", "everyone"),
    }


SEEN = {
    "ann": {"private", "group", "everyone"},
    "bob": {"group", "everyone"},
    "cid": {"everyone"},
}


@pytest.mark.parametrize("owner", SEEN)
def test_lists_counts_and_events_have_what_one_sees(
    store: Store, ids: dict[str, int], owner: str
) -> None:
    own = by(store, owner)
    seen = {ids[name] for name in SEEN[owner]}
    assert {each.id for each in own.campaigns.find()} == seen
    own.events.number()
    assert {each.campaign_id for each in own.events.find(after=0, limit=99)} == seen
    other = aliased(Trial)
    with own._db.read() as session:
        assert session.scalar(select(func.count()).select_from(Trial)) == len(seen)
        assert session.scalar(select(func.count(other.id))) == len(seen)
        of_trials = select(Campaign.id).where(Campaign.id.in_(select(other.campaign_id)))
        assert set(session.scalars(of_trials)) == seen


def test_what_is_hidden_is_as_absent(store: Store, ids: dict[str, int]) -> None:
    own = by(store, "cid")
    for reference in (ids["private"], 999):
        with pytest.raises(CampaignNotFoundError, match=f"there is no campaign {reference}"):
            own.campaigns.get(reference)
        with pytest.raises(CampaignNotFoundError):
            own.campaigns.pause(reference)
    with pytest.raises(CampaignNotFoundError):
        own.campaigns.by_name("private")
    with pytest.raises(TrialNotFoundError):
        own.trials.get(1)
    assert own.access.owner_of_campaign("private") is None
    assert own.access.owner_of_trial(1) is None


def test_a_hidden_name_is_free(store: Store, ids: dict[str, int]) -> None:
    own = make(store, "cid", "private", visibility="private")
    assert by(store, "cid").campaigns.by_name("private").id == own
    assert by(store, "ann").campaigns.by_name("private").id == ids["private"]
    with pytest.raises(CampaignDuplicateError):
        make(store, "cid", "everyone", visibility="private")


def test_one_s_own_campaign_has_the_name(store: Store, ids: dict[str, int]) -> None:
    make(store, "cid", "private")
    assert by(store, "ann").campaigns.by_name("private").id == ids["private"]
    assert by(store, "bob").campaigns.by_name("private").created_by == "cid"


def test_a_guessed_name_tells_of_no_hidden_source(store: Store) -> None:
    make(store, "ann", "base", visibility="private")
    spec = make_spec("public", start_from=["base"])
    public = by(store, "ann").campaigns.create(spec, num_legal_layouts=100)
    cid = by(store, "cid")
    guess = make(store, "cid", "base", visibility="private")
    for shown in (cid.campaigns.get(public.id), cid.campaigns.by_name("public")):
        assert shown.stored.start_from == ()
    assert cid.reports.campaigns_from(guess) == []
    cid.campaigns.cancel(guess)
    cid.campaigns.delete(guess)
    assert by(store, "ann").campaigns.get(public.id).stored.start_from == ("base",)


def test_a_member_who_leaves_sees_no_more(store: Store, ids: dict[str, int]) -> None:
    store.owners.put_group("lab", members=["ann"], known_members=False)
    assert len(by(store, "bob").campaigns.find()) == 1
    store.owners.delete_group("lab")
    assert len(by(store, "ann").campaigns.find()) == 3


def test_who_saw_a_campaign_sees_that_it_is_deleted(store: Store, ids: dict[str, int]) -> None:
    for each in ids.values():
        store.campaigns.cancel(each)
        store.campaigns.delete(each)
    store.events.number()
    for owner, names in SEEN.items():
        events = by(store, owner).events.find(after=0, limit=99)
        assert {each.campaign_id for each in events} == {ids[name] for name in names}


def test_administrators_and_workers_see_all(store: Store, ids: dict[str, int]) -> None:
    for role in ("admin", "worker"):
        own = store.by(Actor(name="x", role=role))
        assert len(own.campaigns.find()) == 3
    assert len(store.seen_by("x").campaigns.find()) == 1


@pytest.mark.parametrize(
    ("groups", "sharing", "said"),
    [
        ([], {"visibility": "group"}, "in no group: ask an administrator"),
        (["lab"], {"group": "other"}, "in lab, and not in 'other': name the one"),
        (["lab", "more"], {}, "in lab, more: name the one that its node-hours count for"),
    ],
)
def test_a_campaign_needs_a_group_of_its_owner(
    store: Store, groups: list[str], sharing: dict[str, Any], said: str
) -> None:
    for group in groups:
        store.owners.put_group(group, members=["ann"], known_members=False)
    with pytest.raises(CampaignInvalidError, match=said):
        make(store, "ann", "first", **sharing)
    assert store.campaigns.find() == []


@pytest.mark.parametrize("weight", [0.0, -1.0, 1e9, float("nan"), float("inf")])
def test_a_weight_out_of_range_changes_nothing(store: Store, weight: float) -> None:
    store.owners.put_owner("ann", weight=2.0)
    for put in (store.owners.put_owner, store.owners.put_group):
        with pytest.raises(OwnerInvalidError, match=r"is not from 0\.001 to 1000"):
            put("ann", weight=weight)
    assert [(each.name, each.weight) for each in store.owners.all()] == [("ann", 2.0)]
    assert store.owners.groups() == []


def test_claimed_groups_follow_the_claim(store: Store) -> None:
    store.owners.put_group("lab", members=["ann"], known_members=False)
    store.owners.note_claimed_groups("ann", ["lab", "site"])
    assert store.owners.groups_of("ann") == ("lab", "site")
    store.owners.note_claimed_groups("ann", ["other"])
    assert store.owners.groups_of("ann") == ("lab", "other")
