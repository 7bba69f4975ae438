"""Whose turn it is among owners: leases, openings of searches and plans all ask here.

The owner of a campaign is its `created_by`. Without turns, an owner with 97 of 100 campaigns
would get 97 % of the devices.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from heapq import heapify, heappop, heapreplace
from itertools import count
from types import MappingProxyType
from typing import Final, TypeVar

T = TypeVar("T")

NOTHING_HELD: Final[Mapping[str, float]] = MappingProxyType({})

EQUAL: Final[Mapping[str, float]] = MappingProxyType({})
"""Weights of owners: all are 1."""


class OwnerTurns:
    """The order of owners: who holds least by weight is next, of equals who was served longest ago.

    The times of service are those of this process; a restart forgets them, which costs an owner at
    most one turn.
    """

    def __init__(self) -> None:
        self._served_at: dict[str, int] = {}
        self._clock = count(1)

    def note(self, owner: str) -> None:
        """Notes that an owner was served just now."""
        self._served_at[owner] = next(self._clock)

    def order(
        self,
        waiting: Iterable[T],
        owner_of: Callable[[T], str],
        *,
        held: Mapping[str, float] = NOTHING_HELD,
        weights: Mapping[str, float] = EQUAL,
        cost_of: Callable[[T], float] = lambda _: 1.0,
    ) -> Iterator[T]:
        """What waits, in turns of its owners; that of one owner stays in its order.

        `held` is what each owner holds now, in the unit of `cost_of`, which each item adds to it;
        both are divided by the owner's weight.
        """
        queues: defaultdict[str, deque[T]] = defaultdict(deque)
        for item in waiting:
            queues[owner_of(item)].append(item)
        turn = count(max(self._served_at.values(), default=0) + 1)
        # The place in the list decides between owners of whom none was served.
        heap = [
            (
                held.get(owner, 0.0) / weights.get(owner, 1.0),
                self._served_at.get(owner, 0),
                place,
                owner,
            )
            for place, owner in enumerate(queues)
        ]
        heapify(heap)
        while heap:
            has, _, place, owner = heap[0]
            item = queues[owner].popleft()
            if queues[owner]:
                more = cost_of(item) / weights.get(owner, 1.0)
                heapreplace(heap, (has + more, next(turn), place, owner))
            else:
                heappop(heap)
            yield item
