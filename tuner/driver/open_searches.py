"""The searches that are open: within bounds of legal layouts, and in turns of their owners.

An open `guided` search holds `BYTES_A_LAYOUT` bytes a layout (`open_limits.py`), so that the
bounds limit the driver's memory. A search that is closed is rebuilt from the database at its next
turn; its waiting trials are leased meanwhile.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Final

from layout_tuner.results_db.owner_turns import OwnerTurns
from layout_tuner.results_db.records import CampaignRecord, WorkerRecord
from layout_tuner.results_db.store import Store
from layout_tuner.tuner.driver.background_work import MemoryPause
from layout_tuner.tuner.driver.campaign_opening import MAX_OPENINGS, BackgroundOpening
from layout_tuner.tuner.driver.campaign_search import CampaignSearch
from layout_tuner.tuner.driver.open_limits import OpenLimits

SMALL_SEARCH: Final = 50_000
"""Most legal layouts of a search that is opened before any worker could run its trials."""
MAX_OPENINGS_OF_OWNER: Final = 3
"""Searches of one owner that are opened at the same time; of large ones, one of all owners."""
LEAST_TURN_S: Final = 10.0
"""How long a search stays open, at least, while others wait for its place."""
TURN_IN_OPENINGS: Final = 4.0
"""The same in times that its opening took: opening takes at most a fifth of the time."""
SAID_AFTER_S: Final = 5.0
"""A search that waits for longer has a reason in the campaign's progress."""

_log: Final = logging.getLogger("layout_tuner.tuner.driver.driver")


@dataclass(eq=False, kw_only=True, slots=True)
class _Place:
    """The place of a search that is open or being opened."""

    campaign_id: int
    owner: str
    num_layouts: int
    began_at: float = field(default_factory=time.monotonic)
    opened_at: float = 0.0
    search: CampaignSearch | None = None
    """None: it is being opened."""

    @property
    def is_large(self) -> bool:
        return self.num_layouts > SMALL_SEARCH

    @property
    def had_its_turn(self) -> bool:
        """Whether the search may be closed because others wait."""
        if self.search is None:
            return False
        turn_s = max(LEAST_TURN_S, TURN_IN_OPENINGS * (self.opened_at - self.began_at))
        return time.monotonic() - self.opened_at > turn_s


class OpenSearches:
    """The open searches by campaign."""

    def __init__(
        self, store: Store, opening: BackgroundOpening | None, limits: OpenLimits | None = None
    ) -> None:
        """Starts without any; without an `opening`, rounds open searches at once."""
        self._store = store
        self._opening = opening
        self._limits = limits or OpenLimits()
        self._places: dict[int, _Place] = {}
        self._turns = OwnerTurns()
        self._waiting_since: dict[int, float] = {}
        """When each campaign began to wait for a place, by the monotonic clock."""
        self._pauses: dict[int, MemoryPause] = {}
        self._unserved: set[int] = set()
        """Campaigns with large searches that no worker could run."""

    def __getitem__(self, campaign_id: int) -> CampaignSearch:
        search = self.get(campaign_id)
        if search is None:
            raise KeyError(campaign_id)
        return search

    def get(self, campaign_id: int) -> CampaignSearch | None:
        """The search of a campaign; None: it is not open."""
        place = self._places.get(campaign_id)
        return None if place is None else place.search

    @property
    def num_places(self) -> int:
        """Searches that are open or being opened."""
        return len(self._places)

    @property
    def is_opening(self) -> bool:
        return any(place.search is None for place in self._places.values())

    def close(self, campaign_id: int) -> None:
        """Drops a search, and what is kept of its opening."""
        self._places.pop(campaign_id, None)

    def keep_only(self, running: Set[int]) -> None:
        """Drops the searches of campaigns that were paused, cancelled or have ended."""
        if self._opening is not None:
            self._opening.keep_only(running)
        self._pauses = {key: pause for key, pause in self._pauses.items() if key in running}
        for campaign_id in self._places.keys() - running:
            place = self._places.pop(campaign_id)
            if place.search is not None:
                name = place.search.spec.name
                _log.info("campaign %r no longer runs: its search is dropped", name)

    def give_turns(self, campaigns: Sequence[CampaignRecord]) -> None:
        """Chooses the searches that are opened next; closes others that had their turn for them.

        Owners whose searches have the fewest layouts come first, and of an owner the search that
        has waited longest. Behind a large search that finds no room, only small ones are opened: so
        it is not overtaken for ever.
        """
        waiting = self._due([each for each in campaigns if each.id not in self._places])
        self._waiting_since = {
            each.id: self._waiting_since.get(each.id, time.monotonic()) for each in waiting
        }
        waiting.sort(key=lambda each: self._waiting_since[each.id])
        blocked: set[str] = set()
        is_full = False
        in_turn = self._turns.order(
            waiting,
            attrgetter("created_by"),
            held=self._held(),
            cost_of=attrgetter("num_legal_layouts"),
        )
        for campaign in in_turn:
            place = _Place(
                campaign_id=campaign.id,
                owner=campaign.created_by,
                num_layouts=campaign.num_legal_layouts,
            )
            is_blocked = place.is_large and (is_full or place.owner in blocked)
            if is_blocked or not self._has_thread_for(place):
                continue
            if self._fits(place) or self._make_room_for(place):
                self._places[campaign.id] = place
                self._turns.note(place.owner)
            elif _has_room(place, self._of_owner(place.owner), self._limits.of_owner):
                is_full = True
            else:
                blocked.add(place.owner)

    def take(self, campaign: CampaignRecord) -> CampaignSearch | None:
        """The campaign's search; None while it waits or is being opened.

        An exception of the opening is raised here.
        """
        place = self._places.get(campaign.id)
        if place is None:
            return None
        if place.search is None:
            open_search = partial(self._open, campaign)
            opened = (
                self._opening.take(campaign.id, open_search) if self._opening else open_search()
            )
            if opened is None:
                return None
            place.search, place.opened_at = opened, time.monotonic()
        place.search.take_budget(campaign)
        if place.search.is_outdated:
            self.close(campaign.id)
            return None
        return place.search

    def pause(self, campaign: CampaignRecord) -> None:
        """Closes a search for which the memory did not suffice; it is opened again later."""
        self.close(campaign.id)
        pause = self._pauses.setdefault(campaign.id, MemoryPause())
        _log.warning("campaign %r: %s", campaign.name, pause.begin("its search"))

    def _is_paused(self, campaign: CampaignRecord) -> bool:
        pause = self._pauses.get(campaign.id)
        return pause is not None and not pause.is_over

    def worked(self, campaign_id: int) -> None:
        """Notes that a round with the search had enough memory."""
        self._pauses.pop(campaign_id, None)

    def why_waiting(self, campaign: CampaignRecord) -> str:
        """Why the search of a campaign is not open; empty: it is, or has no need to be."""
        size, limits = f"its search of {campaign.num_legal_layouts:,} layouts", self._limits
        if campaign.id in self._places:
            return ""
        if self._is_paused(campaign):
            return f"the driver has too little memory for {size}; it tries again"
        if campaign.id in self._unserved:
            return f"{size} is opened once a worker could run its trials"
        since = self._waiting_since.get(campaign.id)
        if since is None or time.monotonic() - since < SAID_AFTER_S:
            return ""
        return (
            f"{size} waits for its turn: the driver opens one large search at a time, and keeps "
            f"at most {limits.of_owner:,} layouts of an owner open and {limits.in_all:,} in all"
        )

    def _due(self, closed: Sequence[CampaignRecord]) -> list[CampaignRecord]:
        """The campaigns whose search is to be opened.

        A worker could run their trials; or they have no open trial, and their search is small or
        has had trials, so that it can go on or end.
        """
        self._unserved.clear()
        if not closed:
            return []
        workers = [each for each in self._store.workers.find() if each.state != "draining"]
        due = []
        for campaign in closed:
            if self._is_paused(campaign):
                continue
            if _is_served(campaign, workers):
                due.append(campaign)
            elif campaign.num_legal_layouts > SMALL_SEARCH and campaign.started_at is None:
                self._unserved.add(campaign.id)
            elif not self._store.trials.count_open(campaign.id):
                due.append(campaign)
        return due

    def _has_thread_for(self, place: _Place) -> bool:
        if self._opening is None:
            return True
        opening = [
            place
            for key, place in self._places.items()
            if place.search is None and not self._opening.is_done(key)
        ]
        if place.is_large and any(each.is_large for each in opening):
            return False
        of_owner = sum(each.owner == place.owner for each in opening)
        return len(opening) < MAX_OPENINGS and of_owner < MAX_OPENINGS_OF_OWNER

    def _of_owner(self, owner: str) -> list[_Place]:
        return [each for each in self._places.values() if each.owner == owner]

    def _fits(self, place: _Place, without: Collection[_Place] = ()) -> bool:
        others = [each for each in self._places.values() if each not in without]
        own = [each for each in others if each.owner == place.owner]
        limits = self._limits
        return _has_room(place, own, limits.of_owner) and _has_room(place, others, limits.in_all)

    def _make_room_for(self, place: _Place) -> bool:
        """Closes searches that had their turn, if that makes room: those of the owner first.

        Then come those of the owner with the most layouts, and those that were opened first.
        """
        held = self._held()
        done = [each for each in self._places.values() if each.had_its_turn]
        done.sort(key=lambda each: (each.owner != place.owner, -held[each.owner], each.opened_at))
        for number in range(1, len(done) + 1):
            if self._fits(place, done[:number]):
                for each in done[:number]:
                    _log.info("campaign %d: its search is closed until its turn", each.campaign_id)
                    self.close(each.campaign_id)
                return True
        return False

    def _held(self) -> Counter[str]:
        """Layouts that each owner has open."""
        held: Counter[str] = Counter()
        for place in self._places.values():
            held[place.owner] += place.num_layouts
        return held

    def _open(self, campaign: CampaignRecord) -> CampaignSearch:
        """Builds a campaign's search from the database; it only reads, maybe on another thread."""
        trials = self._store.trials.find(campaign.id)
        known = self._store.plans.known_trials(campaign)
        search = CampaignSearch.rebuild(campaign, trials, known)
        _log.info(
            "campaign %r is open: strategy %s, %d legal layouts, %d trials so far, calibrated on "
            "%d of other campaigns",
            campaign.name,
            search.spec.strategy,
            search.num_layouts,
            len(trials),
            len(known),
        )
        return search


def _has_room(place: _Place, others: Sequence[_Place], bound: int) -> bool:
    if place.num_layouts > bound:
        return not any(each.is_large for each in others)
    return place.num_layouts + sum(each.num_layouts for each in others) <= bound


def _is_served(campaign: CampaignRecord, workers: Sequence[WorkerRecord]) -> bool:
    """Whether a worker could run the campaign's trials."""
    cluster, trainer = campaign.cluster_name, campaign.trainer
    return any(worker.cluster == cluster and worker.runs(trainer) for worker in workers)
