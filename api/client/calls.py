"""What the calls of the client share: a request, and its answer as a document.

When a request is sent again, and after which pause, is in
`search_spaces/connection/http_connection.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Final, Protocol, TypeVar
from urllib.parse import quote

import httpx
from pydantic import TypeAdapter, ValidationError

from api.errors import ServiceError
from api.schemas.campaigns_and_trials import Problem
from search_spaces.connection.http_connection import ServiceConnection
from search_spaces.errors import ServiceUnansweredError

PAGE: Final = 200
"""Items of a list that are requested at once."""

IDEMPOTENCY_KEY: Final = "Idempotency-Key"
"""Header by which the service recognizes a request that it has answered before."""

Document = TypeVar("Document")
"""A class that pydantic validates: a model or a dataclass."""
Item = TypeVar("Item")


class Page(Protocol):
    """A part of a list."""

    @property
    def next_cursor(self) -> str | None:
        """Where the next page begins; None on the last."""


SomePage = TypeVar("SomePage", bound=Page)


class Calls:
    """The base of the client's methods; all raise `ServiceError`.

    Parameters of a query that are None are left out; for a list the name is repeated.
    """

    _connection: ServiceConnection

    def _send(
        self, method: str, path: str, *, query: Mapping[str, Any] | None = None, **request: Any
    ) -> httpx.Response:
        """The answer to a request that the service accepted.

        The path is from the root of the service; `request` is for `ServiceConnection.request`.
        """
        params = {name: value for name, value in (query or {}).items() if value is not None}
        try:
            answer = self._connection.request(method, path, params=params, **request)
        except ServiceUnansweredError as error:
            raise unanswered(error) from error
        if not answer.is_success:
            raise refusal(answer)
        return answer

    def _read(self, answer: httpx.Response, kind: type[Document]) -> Document:
        """An answer as a document of the service."""
        hashable: Any = kind  # mypy does not accept every class as hashable
        validator: TypeAdapter[Document] = _validator_of(hashable)
        try:
            return validator.validate_json(answer.content)
        except ValidationError as error:
            raise ServiceError(
                f"{self._connection.url} answered what this version does not understand "
                f"({error.error_count()} fields); are client and service of the same version?"
            ) from error

    def _get(self, path: str, kind: type[Document], /, **query: Any) -> Document:
        return self._read(self._get_file(path, **query), kind)

    def _get_file(self, path: str, /, **query: Any) -> httpx.Response:
        return self._send("GET", f"/v1{path}", query=query, is_repeatable=True)

    def _post(
        self, path: str, kind: type[Document], json: Any = None, *, key: str | None = None
    ) -> Document:
        """Requests a change; it is sent again only with an idempotency key."""
        headers = {} if key is None else {IDEMPOTENCY_KEY: key}
        again = key is not None
        answer = self._send("POST", f"/v1{path}", json=json, headers=headers, is_repeatable=again)
        return self._read(answer, kind)

    def _put(self, path: str, kind: type[Document], json: Any) -> Document:
        return self._read(self._send("PUT", f"/v1{path}", json=json, is_repeatable=True), kind)

    def _patch(self, path: str, kind: type[Document], json: Any) -> Document:
        """Changes some fields of a document; it is not sent again."""
        return self._read(self._send("PATCH", f"/v1{path}", json=json), kind)

    def _delete(self, path: str) -> None:
        """Deletes something; it is not sent again, since the second request would get a 404."""
        self._send("DELETE", f"/v1{path}")

    def _walk(
        self,
        page_at: Callable[[str | None], SomePage],
        items_of: Callable[[SomePage], Sequence[Item]],
    ) -> Iterator[Item]:
        """All items of a list; the next page is requested when its first item is."""
        cursor: str | None = None
        while True:
            page = page_at(cursor)
            yield from items_of(page)
            cursor = page.next_cursor
            if cursor is None:
                return


def unanswered(error: ServiceUnansweredError) -> ServiceError:
    """The error of a request without an answer."""
    hint = "; is it running? `layout-tuner up` starts one" if error.may_be_down else ""
    return ServiceError(f"{error}{hint}")


def refusal(answer: httpx.Response) -> ServiceError:
    """Why the service refused, in the words of its problem document where it sent one."""
    try:
        problem = Problem.model_validate_json(answer.content)
    except ValidationError:
        words = f"the service answered {answer.status_code} {answer.reason_phrase}"
        return ServiceError(words.rstrip(), status=answer.status_code)
    return ServiceError(problem.detail, status=answer.status_code, problem=problem)


@cache
def _validator_of(answer: Any) -> TypeAdapter[Any]:
    """Built once per class: building takes much longer than validating an answer."""
    return TypeAdapter(answer)


def segment(name: str | int) -> str:
    """A name as one segment of a path, with any characters in it quoted."""
    return quote(str(name), safe="")
