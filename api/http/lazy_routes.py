"""Routes that FastAPI analyses when they are first asked for, not when the service starts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from fastapi import APIRouter
from fastapi.params import Depends
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute, compile_path


class LazyRoute(APIRoute):
    """A route that FastAPI analyses at its first use; most processes never use most of them.

    Until then it has what a request is matched and checked by: path, name, methods, dependencies.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        self.options = options
        self.path, self.endpoint = path, endpoint
        self.path_regex, self.path_format, self.param_convertors = compile_path(path)
        self.name: str = options["name"] or endpoint.__name__
        self.methods: set[str] = set(options["methods"] or ("GET",))
        self.dependencies: list[Depends] = options["dependencies"]

    def __getattr__(self, name: str) -> Any:
        options = self.__dict__.pop("options", None)
        if options is None:
            raise AttributeError(f"{type(self).__name__} has no {name}")
        super().__init__(self.path, self.endpoint, **options)
        return getattr(self, name)


class LazyRouter(APIRouter):
    """A router of such routes."""

    def __init__(self, *, route_class: type[APIRoute] = LazyRoute, **options: Any) -> None:
        super().__init__(route_class=route_class, **options)


def with_checks(
    routers: Iterable[APIRouter],
    checks: Sequence[Depends],
    *,
    responses: Mapping[int | str, dict[str, Any]] = MappingProxyType({}),
    **options: Any,
) -> list[BaseRoute]:
    """The routes of routers, once: with these checks and responses before their own, and options.

    `include_router` would analyse each of them again, and try all of a router for each request.
    """
    routes = [route for router in routers for route in router.routes]
    for route in routes:
        assert isinstance(route, LazyRoute), route
        route.dependencies[:0] = checks
        own = route.options["responses"]
        route.options |= {**options, "responses": {**responses, **own}}
    return routes
