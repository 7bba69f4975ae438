"""Limits on the bodies of requests by route, and turns of the requests that have one."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Hashable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from http import HTTPStatus
from typing import Final, NamedTuple

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from layout_tuner.api.http.error_responses import problem_response, too_many
from layout_tuner.api.http.route_map import RouteMap
from layout_tuner.results_db.actor import Actor
from layout_tuner.units import memory

CHANGES_AT_ONCE: Final = 2
"""Changes and plans that are handled at the same time, each of another token."""

MAX_WAITING: Final = 64
"""Changes and plans of a token that wait for their turn, or send their body."""


class BodyLimits(NamedTuple):
    """The largest size of a body of a route."""

    num_bytes: int
    num_values: int = 1000
    """Texts, numbers, lists and mappings of a JSON document, keys aside."""


_SMALL: Final = BodyLimits(16 << 10)
_DOCUMENT: Final = BodyLimits(256 << 10)  # `documents.json_and_yaml` counts its values
_FORM: Final = BodyLimits(1 << 20)  # a document, whose encoding may triple it, and other fields
_JOB_FILES: Final = BodyLimits(5 << 20)
_NOTES: Final = BodyLimits(128 << 10)  # 10,000 characters, each written as two escapes

BODY_LIMITS: Final[Mapping[str, BodyLimits]] = {
    "sign_in": BodyLimits(8 << 10),
    "create_campaign": _DOCUMENT,
    "clone_campaign": _DOCUMENT,
    "plan_campaign": _DOCUMENT,
    "put_model": _DOCUMENT,
    "put_group": BodyLimits(2 << 20, 25_000),  # members are at most 10,000
    "put_cluster": _DOCUMENT,
    "do_submit": _FORM,
    "do_check": _FORM,
    # A job's file and a config.json of 1 MiB each, whose texts a form may escape.
    "do_read_job": _JOB_FILES,
    "update_campaign": _NOTES,
    "do_change_campaign": _NOTES,
    "import_campaigns": BodyLimits(4 << 20),  # 5,000 rows
    "register_worker": BodyLimits(4 << 20, 50_000),  # 10,000 nodes
    "post_heartbeat": BodyLimits(4 << 20, 400_000),  # the status of 10,000 nodes
    # A log of 262,144 characters, each written as two escapes, and 20,100 iterations.
    "post_outcome": BodyLimits(6 << 20, 200_000),
}
"""By operation id; `_SMALL` for all other routes."""

_WITHOUT_TURN: Final = ("lease_trials", "post_heartbeat", "post_outcome")
"""They wait for batches and trials, not for a thread, and leases depend on them."""


def limits_of(operation: str) -> BodyLimits:
    return BODY_LIMITS.get(operation, _SMALL)


def holder_of(scope: Scope) -> Hashable:
    """The token of a request, for turns; None: its route needs none."""
    actor: Actor | None = scope.get("state", {}).get("actor")
    return None if actor is None else (actor.token_id or actor.name)


class BoundedBodies:
    """Middleware that reads the bodies of changes before it lets their tokens take turns.

    413: the body is larger than its route needs. 429: too many requests of the token wait. A slow
    client does not use up a turn: its body is read before, and the answer is sent after it.
    """

    def __init__(self, app: ASGIApp, *, routes: RouteMap) -> None:
        self._app, self._routes = app, routes
        self._turns = FairQueue(at_once=CHANGES_AT_ONCE)
        self._num_waiting: Counter[Hashable] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        asked, holder = self._routes.asked(scope), holder_of(scope)
        operation = asked.operation if asked else ""
        has_turn = holder is not None and operation not in _WITHOUT_TURN
        if has_turn and self._num_waiting[holder] >= MAX_WAITING:
            refusal = too_many(f"{MAX_WAITING} requests of the token wait already", 1)
            await refusal(scope, receive, send)
            return
        self._num_waiting[holder] += has_turn
        async with AsyncExitStack() as stack:
            stack.callback(self._num_waiting.subtract, {holder: int(has_turn)})
            body = await _read(scope, receive, send, limits_of(operation))
            if body is None:
                return
            if has_turn:
                await stack.enter_async_context(self._turns.turn(holder))

            async def send_after_turn(message: Message) -> None:
                await stack.aclose()
                await send(message)

            await self._app(scope, body, send_after_turn)


async def _read(scope: Scope, receive: Receive, send: Send, limits: BodyLimits) -> Receive | None:
    """Reads a body, and returns a function that gives its messages again; None: it was refused."""
    messages: deque[Message] = deque()
    lengths = [value for name, value in scope["headers"] if name == b"content-length"]
    # Python refuses to convert thousands of digits.
    declared = int(lengths[0][:20]) if lengths and lengths[0].isdigit() else 0
    received = 0
    while declared <= limits.num_bytes and (not messages or messages[-1].get("more_body", False)):
        messages.append(await receive())
        declared = max(declared, received := received + len(messages[-1].get("body", b"")))
    if declared > limits.num_bytes:
        refusal = problem_response(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"the request body is larger than {memory(limits.num_bytes)}, the most that is accepted here",
            kind="document-too-large" if limits is _DOCUMENT else None,
            headers={"Connection": "close"},
        )
        await refusal(scope, receive, send)
        return None

    async def receive_again() -> Message:
        return messages.popleft() if messages else await receive()

    return receive_again


class FairQueue:
    """Starts waiting work in turn by token, and runs one piece of work of each token at a time.

    Not thread-safe: the event loop uses it.
    """

    def __init__(self, *, at_once: int) -> None:
        """At most `at_once` pieces of work run at the same time, each of another token."""
        self._at_once = at_once
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}
        """In the order of turns, without the tokens that have one now."""
        self._working: dict[Hashable, deque[asyncio.Future[None]]] = {}
        """What else waits of each token that has a turn."""

    @asynccontextmanager
    async def turn(self, token: Hashable) -> AsyncIterator[None]:
        """Waits for a turn of the token, which lasts as long as the block."""
        begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self._working.get(token)
        (self._waiting.setdefault(token, deque()) if waiting is None else waiting).append(begun)
        self._start_waiting()
        try:
            await begun
            yield
        finally:
            if not begun.cancelled():
                # The token's next turn comes after one of each token that waits already.
                if left := self._working.pop(token):
                    self._waiting[token] = left
                self._start_waiting()

    def _start_waiting(self) -> None:
        while self._waiting and len(self._working) < self._at_once:
            token = next(iter(self._waiting))
            waiting = self._waiting.pop(token)
            while waiting:
                begun = waiting.popleft()
                if not begun.cancelled():
                    self._working[token] = waiting
                    begun.set_result(None)
                    break
