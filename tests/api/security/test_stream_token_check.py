"""Answers that last, with an application and a client of the test's own."""

import asyncio
from typing import Any

from starlette.types import Receive, Scope, Send

from api.security.stream_token_check import answer_while_valid
from results_db.errors import DatabaseUnavailableError


async def streaming(_scope: Scope, receive: Receive, send: Send) -> None:
    """Answers until its client hangs up."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"x", "more_body": True})
    while (await receive())["type"] != "http.disconnect":
        pass


async def never() -> Any:
    await asyncio.Event().wait()


def answered(app: Any, receive: Receive, verdicts: list[Any]) -> list[Any]:
    """What is sent while the token is judged so, one look after the other."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def still_valid() -> bool:
        verdict = verdicts.pop(0)
        if isinstance(verdict, Exception):
            raise verdict
        return bool(verdict)

    asyncio.run(
        asyncio.wait_for(
            answer_while_valid(app, {}, receive, send, still_valid, check_interval_s=0.001), 20
        )
    )
    return sent


def test_a_stream_goes_on_until_its_token_is_not_valid_and_then_ends_in_order() -> None:
    verdicts = [True, DatabaseUnavailableError("away"), True, False]
    sent = answered(streaming, never, verdicts)
    assert verdicts == []
    assert sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}
    assert len(sent) == 3


def test_an_answer_that_ends_by_itself_is_not_ended_twice() -> None:
    async def brief(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"all"})

    assert len(answered(brief, never, [])) == 2


def test_a_client_that_hangs_up_is_heard() -> None:
    async def hung_up() -> Any:
        return {"type": "http.disconnect"}

    answered(streaming, hung_up, [])
