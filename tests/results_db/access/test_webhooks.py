"""Messages of webhooks: who gets which, in which order, and what becomes of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import event, insert, select
from sqlalchemy.orm import Session

from layout_tuner.protocol.worker_messages import NodeBody, NodeStatusBody, StatusBody
from layout_tuner.results_db.access.owners_and_groups import Sharing
from layout_tuner.results_db.access.webhooks import WINDOW, Answer, OutgoingMessage, notify
from layout_tuner.results_db.actor import Actor
from layout_tuner.results_db.errors import WebhookInvalidError, WebhookNotFoundError
from layout_tuner.results_db.models.service_tables import MessageRow
from layout_tuner.results_db.models.tables import Campaign
from layout_tuner.results_db.retention import Retention
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.layouts.layout import Layout
from tests.kit.store import (
    TimelyStore,
    TurnableClock,
    make_spec,
    make_worker,
    run_trial,
    send_beats,
)

pytestmark = pytest.mark.sqlite_is_enough(False)

LONG_AGO = datetime(2000, 1, 1, tzinfo=UTC)
EVENTS = ["campaign.ended", "campaign.new_winner", "quota.at_80_percent"]


def by(store: Store, owner: str, role: Any = "submitter") -> Store:
    return store.by(Actor(name=f"token-of-{owner}", role=role, owner=owner))


def hook(store: Store, **given: Any) -> int:
    asked = {"address": "https://a.test/x", "format": "standard", "events": EVENTS}
    return store.webhooks.add(**asked | {"link": "https://tuner.test"} | given).id


def make(store: Store, owner: str, name: str, **sharing: Any) -> int:
    own = by(store, owner).campaigns
    return own.create(make_spec(name), num_legal_layouts=9, sharing=Sharing(**sharing)).id


def claim(store: Store) -> list[OutgoingMessage]:
    return store.webhooks.claim(())


def settle(store: Store, message: OutgoingMessage, problem: str = "", **more: Any) -> None:
    store.webhooks.settle(message.id, Answer(problem, **more), pause_s=5)


def states(store: Store) -> list[str]:
    with store._db.read() as session:
        return list(session.scalars(select(MessageRow.state).order_by(MessageRow.id)))


def drained(store: Store) -> list[Any]:
    """The bodies of all messages that are due, in the order in which they are sent."""
    found = []
    while messages := claim(store):
        for each in messages:
            found.append(json.loads(each.body))
            settle(store, each)
    return found


def test_owners_get_word_of_their_own_campaigns(store: Store) -> None:
    store.owners.put_group("lab", members=["ann", "bob"], known_members=False)
    for owner in ("ann", "bob", "root"):
        hook(by(store, owner, "admin" if owner == "root" else "submitter"), address=owner)
    for visibility in ("private", "group", "everyone"):
        by(store, "ann").campaigns.cancel(make(store, "ann", visibility, visibility=visibility))
    by(store, "bob").campaigns.cancel(make(store, "bob", "of-bob"))
    found = []
    while messages := claim(store):
        for each in messages:
            found.append((each.address, json.loads(each.body)["data"]["campaign"]))
            settle(store, each)
    assert sorted(found) == [
        ("ann", "everyone"),
        ("ann", "group"),
        ("ann", "private"),
        ("bob", "of-bob"),
    ]


def test_only_events_that_are_asked_for_are_sent(store: Store) -> None:
    hook(by(store, "ann"), events=["quota.at_80_percent"])
    by(store, "ann").campaigns.cancel(make(store, "ann", "unasked"))
    assert claim(store) == []


def test_a_later_webhook_hears_of_no_earlier_loss(store: Store, clock: TurnableClock) -> None:
    make_worker(store)
    clock.forward(31)
    hook(by(store, "root", "admin"), events=["worker.lost"])
    store.webhooks.note_lost_workers(LONG_AGO)
    assert claim(store) == []


def test_the_end_of_a_deleted_campaign_is_sent(store: Store) -> None:
    hook(by(store, "ann"))
    campaign = make(store, "ann", "gone")
    by(store, "ann").campaigns.cancel(campaign)
    by(store, "ann").campaigns.delete(campaign)
    (body,) = drained(store)
    assert body["data"]["campaign"] == "gone"


def test_a_message_has_the_three_fields_and_a_link(store: Store, clock: TurnableClock) -> None:
    hook(by(store, "ann"))
    campaign = make(store, "ann", "big-one")
    store.campaigns.cancel(campaign)
    (body,) = drained(store)
    assert body["type"] == "campaign.ended"
    assert body["timestamp"] == clock.now.isoformat()
    assert body["data"] == {
        "campaign": "big-one",
        "campaign_id": campaign,
        "state": "CANCELLED",
        "reason": "cancelled",
        "text": body["data"]["text"],
        "url": f"https://tuner.test/campaigns/{campaign}",
    }
    assert body["data"]["text"].startswith("Campaign big-one is CANCELLED: ")


def test_a_rolled_back_event_has_no_message(store: Store) -> None:
    hook(store)
    with store._db.write() as session:
        notify(session, "quota.at_80_percent", now=store.now(), data={"text": "x"})
        session.rollback()
    assert claim(store) == []


def test_a_campaigns_later_message_waits(store: Store, clock: TurnableClock) -> None:
    hook(by(store, "ann"))
    ids = [make(store, "ann", name) for name in ("first", "second")]
    with store._db.write() as session:
        for number in range(4):
            campaign = session.get_one(Campaign, ids[number % 2])
            said = {"number": number, "text": "x"}
            notify(session, "campaign.ended", now=clock.now, campaign=campaign, data=said)
    (message,) = claim(store)
    assert json.loads(message.body)["data"]["number"] == 0
    settle(store, message, "the receiver answered 500")
    (other,) = claim(store)
    assert json.loads(other.body)["data"]["number"] == 1
    settle(store, other)
    assert [each["data"]["number"] for each in drained(store)] == [3]
    clock.forward(8)
    (again,) = claim(store)
    assert (again.message_id, again.body) == (message.message_id, message.body)
    settle(store, again)
    assert [each["data"]["number"] for each in drained(store)] == [2]


def test_a_claimed_message_is_sent_again_later(store: Store, clock: TurnableClock) -> None:
    webhook = hook(store)
    store.webhooks.test(webhook)
    (message,) = claim(store)
    assert claim(store) == []
    clock.forward(31)
    assert [each.message_id for each in claim(store)] == [message.message_id]
    assert store.webhooks.claim({webhook}) == []


def test_pauses_double_and_end_after_a_day(store: Store, clock: TurnableClock) -> None:
    store.webhooks.test(hook(store))
    pauses = []
    for _ in range(99):
        if messages := claim(store):
            settle(store, messages[0], "the receiver answered 500")
            began = clock.now
            if states(store) != ["waiting"]:
                break
        while not claim_is_due(store):
            clock.forward(1 + (clock.now - began).total_seconds() / 20)
        pauses.append((clock.now - began).total_seconds())
    (found,) = store.webhooks.all()
    assert states(store) == ["given up"]
    assert (found.problem, found.num_given_up) == ("the receiver answered 500", 1)
    for pause_s, expected_s in zip(pauses[:9], (5 * 2**each for each in range(9)), strict=False):
        assert 0.5 * expected_s <= pause_s <= 1.7 * expected_s + 2
    assert 22 * 3600 < sum(pauses) <= 24 * 3600 + 60
    assert claim(store) == []


def claim_is_due(store: Store) -> bool:
    with store._db.read() as session:
        return session.scalars(select(MessageRow.next_at)).one() <= store.now()


def test_a_receiver_that_is_gone_turns_it_off(store: Store) -> None:
    ann = by(store, "ann")
    webhook = hook(ann)
    ann.webhooks.test(webhook)
    settle(store, claim(store)[0], "the receiver answered 410", is_gone=True)
    ann.campaigns.cancel(make(store, "ann", "unheard"))
    assert claim(store) == []
    (found,) = store.webhooks.all()
    assert found.off_because == "the receiver answered 410"
    assert states(store) == ["waiting"]
    on = ann.webhooks.test(webhook)
    assert (on.off_because, on.problem, on.tried_at) == ("", "", None)
    ann.campaigns.cancel(make(store, "ann", "heard"))
    assert [each["type"] for each in drained(store)] == ["webhook.test", "campaign.ended"]


def test_a_receiver_may_ask_for_a_pause(store: Store, clock: TurnableClock) -> None:
    store.webhooks.test(hook(store))
    for asked_s, pause_s in ((120.0, 120), (1e9, 3600)):
        (message,) = claim(store)
        settle(store, message, "the receiver answered 429", wait_s=asked_s)
        clock.forward(pause_s - 1)
        assert claim(store) == []
        clock.forward(1)
    assert len(claim(store)) == 1


def test_an_event_that_is_found_twice_is_one_message(store: Store) -> None:
    for name in ("ann", "bob"):
        hook(by(store, name))
    for _ in range(2):
        with store._db.write() as session:
            for key in ("a", "b"):
                known = {"now": store.now(), "key": key, "owner": "ann", "data": {"text": key}}
                notify(session, "quota.at_80_percent", **known)
    assert [each["data"]["text"] for each in drained(store)] == ["a", "b"]


def test_word_of_a_node_names_no_campaign(store: Store) -> None:
    webhook = hook(by(store, "ann"), events=["node.set_aside", "worker.lost"])
    nodes = [NodeBody(name=f"node-{number}", num_devices=8) for number in (0, 1)]
    worker = make_worker(store, num_nodes=2, nodes=nodes)
    bad = NodeStatusBody(name="node-1", state="quarantined", reason="of campaign secret")
    for _ in range(2):
        store.allocations.quarantine_node("local-cpu", "node-0", "of campaign secret")
        said = [NodeStatusBody(name="node-0", state="idle"), bad]
        send_beats(store, worker.id, [], status=StatusBody(nodes=said))
    bodies = drained(store)
    assert [each["data"].pop("text") for each in bodies] == [
        "Node node-0 of local-cpu is set aside",
        "Node node-1 of local-cpu is set aside",
    ]
    assert [each["data"] for each in bodies] == [
        {"cluster": "local-cpu", "node": name, "url": "https://tuner.test/"}
        for name in ("node-0", "node-1")
    ]
    with pytest.raises(WebhookNotFoundError):
        by(store, "bob").webhooks.delete(webhook)


def test_a_lost_worker_is_reported_once_a_loss(store: Store, clock: TurnableClock) -> None:
    hook(by(store, "root", "admin"), events=["worker.lost"])
    worker, since = make_worker(store), clock.now - timedelta(seconds=1)
    for silent_s, number in ((20, 0), (20, 1), (10, 0)):
        clock.forward(silent_s)
        since = store.webhooks.note_lost_workers(since)
        store.webhooks.note_lost_workers(LONG_AGO)  # as another service, just started
        assert len(drained(store)) == number
    send_beats(store, worker.id, [])
    clock.forward(31)
    store.webhooks.note_lost_workers(since)
    (body,) = drained(store)
    assert body["data"]["node"] == worker.host


def test_a_new_winner_is_reported_once(store: Store, clock: TurnableClock) -> None:
    hook(by(store, "ann"))
    campaign, worker = make(store, "ann", "first"), make_worker(store)
    clock.forward(1)
    for step_time_s, layout, winner in (
        (1.0, Layout(), 1),
        (2.0, Layout(micro_batch_size=2), None),
        (0.5, Layout(micro_batch_size=4), 3),
    ):
        run_trial(store, campaign, layout, worker=worker.id, step_time_s=step_time_s)
        for _ in range(2):
            ends = store.webhooks.last_ends()
            won = store.leaderboard.winners(ends)[campaign]
            found = (won.layout_key, won.trial_number, won.value)
            store.webhooks.note_winners({campaign: found})
        told = [each["data"]["trial"] for each in drained(store)]
        assert told == ([] if winner is None else [winner])


@pytest.mark.parametrize(
    ("chat", "body"),
    [
        ("slack", {"text": "&lt;!channel&gt; @here &amp; *x*", "mrkdwn": False}),
        ("mattermost", {"text": "&lt;!channel&gt; @\u200bhere &amp; \\*x\\*"}),
    ],
)
def test_chats_find_no_mention_in_a_text(store: Store, chat: str, body: Any) -> None:
    hook(store, format=chat)
    with store._db.write() as session:
        said = {"text": "<!channel> @here & *x*"}
        notify(session, "quota.at_80_percent", now=store.now(), data=said)
    assert drained(store) == [body | {"text": f"{body['text']}\nhttps://tuner.test/"}]


def test_webhooks_are_in_the_audit_without_address(store: Store) -> None:
    mine = by(store, "ann")
    webhook = hook(mine, address="https://chat.test/secret-path")
    mine.webhooks.delete(webhook)
    entries = store.access.audit(target_kind="webhook")
    assert [each.action for each in entries] == ["webhook.delete", "webhook.add"]
    assert entries[1].details["host"] == "chat.test"
    assert "secret-path" not in repr(entries)


def test_old_messages_are_pruned(store: Store, clock: TurnableClock) -> None:
    store.webhooks.test(hook(store))
    clock.forward(31 * 86400)
    assert store.retention.prune(Retention()).messages == 1
    assert states(store) == []


def test_an_owner_has_twenty_webhooks_at_most(store: Store) -> None:
    for _ in range(20):
        hook(store)
    with pytest.raises(WebhookInvalidError, match="at most 20"):
        hook(store)
    hook(by(store, "ann"))


def test_a_claim_costs_the_same_with_a_backlog(sqlite_url: str) -> None:
    """Of 100,000 waiting messages it reads a bounded number, also where their receivers fail."""
    with closing(TimelyStore(sqlite_url)) as store:
        webhook, now = hook(store), store.now()
        steps = []
        for number in (5_000, 95_000):
            with store._db.write() as session:
                add_waiting(session, webhook, now, number)
            for _ in range(10):  # of ten campaigns: the first messages of all are on their way
                store.webhooks.claim(())
            with steps_of(store) as taken:
                assert store.webhooks.claim(()) == []
                store.webhooks.all()
            steps.append(taken[0])
            store.webhooks.settle(1, Answer(), pause_s=5)
        assert 0 < steps[1] <= 1.1 * steps[0]
        assert steps[1] < 100 * WINDOW


def add_waiting(session: Session, webhook: int, now: datetime, number: int) -> None:
    row = {"webhook_id": webhook, "kind": "campaign.ended", "at": now, "next_at": now}
    row |= {"data": {"text": "x"}, "state": "waiting", "attempts": 0}
    rows = [{**row, "message_id": uuid4().hex, "campaign_id": n % 10} for n in range(number)]
    session.execute(insert(MessageRow), rows)


@contextmanager
def steps_of(store: Store) -> Iterator[list[int]]:
    """Counts the steps of SQLite's virtual machine, in tens, which depend on no clock."""
    taken = [0]

    def count() -> None:
        taken[0] += 1

    def watch(connection: Any, *_: Any) -> None:
        connection.set_progress_handler(count, 10)

    event.listen(store._db.engine, "checkout", watch)
    try:
        yield taken
    finally:
        event.remove(store._db.engine, "checkout", watch)
