"""Calls at the same time run as one batch: each gets its own answer, even if others fail."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from api.leases.batcher import Batcher


class Work:
    """Doubles numbers and refuses negative ones. Waits for `goes_on` in each batch, if given."""

    def __init__(self, *, goes_on: threading.Event | None = None) -> None:
        self.batches: list[list[int]] = []
        self._goes_on = goes_on

    def __call__(self, asks: Sequence[int]) -> Sequence[int | Exception]:
        self.batches.append(list(asks))
        if self._goes_on is not None:
            assert self._goes_on.wait(30), "nobody said to go on"
        if 0 in asks:
            raise ZeroDivisionError("the batch broke")
        return [ValueError(f"no {ask}") if ask < 0 else 2 * ask for ask in asks]


class Busy:
    """A batcher that is at work on a first batch, until it is told to go on."""

    def __init__(self, *, most: int) -> None:
        self._goes_on = threading.Event()
        self.work = Work(goes_on=self._goes_on)
        self.batcher: Batcher[int, int] = Batcher(self.work, most=most)

    async def begin(self) -> asyncio.Task[int]:
        first = asyncio.create_task(self.batcher.ask(1))
        while not self.work.batches:
            await asyncio.sleep(0)
        return first

    async def ask(self, *asks: int) -> list[asyncio.Task[int]]:
        tasks = [asyncio.create_task(self.batcher.ask(ask)) for ask in asks]
        await asyncio.sleep(0)  # all have asked by then
        return tasks

    def go_on(self) -> None:
        self._goes_on.set()


async def settled(tasks: Sequence[asyncio.Task[int]]) -> list[int | BaseException]:
    async with asyncio.timeout(30):
        return await asyncio.gather(*tasks, return_exceptions=True)


def test_calls_during_a_batch_form_the_next_batches_in_order() -> None:
    async def run() -> Work:
        busy = Busy(most=3)
        tasks = [await busy.begin(), *await busy.ask(2, 3, 4, 5, 6)]
        busy.go_on()
        assert await settled(tasks) == [2, 4, 6, 8, 10, 12]
        return busy.work

    assert asyncio.run(run()).batches == [[1], [2, 3, 4], [5, 6]]


async def answers_of_a_batch(most: int, *asks: int) -> list[int | BaseException]:
    """What calls are answered that come while another batch is at work."""
    busy = Busy(most=most)
    tasks = [await busy.begin(), *await busy.ask(*asks)]
    busy.go_on()
    return await settled(tasks)


def test_a_refused_call_is_alone_and_an_exception_of_a_batch_reaches_all_its_calls() -> None:
    first, second, refused, last = asyncio.run(answers_of_a_batch(8, 2, -3, 4))
    assert (first, second, last) == (2, 4, 8)
    assert str(refused) == "no -3"
    first, second, third, last = asyncio.run(answers_of_a_batch(2, 2, 0, 4))
    assert (first, last) == (2, 8)
    assert [type(each) for each in (second, third)] == [ZeroDivisionError] * 2


@pytest.mark.parametrize("at_work", [True, False], ids=["at work", "waiting"])
def test_a_cancelled_call_does_not_affect_its_batch(at_work: bool) -> None:
    async def run() -> list[int | BaseException]:
        busy = Busy(most=8)
        first = await busy.begin()
        tasks = [first, *await busy.ask(2, 3)]
        tasks[0 if at_work else 1].cancel()
        await asyncio.sleep(0)
        busy.go_on()
        return await settled(tasks)

    answers = asyncio.run(run())
    gone = 0 if at_work else 1
    assert isinstance(answers[gone], asyncio.CancelledError)
    assert [answer for place, answer in enumerate(answers) if place != gone] == (
        [4, 6] if at_work else [2, 6]
    )


def test_a_batch_after_one_of_several_calls_gathers_more_calls() -> None:
    async def run() -> Work:
        work = Work()
        batcher = Batcher(work, most=8, gather_s=0.2)
        together = [asyncio.create_task(batcher.ask(ask)) for ask in (1, 2)]
        assert await settled(together) == [2, 4]
        apart = [asyncio.create_task(batcher.ask(3))]
        await asyncio.sleep(0)
        apart.append(asyncio.create_task(batcher.ask(4)))
        assert await settled(apart) == [6, 8]
        return work

    assert asyncio.run(run()).batches == [[1, 2], [3, 4]]


def test_a_single_call_is_not_delayed_and_a_full_batch_gathers_no_more() -> None:
    async def run() -> Work:
        work = Work()
        batcher = Batcher(work, most=2, gather_s=3600.0)
        tasks = [asyncio.create_task(batcher.ask(ask)) for ask in range(1, 7)]
        assert await asyncio.wait_for(settled(tasks), timeout=60) == [2, 4, 6, 8, 10, 12]
        return work

    assert asyncio.run(run()).batches == [[1, 2], [3, 4], [5, 6]]
    work = Work()
    assert asyncio.run(Batcher(work, most=8).ask(3)) == 6
    assert work.batches == [[3]]
