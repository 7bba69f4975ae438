"""Batches of requests to the store: one transaction instead of many.

While one batch runs, the next collects: the busier the service, the larger the batches. Where
answers may wait, a busy service collects for longer, since a large batch takes hardly more time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from starlette.concurrency import run_in_threadpool

Ask = TypeVar("Ask")
Answer = TypeVar("Answer")


class Batcher(Generic[Ask, Answer]):
    """Collects requests, and answers them one batch at a time. For one event loop."""

    def __init__(
        self,
        work: Callable[[Sequence[Ask]], Sequence[Answer | Exception]],
        *,
        most: int,
        gather_s: float = 0.0,
    ) -> None:
        """Starts empty.

        Args:
            work: answers a batch, in its order; it runs in a thread. All requests of the batch get
                an exception that it raises.
            most: the largest batch.
            gather_s: seconds for which a batch collects after a batch of several requests, unless
                it is full. After a batch of one request the next does not wait.
        """
        self._work = work
        self._most = most
        self._gather_s = gather_s
        self._is_busy = False
        self._waiting: list[tuple[Ask, asyncio.Future[Answer]]] = []
        self._working: asyncio.Task[None] | None = None

    async def ask(self, ask: Ask) -> Answer:
        """The answer to a request; an exception in its place is raised."""
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((ask, answer))
        if self._working is None:
            self._working = asyncio.create_task(self._run())
        return await answer

    async def _run(self) -> None:
        try:
            while self._waiting:
                if self._is_busy and self._gather_s and len(self._waiting) < self._most:
                    await asyncio.sleep(self._gather_s)
                batch, self._waiting = self._waiting[: self._most], self._waiting[self._most :]
                self._is_busy = len(batch) > 1
                await self._answer(batch)
        finally:
            self._working = None

    async def _answer(self, batch: Sequence[tuple[Ask, asyncio.Future[Answer]]]) -> None:
        answers: Sequence[Answer | Exception]
        try:
            answers = await run_in_threadpool(self._work, [ask for ask, _ in batch])
        except Exception as error:
            answers = [error] * len(batch)
        for (_, future), answer in zip(batch, answers, strict=True):
            if future.done():
                continue  # its request was cancelled
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)
