"""Live events, as a stream of server-sent events that a client can resume."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import Annotated, Any, Final

from fastapi import Depends, Header, Query, Response

from layout_tuner.api.dependencies import CampaignDep, HubDep, SettingsDep, StoreDep
from layout_tuner.api.errors import EventNumberInvalidError
from layout_tuner.api.http.lazy_routes import LazyRouter
from layout_tuner.api.live.event_stream import EventStream
from layout_tuner.api.schemas.text_types import id_in
from layout_tuner.documents.limits import MAX_ID

router = LazyRouter(prefix="/v1", tags=["events"])

LastEventId = Annotated[
    str | None,
    Header(
        max_length=40,
        description="Continue after this event; clients of event streams send it by themselves.",
    ),
]
After = Annotated[
    int | None,
    Query(
        ge=0,
        le=MAX_ID,
        description="The same as a parameter; 0 begins with the first stored event. Without either, "
        "the stream begins now.",
    ),
]

_STREAM: Final[dict[int | str, dict[str, Any]]] = {
    HTTPStatus.OK: {
        "description": "A stream that ends with the connection. `stream.opened` comes first: its "
        "`id` is the number to continue after, and `missed` is true if earlier events were deleted. "
        "Each `data` is a document as in the example; live events have no `id`. `stream.closed` states "
        "why the service ends it.",
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


async def open_stream(
    hub: HubDep,
    store: StoreDep,
    settings: SettingsDep,
    last_event_id: LastEventId = None,
    after: After = None,
) -> Callable[[int | None], Response]:
    """Opens the stream of a campaign by its id; None: of all campaigns."""
    number = after
    if last_event_id:  # it wins, because a client updates it by itself
        number = id_in(last_event_id)
        if number is None:
            raise EventNumberInvalidError(
                f"Last-Event-ID {last_event_id!r} is not the number of an event of this service"
            )
    return lambda id_: EventStream(hub, store, settings, campaign_id=id_, after=number)


StreamDep = Annotated[Callable[[int | None], Response], Depends(open_stream)]


@router.get(
    "/campaigns/{campaign}/events", response_class=Response, response_model=None, responses=_STREAM
)
def stream_campaign_events(campaign: CampaignDep, stream: StreamDep) -> Response:
    """Stream the events of a campaign and its trials.

    A client that lost the stream sends `Last-Event-ID` and gets the missed events first.
    """
    return stream(campaign.id)


@router.get("/events", response_class=Response, response_model=None, responses=_STREAM)
def stream_events(stream: StreamDep) -> Response:
    """Stream the events of all campaigns that the token's owner sees.

    A client that lost the stream sends `Last-Event-ID` and gets the missed events first.
    """
    return stream(None)
