"""Routes that FastAPI analyses when they are first asked for, not when the service starts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute, compile_path

Handler = Callable[[Request], Coroutine[Any, Any, Response]]
Check = Callable[[Request], Awaitable[None]]


class LazyRoute(APIRoute):
    """A route that FastAPI analyses at its first use; most processes never use most of them.

    Until then it has what a request is matched by, and its checks. They run before FastAPI's
    dependencies: as dependencies they would take a tenth of a worker's request.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        self.options = options
        self.checks: tuple[Check, ...] = ()
        self.path, self.endpoint = path, endpoint
        self.path_regex, self.path_format, self.param_convertors = compile_path(path)
        self.name: str = options["name"] or endpoint.__name__
        self.methods: set[str] = set(options["methods"] or ("GET",))

    def __getattr__(self, name: str) -> Any:
        options = self.__dict__.pop("options", None)
        if options is None:
            raise AttributeError(f"{type(self).__name__} has no {name}")
        super().__init__(self.path, self.endpoint, **options)
        return getattr(self, name)

    def get_route_handler(self) -> Handler:
        handle, checks = super().get_route_handler(), self.checks

        async def check_and_handle(request: Request) -> Response:
            for check in checks:
                await check(request)
            return await handle(request)

        return check_and_handle


class LazyRouter(APIRouter):
    """A router of such routes."""

    def __init__(self, *, route_class: type[APIRoute] = LazyRoute, **options: Any) -> None:
        super().__init__(route_class=route_class, **options)


def with_checks(
    routers: Iterable[APIRouter],
    *checks: Check,
    responses: Mapping[int | str, dict[str, Any]] = MappingProxyType({}),
    openapi_extra: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> list[BaseRoute]:
    """The routes of routers, once: with these checks, and with documentation beside their own.

    `include_router` would analyse each of them again, and try all of a router for each request.
    """
    routes = [route for router in routers for route in router.routes]
    for route in routes:
        assert isinstance(route, LazyRoute), route
        route.checks, own = checks, route.options
        options["responses"] = {**responses, **own["responses"]}
        options["openapi_extra"] = {**openapi_extra, **(own["openapi_extra"] or {})}
        own |= options
    return routes
