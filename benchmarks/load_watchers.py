"""Watchers of live events, each of one campaign: what each heard, and how late.

Reads what to do as JSON from stdin. Says "watching" on stdout once every stream is open, and ends when stdin
says "stop": then it writes what was heard as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from datetime import datetime

from benchmarks.http_connection import Connection


@dataclass(frozen=True, kw_only=True, slots=True)
class Orders:
    """What is watched."""

    services: list[tuple[str, int, str]]
    """Host, port and token of each api process; watchers take them in turns."""
    campaigns: list[int]
    """One a watcher."""


@dataclass(kw_only=True, slots=True)
class Heard:
    """What a watcher heard."""

    campaign: int
    after: int = -1
    """The number of the last event before its stream; -1: it was not opened."""
    seqs: list[int] = field(default_factory=list)
    """The numbers of the events, in the order in which they came."""
    kinds: list[str] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)
    """From the time that each event carries to when it was read."""


async def _watch(service: tuple[str, int, str], heard: Heard, opened: asyncio.Semaphore) -> None:
    async with Connection(*service) as http:
        event: dict[str, str] = {}
        async for line in http.lines(f"/v1/campaigns/{heard.campaign}/events"):
            if line:
                name, _, value = line.partition(":")
                event[name] = value.removeprefix(" ")
                continue
            if event.get("event") == "stream.opened":
                heard.after = int(event["id"])
                opened.release()
            elif "data" in event:
                heard.seqs.append(int(event["id"]))
                heard.kinds.append(event["event"])
                at = datetime.fromisoformat(json.loads(event["data"])["at"])
                heard.late_s.append(time.time() - at.timestamp())
            event = {}


async def watch(orders: Orders) -> list[Heard]:
    """All of the watchers, until stdin says to stop."""
    heard = [Heard(campaign=campaign) for campaign in orders.campaigns]
    opened = asyncio.Semaphore(0)
    tasks = [
        asyncio.create_task(_watch(orders.services[i % len(orders.services)], one, opened))
        for i, one in enumerate(heard)
    ]
    for _ in tasks:
        await opened.acquire()
    print("watching", flush=True)
    told = asyncio.create_task(asyncio.to_thread(sys.stdin.readline))
    await asyncio.wait([told, *tasks], return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        if task.done():
            # A stream that ends of itself is a fault; its error, where it has one, says which.
            task.result()
            raise EOFError("a stream has ended")
        task.cancel()
    return heard


if __name__ == "__main__":
    orders = Orders(**json.loads(sys.stdin.readline()))
    heard = asyncio.run(watch(orders))
    json.dump({"heard": [asdict(one) for one in heard], "cpu_s": time.process_time()}, sys.stdout)
