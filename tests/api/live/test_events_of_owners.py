"""Each watcher gets the events of campaigns that its owner may see when they happen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from layout_tuner.api.live.event_hub import Subscription
from layout_tuner.api.live.live_events import LiveEvent
from layout_tuner.api.settings import Settings
from layout_tuner.protocol.worker_messages import BeatBody
from layout_tuner.results_db.access.owners_and_groups import Sharing
from layout_tuner.results_db.actor import Actor
from layout_tuner.results_db.campaigns.plans import PlanOptions
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.layouts.layout import Layout
from tests.kit.api import TOKEN, bearer
from tests.kit.live import Watcher, live_service
from tests.kit.store import lease_one, make_spec, make_worker, send_beats

SETTINGS: dict[str, Any] = {"token": TOKEN, "event_poll_s": 0.02, "live_event_s": 0.05}


@pytest.fixture
def url(store: Store) -> Iterator[str]:
    store.owners.put_group("lab", members=["ann", "bob"], known_members=False)
    with live_service(Settings(**SETTINGS), store) as url:
        yield f"{url}/events"


def make(store: Store, name: str, **sharing: Any) -> int:
    own = store.by(Actor(name="ann", role="submitter"))
    made = own.campaigns.create(make_spec(name), num_legal_layouts=100, sharing=Sharing(**sharing))
    return made.id


def watcher(store: Store, url: str, owner: str) -> Watcher:
    _, token = store.access.create_token(f"{owner}-looks", "viewer", owner=owner)
    return Watcher(url, headers=bearer(token))


def next_stored(watcher: Watcher) -> tuple[str, int]:
    """The next event that is stored: its kind and its campaign."""
    while True:
        kind, data = watcher.next()
        if data["seq"] is not None:
            return kind, data["campaign_id"]


def test_watchers_get_the_events_of_what_they_see(store: Store, url: str) -> None:
    private, group = (
        make(store, "own", visibility="private"),
        make(store, "ours", visibility="group"),
    )
    every = make(store, "all")
    seen = {"ann": [private, group, every], "bob": [group, every], "cid": [every]}
    watchers = {owner: watcher(store, url, owner) for owner in seen}
    try:
        for each in watchers.values():
            each.__enter__()
            each.opened()
        for id_ in (private, group, every):
            store.campaigns.pause(id_)
        for owner, ids in seen.items():
            found = [next_stored(watchers[owner]) for _ in ids]
            assert found == [("campaign.paused", id_) for id_ in ids], owner
    finally:
        for each in watchers.values():
            each.hang_up()


def test_who_leaves_a_group_gets_no_more_of_it(store: Store, url: str) -> None:
    group, every = make(store, "ours", visibility="group"), make(store, "all")
    with watcher(store, url, "bob") as bob:
        bob.opened()
        store.campaigns.pause(group)
        assert next_stored(bob) == ("campaign.paused", group)
        store.owners.put_group("lab", members=["ann"], known_members=False)
        store.campaigns.resume(group)
        store.campaigns.pause(every)
        assert next_stored(bob) == ("campaign.paused", every)
        store.campaigns.update(group, sharing={"visibility": "everyone"})
        assert next_stored(bob) == ("campaign.changed", group)


def test_progress_comes_to_those_who_see_it(store: Store, url: str) -> None:
    worker, running = make_worker(store).id, {}
    for name, visibility in (("own", "private"), ("all", "everyone")):
        id_ = make(store, name, visibility=visibility)
        running[id_] = store.trials.add(id_, Layout()).id
        assert lease_one(store, worker).trial_id == running[id_]
    every = list(running)[1]
    with watcher(store, url, "cid") as cid:
        cid.opened()
        found = []
        for done in (1, 2, 3):
            beats = [
                BeatBody(trial_id=id_, attempt=1, iterations_done=done) for id_ in running.values()
            ]
            send_beats(store, worker, beats)
            while True:
                kind, data = cid.next()
                if kind == "campaign.progress":
                    found.append(data["campaign_id"])
                    if data["data"]["trials"][0]["iterations_done"] == done:
                        break
        assert set(found) == {every}


def test_a_deletion_is_told_to_those_who_saw_it(store: Store, url: str) -> None:
    private, every = make(store, "own", visibility="private"), make(store, "all")
    for id_ in (private, every):
        store.campaigns.cancel(id_)
    with watcher(store, url, "cid") as cid:
        cid.opened()
        for id_ in (private, every):
            store.campaigns.delete(id_)
        assert next_stored(cid) == ("campaign.deleted", every)


def test_the_end_of_a_plan_is_its_owner_s(store: Store, url: str) -> None:
    plans = {
        owner: store.by(Actor(name=owner, role="submitter"))
        .plans.request(make_spec("planned"), PlanOptions())
        .id
        for owner in ("ann", "cid")
    }
    with watcher(store, url, "cid") as cid:
        cid.opened()
        for id_ in plans.values():
            store.plans.end(id_, "too large")
        kind, data = cid.next()
        assert (kind, data["data"]["plan_id"]) == ("plan.ended", plans["cid"])


@pytest.mark.parametrize(
    ("owner", "campaign_id", "of", "gets"),
    [
        (None, None, "ann", True),
        ("ann", None, "ann", True),
        ("bob", None, "ann", False),
        ("bob", 1, None, True),
        ("bob", 2, None, False),
        (None, 2, None, True),
    ],
)
def test_a_subscription_gets_live_events_of_its_owner(
    owner: str | None, campaign_id: int | None, of: str | None, gets: bool
) -> None:
    subscription = Subscription(None, owner, 0, 10)
    event = LiveEvent(kind="plan.ended", campaign_id=campaign_id, owner=of, content=b"")
    assert subscription.gets(event, {("bob", 1)}) is gets
