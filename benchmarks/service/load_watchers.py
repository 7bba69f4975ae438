"""Watchers of live events, one for each campaign: which events each received, and how late.

The process reads its task as a line of JSON from stdin. It prints "watching" once every stream is
open. A second line of stdin names the last event of each campaign. Once every watcher has received
it or timed out, the process writes the received events to stdout as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Final, TypeVar

from benchmarks.service.http_connection import HttpConnection

PATIENCE_S: Final = 15.0
"""For the last events to come."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class WatcherOrders:
    """What is watched."""

    services: list[tuple[str, int, str]]
    """Host, port and token of each api process; watchers take them in turns."""
    campaigns: list[int]
    """One a watcher."""


@dataclass(kw_only=True, slots=True)
class ReceivedEvents:
    """What a watcher heard."""

    campaign: int
    after: int = -1
    """The number of the last event before its stream; -1: it was not opened."""
    seqs: list[int] = field(default_factory=list)
    """The numbers of the events, in the order in which they came."""
    kinds: list[str] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)
    """From the time that each event carries to when it was read."""

    @property
    def newest(self) -> int:
        """The number of the last event that it knows of."""
        return self.seqs[-1] if self.seqs else self.after


async def _watch(
    service: tuple[str, int, str], heard: ReceivedEvents, opened: asyncio.Semaphore
) -> None:
    async with HttpConnection(*service) as http:
        event: dict[str, str] = {}
        async for line in http.lines(f"/v1/campaigns/{heard.campaign}/events"):
            if line:
                name, _, value = line.partition(":")
                event[name] = value.removeprefix(" ")
                continue
            if event.get("event") == "stream.opened":
                heard.after = int(event["id"])
                opened.release()
            elif "data" in event and "id" in event:  # live events have no number
                heard.seqs.append(int(event["id"]))
                heard.kinds.append(event["event"])
                at = datetime.fromisoformat(json.loads(event["data"])["at"])
                heard.late_s.append(time.time() - at.timestamp())
            event = {}


async def watch(orders: WatcherOrders) -> list[ReceivedEvents]:
    """All of the watchers, until they have heard what stdin says is the last.

    Raises:
        EOFError: a stream ended before.
    """
    heard = [ReceivedEvents(campaign=campaign) for campaign in orders.campaigns]
    opened = asyncio.Semaphore(0)
    tasks = [
        asyncio.create_task(_watch(orders.services[i % len(orders.services)], one, opened))
        for i, one in enumerate(heard)
    ]
    opening = asyncio.gather(*(opened.acquire() for _ in tasks))
    await _unless_one_ends(opening, tasks)
    print("watching", flush=True)
    told = asyncio.ensure_future(asyncio.to_thread(sys.stdin.readline))
    last = {
        int(campaign): seq
        for campaign, seq in json.loads(await _unless_one_ends(told, tasks)).items()
    }
    give_up_s = time.monotonic() + PATIENCE_S
    while any(one.newest < last[one.campaign] for one in heard) and time.monotonic() < give_up_s:
        await asyncio.sleep(0.05)
    for task in tasks:
        task.cancel()
    return heard


async def _unless_one_ends(awaited: asyncio.Future[T], tasks: list[asyncio.Task[None]]) -> T:
    await asyncio.wait([awaited, *tasks], return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        if task.done():
            task.result()
            raise EOFError("a stream has ended")
    return await awaited


if __name__ == "__main__":
    orders = WatcherOrders(**json.loads(sys.stdin.readline()))
    heard = asyncio.run(watch(orders))
    json.dump({"heard": [asdict(one) for one in heard], "cpu_s": time.process_time()}, sys.stdout)
