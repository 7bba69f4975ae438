"""Descriptions of calls: what a request says and how its answer is read, however it is sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Protocol, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel

Answer = TypeVar("Answer")
Model = TypeVar("Model", bound=BaseModel)
Item = TypeVar("Item")

PAGE: Final = 200
"""Items of a list that are asked for at once."""

IDEMPOTENCY_KEY: Final = "Idempotency-Key"
"""Header by which the service knows a request that it has answered before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call(Generic[Answer]):
    """One request, and how its answer is read."""

    method: str
    path: str
    """From the root of the service, names in it quoted."""
    read: Callable[[httpx.Response], Answer]
    """Raises pydantic's `ValidationError` where the answer is not what was expected."""
    query: Mapping[str, Any] = field(default_factory=dict)
    """What is None is left out; of a list the name is repeated."""
    json: Any = None
    """The body; None: there is none, or `content` is it."""
    content: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    is_repeatable: bool = False
    """Whether asking twice is the same as asking once, so that it may be sent again when nobody knows
    whether it was heard."""


class Page(Protocol):
    """A part of a list."""

    @property
    def next_cursor(self) -> str | None:
        """Where the next page begins; None on the last."""


SomePage = TypeVar("SomePage", bound=Page)


@dataclass(frozen=True, kw_only=True, slots=True)
class Listing(Generic[SomePage, Item]):
    """A list that comes in pages."""

    page: Callable[[str | None], Call[SomePage]]
    """The call for the page that begins at a cursor; None: the first."""
    items: Callable[[SomePage], Sequence[Item]]
    """What is on a page."""


def get(path: str, answer: type[Model], /, **query: Any) -> Call[Model]:
    """Reads a document."""
    return Call(
        method="GET", path=f"/v1{path}", read=reader_of(answer), query=query, is_repeatable=True
    )


def get_text(path: str, /, **query: Any) -> Call[str]:
    """Reads a text."""
    return Call(method="GET", path=f"/v1{path}", read=_text, query=query, is_repeatable=True)


def get_metrics() -> Call[str]:
    """Reads what Prometheus does; it looks for that beside the API, not below it."""
    return Call(method="GET", path="/metrics", read=_text, is_repeatable=True)


def get_bytes(path: str, /, **query: Any) -> Call[bytes]:
    """Reads a file."""
    return Call(method="GET", path=f"/v1{path}", read=_bytes, query=query, is_repeatable=True)


def post(path: str, answer: type[Model], json: Any = None, **query: Any) -> Call[Model]:
    """Asks for a change; not to be sent twice."""
    return Call(method="POST", path=f"/v1{path}", read=reader_of(answer), json=json, query=query)


def put(path: str, answer: type[Model], json: Any) -> Call[Model]:
    """Sets a document; twice is once."""
    return Call(
        method="PUT", path=f"/v1{path}", read=reader_of(answer), json=json, is_repeatable=True
    )


def patch(path: str, answer: type[Model], json: Any) -> Call[Model]:
    """Changes some fields of a document; not to be sent twice."""
    return Call(method="PATCH", path=f"/v1{path}", read=reader_of(answer), json=json)


def delete(path: str) -> Call[None]:
    """Deletes something; not to be sent twice, since the second time it is not there."""
    return Call(method="DELETE", path=f"/v1{path}", read=_nothing)


def reader_of(answer: type[Model]) -> Callable[[httpx.Response], Model]:
    """Reads an answer as a document of the service."""
    return lambda response: answer.model_validate_json(response.content)


def segment(name: str | int) -> str:
    """A name as one part of a path, whatever is in it."""
    return quote(str(name), safe="")


def _text(response: httpx.Response) -> str:
    return response.text


def _bytes(response: httpx.Response) -> bytes:
    return response.content


def _nothing(_response: httpx.Response) -> None:
    return None
