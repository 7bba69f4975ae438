"""Descriptions of requests: what is sent, and how the answer is read. Nothing is sent here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, Generic, Protocol, TypeVar
from urllib.parse import quote

import httpx
from pydantic import TypeAdapter

Answer = TypeVar("Answer")
Document = TypeVar("Document")
"""A class that pydantic validates: a model or a dataclass."""
Item = TypeVar("Item")

PAGE: Final = 200
"""Items of a list that are requested at once."""

IDEMPOTENCY_KEY: Final = "Idempotency-Key"
"""Header by which the service recognizes a request that it has answered before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call(Generic[Answer]):
    """One request, and how its answer is read."""

    method: str
    path: str
    """From the root of the service; names in it are quoted."""
    read: Callable[[httpx.Response], Answer]
    """Raises pydantic's `ValidationError` for an answer of another shape."""
    query: Mapping[str, Any] = field(default_factory=dict)
    """Parameters that are None are left out; for a list the name is repeated."""
    json: Any = None
    """The body; None: `content` is the body, or there is none."""
    content: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    is_repeatable: bool = False
    """Whether the request may be sent again when it is unknown whether the service received it."""


class Page(Protocol):
    """A part of a list."""

    @property
    def next_cursor(self) -> str | None:
        """Where the next page begins; None on the last."""


SomePage = TypeVar("SomePage", bound=Page)


@dataclass(frozen=True, kw_only=True, slots=True)
class PagedCall(Generic[SomePage, Item]):
    """A list that is read page by page."""

    page: Callable[[str | None], Call[SomePage]]
    """The call for the page that begins at a cursor; None: the first page."""
    items: Callable[[SomePage], Sequence[Item]]
    """The items of a page."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stream:
    """A stream of events."""

    path: str
    """Below /v1; names in it are quoted."""
    after: int | None = None
    """The last event that is known; 0: start with the first that is kept; None: start now."""


def get(path: str, answer: type[Document], /, **query: Any) -> Call[Document]:
    """Reads a document."""
    return Call(
        method="GET", path=f"/v1{path}", read=reader_of(answer), query=query, is_repeatable=True
    )


def get_text(path: str, /, **query: Any) -> Call[str]:
    """Reads a text."""
    return Call(
        method="GET", path=f"/v1{path}", read=lambda r: r.text, query=query, is_repeatable=True
    )


def get_bytes(path: str, /, **query: Any) -> Call[bytes]:
    """Reads a file."""
    return Call(
        method="GET", path=f"/v1{path}", read=lambda r: r.content, query=query, is_repeatable=True
    )


def post(path: str, answer: type[Document], json: Any = None) -> Call[Document]:
    """Requests a change; it is not sent again."""
    return Call(method="POST", path=f"/v1{path}", read=reader_of(answer), json=json)


def post_once(path: str, answer: type[Document], json: Any, key: str) -> Call[Document]:
    """Requests a change under an idempotency key, so that it may be sent again."""
    return Call(
        method="POST",
        path=f"/v1{path}",
        read=reader_of(answer),
        json=json,
        headers={IDEMPOTENCY_KEY: key},
        is_repeatable=True,
    )


def put(path: str, answer: type[Document], json: Any) -> Call[Document]:
    """Sets a document; it may be sent again."""
    return Call(
        method="PUT", path=f"/v1{path}", read=reader_of(answer), json=json, is_repeatable=True
    )


def patch(path: str, answer: type[Document], json: Any) -> Call[Document]:
    """Changes some fields of a document; it is not sent again."""
    return Call(method="PATCH", path=f"/v1{path}", read=reader_of(answer), json=json)


def delete(path: str) -> Call[None]:
    """Deletes something; it is not sent again, since the second request would get a 404."""
    return Call(method="DELETE", path=f"/v1{path}", read=lambda _response: None)


def reader_of(answer: type[Document]) -> Callable[[httpx.Response], Document]:
    """Reads an answer as a document of the service."""
    kind: Any = answer  # mypy does not accept every class as hashable
    return lambda response: _validator_of(kind).validate_json(response.content)


@cache
def _validator_of(answer: Any) -> TypeAdapter[Any]:
    """Built once per class: building takes much longer than validating an answer."""
    return TypeAdapter(answer)


def segment(name: str | int) -> str:
    """A name as one segment of a path, with any characters in it quoted."""
    return quote(str(name), safe="")
