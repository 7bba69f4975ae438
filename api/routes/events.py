"""Live events, as server-sent events that a client can take up again where it lost them."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any, Final

from fastapi import APIRouter, Header, Query, Response

from api.dependencies import CampaignDep, HubDep, SettingsDep, StoreDep
from api.errors import EventNumberInvalidError
from api.event_stream import EventStream
from api.schemas import MAX_ID

router = APIRouter(prefix="/v1", tags=["events"])

LastEventId = Annotated[
    str | None,
    Header(max_length=40, description="Go on after this event; what a client sends by itself."),
]
After = Annotated[
    int | None,
    Query(
        ge=0,
        le=MAX_ID,
        description="The same as a parameter; 0 begins with the first event that is kept. Without "
        "either, what happens from now on.",
    ),
]

_STREAM: Final[dict[int | str, dict[str, Any]]] = {
    HTTPStatus.OK: {
        "description": "A stream that ends with the connection. `stream.opened` comes first: its `id` is "
        "the number to go on after, and `missed` says that events before it are kept no more. Each "
        "`data` is a document as in the example; `stream.closed` says why the service ends it.",
        "content": {
            "text/event-stream": {
                "schema": {"type": "string"},
                "example": "event: trial.ended\n"
                'data: {"seq":7,"kind":"trial.ended","at":"2026-01-01T12:00:00Z","campaign_id":1,'
                '"trial_id":3,"data":{"number":3,"state":"COMPLETED","reason":null,"attempt":1}}\n'
                "id: 7\n\n",
            }
        },
    }
}


@router.get(
    "/campaigns/{campaign}/events",
    response_class=Response,
    response_model=None,
    responses=_STREAM,
)
def stream_campaign_events(
    campaign: CampaignDep,
    hub: HubDep,
    store: StoreDep,
    settings: SettingsDep,
    last_event_id: LastEventId = None,
    after: After = None,
) -> Response:
    """Hear what happens to a campaign and its trials, as it happens.

    A client that lost the stream sends `Last-Event-ID`, and hears what it missed first.
    """
    return EventStream(
        hub,
        store,
        settings,
        campaign_id=campaign.id,
        after=_number(last_event_id, after),
    )


@router.get("/events", response_class=Response, response_model=None, responses=_STREAM)
def stream_events(
    hub: HubDep,
    store: StoreDep,
    settings: SettingsDep,
    last_event_id: LastEventId = None,
    after: After = None,
) -> Response:
    """Hear what happens to all campaigns, as it happens.

    A client that lost the stream sends `Last-Event-ID`, and hears what it missed first.
    """
    return EventStream(hub, store, settings, campaign_id=None, after=_number(last_event_id, after))


def _number(last_event_id: str | None, after: int | None) -> int | None:
    """Where to go on; the header, which is of a later time than the address, goes first."""
    if not last_event_id:
        return after
    if not (last_event_id.isascii() and last_event_id.isdigit()) or int(last_event_id) > MAX_ID:
        raise EventNumberInvalidError(
            f"Last-Event-ID {last_event_id!r} is not the number of an event of this service"
        )
    return int(last_event_id)
