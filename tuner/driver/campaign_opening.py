"""Opens the searches of campaigns on threads, so that other campaigns need not wait."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Set
from typing import Final

from tuner.driver.campaign_search import CampaignSearch
from tuner.errors import OpeningStuckError

Open = Callable[[], CampaignSearch]

MAX_OPENINGS: Final = 4
"""Searches that are opened at the same time; more would slow down the driver's rounds."""

SLOW_AFTER_S: Final = 60.0
"""An opening that takes longer than this is logged."""

STUCK_AFTER_S: Final = 900.0
"""An opening that takes longer than this is taken to hang."""

_log = logging.getLogger(__name__)


class ImmediateOpening:
    """Opens a search during the round that asks for it."""

    def take(self, _campaign_id: int, open_search: Open) -> CampaignSearch | None:
        """The search, opened now."""
        return open_search()

    def keep_only(self, campaign_ids: Set[int]) -> None:
        """Does nothing: no search is ever being opened."""


class BackgroundOpening:
    """Opens each search on a thread of its own; the campaign is skipped until it is open.

    The threads are daemons: an opening only reads, and may end at any point.
    """

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
                self._openings[campaign_id] = _Opening(open_search)
            return None
        if opening.is_done:
            del self._openings[campaign_id]
            return opening.result()
        if opening.age_s > self._stuck_after_s:
            del self._openings[campaign_id]
            raise OpeningStuckError(
                f"its search was not opened within {self._stuck_after_s:g} s; clone the campaign with a "
                "smaller space or another strategy"
            )
        opening.log_if_slow(campaign_id)
        return None

    def keep_only(self, campaign_ids: Set[int]) -> None:
        """Drops the openings of all other campaigns; their threads end by themselves."""
        self._forgotten += [each for key, each in self._openings.items() if key not in campaign_ids]
        self._openings = {key: each for key, each in self._openings.items() if key in campaign_ids}

    def _num_running(self) -> int:
        """Threads that count towards `MAX_OPENINGS`: all that are not stuck."""
        self._forgotten = [
            each
            for each in self._forgotten
            if not each.is_done and each.age_s <= self._stuck_after_s
        ]
        num_awaited = sum(not each.is_done for each in self._openings.values())
        return num_awaited + len(self._forgotten)


class _Opening:
    def __init__(self, open_search: Open) -> None:
        self._open_search = open_search
        self._began_at = time.monotonic()
        self._is_logged = False
        self._search: CampaignSearch | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="opening", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    @property
    def age_s(self) -> float:
        """Seconds since the opening began."""
        return time.monotonic() - self._began_at

    def log_if_slow(self, campaign_id: int) -> None:
        """Logs once that the opening takes long."""
        if self.age_s > SLOW_AFTER_S and not self._is_logged:
            self._is_logged = True
            _log.info("campaign %d is still being opened after %.0f s", campaign_id, self.age_s)

    def result(self) -> CampaignSearch:
        if self._error is not None:
            raise self._error
        assert self._search is not None, "the thread ended without a result"
        return self._search

    def _run(self) -> None:
        try:
            self._search = self._open_search()
        except Exception as error:
            self._error = error
