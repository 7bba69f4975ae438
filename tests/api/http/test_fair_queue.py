"""One token's work does not keep the work of others waiting."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from api.http.body_limits import FairQueue


async def _started(queue: FairQueue, tokens: Sequence[str]) -> tuple[list[str], int]:
    """The tokens in the order in which their work started, and most that worked at once."""
    started: list[str] = []
    working = most = 0

    async def work(token: str) -> None:
        nonlocal working, most
        async with queue.turn(token):
            started.append(token)
            working += 1
            most = max(most, working)
            for _ in range(10):
                await asyncio.sleep(0)
            working -= 1

    await asyncio.gather(*(work(token) for token in tokens))
    return started, most


def test_a_second_token_starts_before_the_second_work_of_the_first() -> None:
    started, most = asyncio.run(_started(FairQueue(at_once=1), "aaaabcb"))
    assert (started, most) == (list("abcabaa"), 1)


def test_two_tokens_work_at_once_but_not_two_works_of_one() -> None:
    started, most = asyncio.run(_started(FairQueue(at_once=2), "aaaa"))
    assert (started, most) == (list("aaaa"), 1)
    started, most = asyncio.run(_started(FairQueue(at_once=2), "aaaabbcc"))
    assert (started[:4], most) == (list("abca"), 2)


def test_cancelled_work_gives_its_turn_to_others() -> None:
    async def cancelled_in_each_state() -> list[str]:
        queue = FairQueue(at_once=1)
        tasks = [asyncio.create_task(_started(queue, token)) for token in "abc"]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        for task in tasks[:2]:  # one works, one waits
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        started, _ = await asyncio.wait_for(_started(queue, "ab"), 20)
        return [*(await tasks[2])[0], *started]

    assert asyncio.run(cancelled_in_each_state()) == ["c", "a", "b"]
