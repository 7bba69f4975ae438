"""Opens the searches of campaigns on threads, so that other campaigns need not wait."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Set
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final

from layout_tuner.tuner.driver.background_work import start_beside
from layout_tuner.tuner.driver.campaign_search import CampaignSearch
from layout_tuner.tuner.errors import OpeningStuckError

Open = Callable[[], CampaignSearch]

MAX_OPENINGS: Final = 4
"""Searches that are opened at the same time; more would slow down the driver's rounds."""

SLOW_AFTER_S: Final = 60.0
"""An opening that takes longer than this is logged."""

STUCK_AFTER_S: Final = 900.0
"""An opening that takes longer than this is taken to hang."""

_log = logging.getLogger(__name__)


class BackgroundOpening:
    """Opens each search on a thread of its own; the campaign is skipped until it is open."""

    def __init__(self, *, stuck_after_s: float = STUCK_AFTER_S) -> None:
        self._stuck_after_s = stuck_after_s
        self._openings: dict[int, _Opening] = {}
        self._forgotten: list[_Opening] = []
        """Openings of campaigns that no longer run, whose threads have not ended."""

    def take(self, campaign_id: int, open_search: Open) -> CampaignSearch | None:
        """The search once it is open; None before.

        An exception of the opening is raised here, and the next call starts the opening again.

        Raises:
            OpeningStuckError: it has not ended within `stuck_after_s`. It no longer counts towards
                `MAX_OPENINGS`.
        """
        opening = self._openings.get(campaign_id)
        if opening is None:
            if self._num_running() < MAX_OPENINGS:
                self._openings[campaign_id] = _Opening(start_beside("opening", open_search))
            return None
        if opening.search.done():
            del self._openings[campaign_id]
            return opening.search.result()
        if opening.age_s > self._stuck_after_s:
            del self._openings[campaign_id]
            raise OpeningStuckError(
                f"its search was not opened within {self._stuck_after_s:g} s; clone the campaign with a "
                "smaller space or another strategy"
            )
        if opening.age_s > SLOW_AFTER_S and not opening.is_logged:
            opening.is_logged = True
            _log.info("campaign %d is still being opened after %.0f s", campaign_id, opening.age_s)
        return None

    def is_done(self, campaign_id: int) -> bool:
        """Whether the next call of `take` has a result."""
        opening = self._openings.get(campaign_id)
        return opening is not None and opening.search.done()

    def keep_only(self, campaign_ids: Set[int]) -> None:
        """Drops the openings of all other campaigns; their threads end by themselves."""
        self._forgotten += [each for key, each in self._openings.items() if key not in campaign_ids]
        self._openings = {key: each for key, each in self._openings.items() if key in campaign_ids}

    def _num_running(self) -> int:
        """Threads that count towards `MAX_OPENINGS`: all that are not stuck."""
        self._forgotten = [
            each
            for each in self._forgotten
            if not each.search.done() and each.age_s <= self._stuck_after_s
        ]
        num_awaited = sum(not each.search.done() for each in self._openings.values())
        return num_awaited + len(self._forgotten)


@dataclass(eq=False, slots=True)
class _Opening:
    search: Future[CampaignSearch]
    began_at: float = field(default_factory=time.monotonic)
    is_logged: bool = False
    """Whether the log says that it takes long."""

    @property
    def age_s(self) -> float:
        """Seconds since the opening began."""
        return time.monotonic() - self.began_at
