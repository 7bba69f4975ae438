"""Live events, followed."""

from __future__ import annotations

from api.client.call import segment
from api.client.following import Stream
from api.client.route import follow


class EventCalls:
    """What happens, as it happens; an iteration has no end, and goes on by itself where a stream is lost.

    `EventsMissedError` tells that events after the one that was given are kept no more.
    """

    @follow
    def events(self, *, after: int | None = None) -> Stream:
        """What happens to all campaigns: from now on, or after an event by its number."""
        return Stream(path="/v1/events", after=after)

    @follow
    def campaign_events(self, campaign: str, *, after: int | None = None) -> Stream:
        """What happens to a campaign and its trials: from now on, or after an event by its number."""
        return Stream(path=f"/v1/campaigns/{segment(campaign)}/events", after=after)
