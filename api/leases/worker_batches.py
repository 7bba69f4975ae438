"""Leases, heartbeats and outcomes of all workers of this process, in batches.

A batch is one transaction in place of many. While one runs, the next collects: the busier the
service, the larger the batches. Where answers may wait, a busy service collects for longer, since a
large batch takes hardly more time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from starlette.concurrency import run_in_threadpool

from layout_tuner.errors import SearchSpaceError
from layout_tuner.predictions.belief.step_time_to_beat import stop_above_s
from layout_tuner.protocol.worker_messages import (
    HeartbeatReply,
    LeaseRead,
    OutcomeReply,
    OutcomeReport,
)
from layout_tuner.results_db.allocations.leases import LeaseAsk
from layout_tuner.results_db.allocations.workers import Beat
from layout_tuner.results_db.errors import ResultsDbError
from layout_tuner.results_db.records import LeaseRecord
from layout_tuner.results_db.rows import record_of
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec
from layout_tuner.search_spaces.campaigns.stored_campaign import Damaged

MOST_OUTCOMES: Final = 32
"""Outcomes in one transaction. Larger batches gain little, and lock campaigns for longer."""
OUTCOME_GATHER_S: Final = 0.08
"""Seconds for which outcomes are collected into one transaction when several come at once."""
MOST_LEASES: Final = 64
MOST_BEATS: Final = 64

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


@dataclass(frozen=True, slots=True)
class WorkerBatches:
    """The batches of the requests of workers."""

    leases: Batcher[LeaseAsk, list[LeaseRead]]
    beats: Batcher[Beat, HeartbeatReply]
    outcomes: Batcher[OutcomeReport, OutcomeReply]

    @classmethod
    def of(cls, store: Store) -> WorkerBatches:
        def lease(
            asks: Sequence[LeaseAsk],
        ) -> Sequence[list[LeaseRead] | ResultsDbError | SearchSpaceError]:
            return [
                answer if isinstance(answer, ResultsDbError) else _readable(answer)
                for answer in store.leases.lease_many(asks)
            ]

        return cls(
            leases=Batcher(lease, most=MOST_LEASES),
            beats=Batcher(store.leases.take_beats, most=MOST_BEATS),
            outcomes=Batcher(
                store.outcomes.post_all, most=MOST_OUTCOMES, gather_s=OUTCOME_GATHER_S
            ),
        )


def _readable(leases: Sequence[LeaseRecord]) -> list[LeaseRead] | SearchSpaceError:
    """The leases of a request as documents; the error of a campaign that cannot be read."""
    read = []
    for lease in leases:
        spec = lease.stored.read
        if isinstance(spec, Damaged):
            return spec.error
        read.append(_lease_read(spec, lease))
    return read


def _lease_read(spec: CampaignSpec, lease: LeaseRecord) -> LeaseRead:
    above_s = None
    if lease.to_beat is not None and spec.stops_early(
        lease.layout, lease.repeat_of is not None, lease.num_layers
    ):
        above_s = stop_above_s(lease.to_beat, spec, lease.layout)
    probe = spec.probe_request(
        lease.layout, num_layers=lease.num_layers, stop_above_step_time_s=above_s
    )
    request = probe.to_mapping()
    return record_of(LeaseRead, lease, campaign=lease.campaign_name, request=request)
