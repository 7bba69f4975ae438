"""In which order a round drives the campaigns."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import Final

from layout_tuner.results_db.owner_turns import OwnerTurns
from layout_tuner.results_db.records import CampaignRecord

AGAIN_AFTER_S: Final = 0.2
"""Seconds after which a campaign is driven again in a round that is not over."""


def in_turns(
    campaigns: Iterable[CampaignRecord], *, clock: Callable[[], float] = time.monotonic
) -> Iterator[CampaignRecord]:
    """The campaigns of a round, in turns of their owners.

    While an owner's campaigns are still to be driven, those of owners with fewer come again every
    `AGAIN_AFTER_S`: many campaigns of one owner must not keep the others without waiting trials.
    """
    queues: defaultdict[str, deque[CampaignRecord]] = defaultdict(deque)
    for campaign in campaigns:
        queues[campaign.created_by].append(campaign)
    left = {campaign.id for queue in queues.values() for campaign in queue}
    driven_at: dict[int, float] = {}
    turns = OwnerTurns()
    while left:
        due = [
            queue[0]
            for queue in queues.values()
            if queue[0].id in left or clock() - driven_at[queue[0].id] >= AGAIN_AFTER_S
        ]
        campaign = next(turns.order(due, attrgetter("created_by")))
        turns.note(campaign.created_by)
        queues[campaign.created_by].rotate(-1)
        left.discard(campaign.id)
        yield campaign
        driven_at[campaign.id] = clock()
