"""A thousand events while the receiver is away and senders are killed: all arrive, in order."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from layout_tuner.results_db.access.webhooks import notify
from layout_tuner.results_db.models.tables import Campaign
from layout_tuner.results_db.store import Store
from tests.api.process.receiver import Receiver
from tests.kit.services import ServeProcess
from tests.kit.store import make_campaign
from tests.kit.waiting import wait_until

SENDER = """
import asyncio, sys
from layout_tuner.api.process.webhook_sender import WebhookSender
from layout_tuner.api.settings import Settings
from layout_tuner.results_db.access import webhooks
from layout_tuner.results_db.store import Store
webhooks.CLAIM_S = 1.0
settings = Settings(token="", webhook_hosts=frozenset([sys.argv[2]]), webhook_pace_s=0.05)
asyncio.run(WebhookSender(Store(sys.argv[1]), settings).run())
"""
"""The service's own sender, with a shorter claim, in a process that is killed."""


@contextmanager
def sender(url: str, receiver: Receiver) -> Iterator[Callable[[], None]]:
    """Runs a sender; gives what kills it."""
    origin = f"http://127.0.0.1:{receiver.port}"
    process = subprocess.Popen([sys.executable, "-c", SENDER, url, origin])

    def kill() -> None:
        process.send_signal(signal.SIGKILL)
        process.wait(30)

    try:
        yield kill
    finally:
        kill()


def tell_many(store: Store, address: str, number: int) -> int:
    """Writes events of ten campaigns, each event in a transaction of its own."""
    store.webhooks.add(
        address=address,
        format="standard",
        events=["campaign.ended"],
        link="http://tuner.test",
    )
    ids = [make_campaign(store, f"c{each}") for each in range(10)]
    for each in range(number):
        with store._db.write() as session:
            campaign = session.get_one(Campaign, ids[each % 10])
            said = {"number": each // 10, "text": "x"}
            notify(session, "campaign.ended", now=store.now(), campaign=campaign, data=said)
    return number


def assert_whole_and_in_order(receiver: Receiver, number: int) -> int:
    """Checks what arrived, without repeats of an id; returns how many repeats there were."""
    seen: set[str] = set()
    by_campaign = defaultdict(list)
    for (headers, _), body in zip(receiver.accepted, receiver.bodies, strict=True):
        if headers["webhook-id"] not in seen:
            seen.add(headers["webhook-id"])
            by_campaign[body["data"]["campaign"]].append(body["data"]["number"])
    assert len(by_campaign) == 10
    for numbers in by_campaign.values():
        assert numbers == list(range(number // 10))
    return len(receiver.accepted) - len(seen)


def ids_of(receiver: Receiver) -> set[str]:
    return {headers["webhook-id"] for headers, _ in receiver.accepted}


@pytest.mark.slow
def test_all_arrive_in_order_though_senders_die(database_url: str) -> None:
    with ExitStack() as stack:
        store = stack.enter_context(closing(Store(database_url)))
        first = Receiver()
        first.answers = [503] * 1_000
        stack.callback(first.close)
        number = tell_many(store, first.url, 100)
        kill = stack.enter_context(sender(database_url, first))
        wait_until("the receiver has refused some", lambda: len(first.requests) > 20)
        kill()
        first.answers = []
        kill = stack.enter_context(sender(database_url, first))
        wait_until("some have arrived", lambda: len(first.accepted) > 20)
        first.held.clear()
        wait_until("one is on its way", lambda: len(first.requests) > len(first.accepted))
        kill()
        first.held.set()
        for _ in range(2):  # both at once
            stack.enter_context(sender(database_url, first))
        wait_until("all have arrived", lambda: len(ids_of(first)) == number)
        assert_whole_and_in_order(first, number)


@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_a_thousand_arrive_after_two_minutes_away(tmp_path: Path, database_url: str) -> None:
    probe = Receiver()
    port, address = probe.port, probe.url
    probe.close()
    allowed = f"http://127.0.0.1:{port}"
    where = () if database_url.startswith("sqlite") else ("--database", database_url)
    service = ServeProcess(tmp_path / "data", "--webhook-hosts", allowed, *where)
    try:
        with closing(Store(database_url)) as store:
            away_until = time.monotonic() + 120
            number = tell_many(store, address, 1000)
            time.sleep(30)
            service.end(signal.SIGKILL)
            service.start()
            time.sleep(max(0.0, away_until - time.monotonic()))
            with closing(Receiver(port)) as receiver:
                wait_until("some arrive", lambda: len(receiver.accepted) > 300, 300)
                service.end(signal.SIGKILL)
                service.start()
                wait_until("all arrive", lambda: len(ids_of(receiver)) == number, 300)
                # One message was on its way when the service was killed.
                assert assert_whole_and_in_order(receiver, number) <= 1
    finally:
        service.end()
