"""The client has the routes of the OpenAPI document, with all of their parameters."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import pytest

from api.client import Client
from api.errors import ServiceError
from api.openapi_document import openapi_text
from search_spaces.connection.http_connection import NO_RETRIES
from tests.api.client.samples import arguments, described

UNASKED = {"if-none-match"}
"""Headers of programs that show the same page again and again."""
OF_WORKERS = {
    *("register_worker", "drain_worker", "lease_trials", "post_heartbeat", "post_outcome")
}
"""Operations of the worker protocol: `LeaseClient` of the workers has their methods."""
METHODS = {"get", "put", "post", "patch", "delete"}


class Operation(NamedTuple):
    """One route as the OpenAPI document describes it."""

    id: str
    method: str
    path: str
    queries: set[str]
    headers: set[str]
    has_body: bool

    def serves(self, request: httpx.Request) -> bool:
        pattern = re.sub(r"\{[^}]+\}", "[^/]+", self.path)
        return request.method == self.method and bool(re.fullmatch(pattern, request.url.path))


def operations_of(document: dict[str, Any]) -> Iterator[Operation]:
    for path, item in document["paths"].items():
        for method in item.keys() & METHODS:
            operation = item[method]
            named = [(each["in"], each["name"].lower()) for each in operation.get("parameters", [])]
            yield Operation(
                id=operation["operationId"],
                method=method.upper(),
                path=path,
                queries={name for kind, name in named if kind == "query"},
                headers={name for kind, name in named if kind == "header"} - UNASKED,
                has_body=operation.get("requestBody", {}).get("required", False),
            )


def asked_by_client(name: str) -> httpx.Request:
    """What a method of the client asks."""
    asked: list[httpx.Request] = []
    transport = httpx.MockTransport(lambda request: asked.append(request) or httpx.Response(418))

    def ask() -> None:
        with Client("http://x", "t", retries=NO_RETRIES, transport=transport) as client:
            answer = getattr(client, name)(**arguments(name))
            next(answer)  # of a list; anything else has been refused already

    with pytest.raises(ServiceError, match="418"):
        ask()
    (request,) = asked
    return request


def served(request: httpx.Request, operations: list[Operation]) -> Operation:
    """The operation that answers a request; of several the one whose path has fewest gaps."""
    serving = [operation for operation in operations if operation.serves(request)]
    assert serving, f"no route serves {request.method} {request.url.path}"
    return min(serving, key=lambda operation: operation.path.count("{"))


def test_every_route_for_others_than_workers_has_a_client_method_with_all_of_its_parameters() -> (
    None
):
    operations = list(operations_of(json.loads(openapi_text())))
    queries: defaultdict[str, set[str]] = defaultdict(set)
    headers: defaultdict[str, set[str]] = defaultdict(set)
    bodies: defaultdict[str, bool] = defaultdict(bool)
    for name in described():
        request = asked_by_client(name)
        operation = served(request, operations)
        queries[operation.id] |= set(request.url.params)
        headers[operation.id] |= set(request.headers)
        bodies[operation.id] |= bool(request.content)
    assert {each.id for each in operations} - set(queries) == OF_WORKERS, "routes without a method"
    for each in operations:
        if each.id in OF_WORKERS:
            continue
        assert queries[each.id] == each.queries, f"the query of {each.id}"
        assert headers[each.id] >= each.headers, f"the headers of {each.id}"
        assert bodies[each.id] or not each.has_body, f"the body of {each.id}"
