"""Calls at the same time run as one batch: each gets its own answer, even if others fail.

So does each worker, also where a part of its answer cannot be had.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence

import pytest

from api.leases.worker_batches import Batcher, WorkerBatches
from results_db.allocations.leases import LeaseAsk
from results_db.errors import DatabaseUnavailableError
from results_db.records import WorkerRecord
from results_db.store import Store
from search_spaces.campaigns.campaign import CampaignSpec
from search_spaces.errors import SearchSpaceError
from search_spaces.protocol.worker_messages import LeaseRead, LeaseRequest
from search_spaces.spec.layout import Layout
from tests.kit.api import CAMPAIGN
from tests.kit.store import make_campaign, make_worker

Answers = list[int | BaseException]


class Work:
    """Doubles numbers and refuses negative ones; each batch waits until it may go on."""

    def __init__(self, *, waits: bool = False) -> None:
        self.batches: list[list[int]] = []
        self.goes_on = threading.Event()
        if not waits:
            self.goes_on.set()

    def __call__(self, asks: Sequence[int]) -> Sequence[int | Exception]:
        self.batches.append(list(asks))
        assert self.goes_on.wait(30), "nobody said to go on"
        if 0 in asks:
            raise ZeroDivisionError("the batch broke")
        return [ValueError(f"no {ask}") if ask < 0 else 2 * ask for ask in asks]


async def settled(tasks: Sequence[asyncio.Task[int]]) -> Answers:
    async with asyncio.timeout(30):
        return await asyncio.gather(*tasks, return_exceptions=True)


async def busy(most: int, *asks: int, cancelled: int | None = None) -> tuple[Answers, Work]:
    """Answers of a first call, of 1, and of calls that come while it is at work."""
    work = Work(waits=True)
    batcher: Batcher[int, int] = Batcher(work, most=most)
    tasks = [asyncio.create_task(batcher.ask(1))]
    while not work.batches:
        await asyncio.sleep(0)
    tasks += [asyncio.create_task(batcher.ask(ask)) for ask in asks]
    await asyncio.sleep(0)  # all have asked by then
    if cancelled is not None:
        tasks[cancelled].cancel()
        await asyncio.sleep(0)
    work.goes_on.set()
    return await settled(tasks), work


def test_calls_during_a_batch_form_the_next_batches_and_fail_alone_or_with_their_batch() -> None:
    answers, work = asyncio.run(busy(3, 2, 3, 4, 5, 6))
    assert answers == [2, 4, 6, 8, 10, 12]
    assert work.batches == [[1], [2, 3, 4], [5, 6]]
    (first, second, refused, last), _ = asyncio.run(busy(8, 2, -3, 4))
    assert (first, second, str(refused), last) == (2, 4, "no -3", 8)
    (first, second, third, last), _ = asyncio.run(busy(2, 2, 0, 4))
    assert (first, last) == (2, 8)
    assert [type(each) for each in (second, third)] == [ZeroDivisionError] * 2


@pytest.mark.parametrize("cancelled", [0, 1], ids=["at work", "waiting"])
def test_a_cancelled_call_does_not_affect_its_batch(cancelled: int) -> None:
    answers, _ = asyncio.run(busy(8, 2, 3, cancelled=cancelled))
    assert isinstance(answers.pop(cancelled), asyncio.CancelledError)
    assert answers == ([4, 6] if cancelled == 0 else [2, 6])


def test_a_batch_gathers_more_calls_after_one_of_several_until_it_is_full() -> None:
    async def asked_apart(work: Work) -> Answers:
        batcher = Batcher(work, most=8, gather_s=0.2)
        together = [asyncio.create_task(batcher.ask(ask)) for ask in (1, 2)]
        answers = await settled(together)
        apart = [asyncio.create_task(batcher.ask(3))]
        await asyncio.sleep(0)
        apart.append(asyncio.create_task(batcher.ask(4)))
        return answers + await settled(apart)

    async def asked_together(work: Work) -> Answers:
        batcher = Batcher(work, most=2, gather_s=3600.0)
        return await settled([asyncio.create_task(batcher.ask(ask)) for ask in range(1, 7)])

    work = Work()
    assert asyncio.run(asked_apart(work)) == [2, 4, 6, 8]
    assert work.batches == [[1, 2], [3, 4]]
    work = Work()
    assert asyncio.run(asked_together(work)) == [2, 4, 6, 8, 10, 12]
    assert work.batches == [[1, 2], [3, 4], [5, 6]]
    work = Work()
    assert asyncio.run(Batcher(work, most=8).ask(3)) == 6, "a single call is not delayed"
    assert work.batches == [[3]]


LAYOUT = Layout(num_microbatches=8)


def submit(store: Store) -> int:
    """A campaign on the cluster of the factories' workers."""
    spec = CampaignSpec.from_mapping(CAMPAIGN)
    return store.campaigns.create(spec.to_mapping(), num_legal_layouts=4).id


def lease_for_each(store: Store, *workers: WorkerRecord) -> list[list[LeaseRead] | BaseException]:
    """What workers are answered that ask at the same time, for a trial each."""

    async def ask() -> list[list[LeaseRead] | BaseException]:
        batches = WorkerBatches.of(store)
        asks = [LeaseAsk(worker_id=worker.id, request=LeaseRequest()) for worker in workers]
        return await asyncio.gather(*map(batches.leases.ask, asks), return_exceptions=True)

    return asyncio.run(ask())


def test_a_lease_is_answered_although_the_step_time_to_beat_is_unknown(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trial = store.trials.add(submit(store), LAYOUT)

    def gone(_campaign_ids: object) -> None:
        raise DatabaseUnavailableError("the server has gone")

    monkeypatch.setattr(store.leaderboard, "values_to_beat", gone)
    with caplog.at_level(logging.WARNING):
        (leases,) = lease_for_each(store, make_worker(store))
    assert isinstance(leases, list)
    assert [(lease.trial_id, lease.attempt) for lease in leases] == [(trial.id, 1)]
    assert "the server has gone" in caplog.text


def test_an_unreadable_campaign_does_not_affect_leases_of_others(store: Store) -> None:
    broken = store.trials.add(make_campaign(store, "no-space"), LAYOUT)
    sound = store.trials.add(submit(store), LAYOUT)
    answers = lease_for_each(store, make_worker(store, "w1"), make_worker(store, "w2"))
    assert store.trials.get(broken.id).state == "RUNNING"
    (refused,) = (answer for answer in answers if isinstance(answer, SearchSpaceError))
    assert "space" in str(refused)
    (leases,) = (answer for answer in answers if isinstance(answer, list))
    assert [lease.trial_id for lease in leases] == [sound.id]
