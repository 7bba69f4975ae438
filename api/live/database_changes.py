"""Wakes what waits for a change of the database, instead of a query for each of them.

On SQLite one look for the whole process tells whether anything was committed, by this process or
another (`results_db.database.change_mark`). On PostgreSQL there is no such look, and every wait is
a pause.
"""

from __future__ import annotations

import asyncio
from threading import Event
from typing import Final

from layout_tuner.api.background_loops import aligned_pause_s, wait_for
from layout_tuner.results_db.database.change_mark import ChangeMark
from layout_tuner.timing_mark import ranks_time_here

WHILE_TIMING_S: Final = 1.0
"""Seconds between two looks while ranks time their iterations on the cores of this process."""


class DatabaseChanges:
    """Counts changes of the database while a caller waits for one. For one event loop."""

    def __init__(self, mark: ChangeMark | None, *, stopping: Event, look_s: float) -> None:
        """Without a mark it cannot tell changes. Once `stopping` is set, nothing waits."""
        self._mark = mark
        self._stopping = stopping
        self._look_s = look_s
        self.number = 0
        """The number of changes that were seen; read it before the database is read."""
        self._news = asyncio.Event()
        self._num_waiting = 0
        self._looking: asyncio.Task[None] | None = None

    @property
    def can_tell(self) -> bool:
        """Whether a wait lasts until there is a change; else it is a pause."""
        return self._mark is not None

    def finds(self, query: str, *parameters: str) -> bool:
        """Whether a query of `results_db.database.change_mark` has a result, or may have one."""
        return self._mark is None or self._mark.finds(query, *parameters)

    async def after(self, number: int, *, within_s: float, pause_s: float) -> bool:
        """Waits until there was a change since `number` was read, or the service stops.

        `number` was read before the database. Where changes cannot be told, the wait is `pause_s`.

        Returns:
            Whether there may be a change.
        """
        if self._mark is None:
            await asyncio.sleep(min(pause_s, within_s))
            return True
        if self.number == number:
            self._num_waiting += 1
            if self._looking is None:
                self._looking = asyncio.create_task(self._look(self._mark))
            try:
                await wait_for(self._news, within_s)
            finally:
                self._num_waiting -= 1
        return self.number != number

    async def _look(self, mark: ChangeMark) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._num_waiting:
                look_s = max(self._look_s, WHILE_TIMING_S) if ranks_time_here() else self._look_s
                await asyncio.sleep(aligned_pause_s(loop.time(), look_s))
                if mark.has_changed() or self._stopping.is_set():
                    self.number += 1
                    # Wakes all that wait now; later ones wait for the next change.
                    self._news.set()
                    self._news = asyncio.Event()
        finally:
            self._looking = None

    def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        if self._mark is not None:
            self._mark.close()
