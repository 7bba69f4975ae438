"""Queries name what a route knows, and nothing else: a misspelt filter must not show every trial."""

from __future__ import annotations

from collections.abc import Iterator

from fastapi import Request
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from api.errors import QueryUnknownError
from api.stated_filter import FILTER_NAMES, stated_filter
from search_spaces.reading import nearest, shown


async def refuse_unknown_query(request: Request) -> None:
    """Refuses parameters that the route does not have.

    A coroutine, so that FastAPI calls it in place and not in a thread.

    Raises:
        QueryUnknownError: there is one; the message names those that the route has.
    """
    route = request.scope.get("route")
    if not request.query_params or not isinstance(route, APIRoute):
        return
    known = sorted(set(_names(route.dependant)))
    for name in request.query_params:
        if name not in known:
            hint = nearest(name, known) if known else "; there is none here"
            raise QueryUnknownError(f"the query parameter {shown(name)} is unknown{hint}")


def _names(dependant: Dependant) -> Iterator[str]:
    yield from (field.alias for field in dependant.query_params)
    if dependant.call is stated_filter:
        yield from FILTER_NAMES
    for below in dependant.dependencies:
        yield from _names(below)
