"""The application: routes, errors, authentication, documentation, put together."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any, Final

from fastapi import Depends, FastAPI
from fastapi.routing import APIRoute, iter_route_contexts

from api import docs_page, etags, problems
from api.access import refuse_undeclared
from api.auth import BearerGate, bearer_scheme
from api.body_limit import BodyLimit
from api.routes import (
    allocations,
    analyses,
    campaigns,
    exports,
    health,
    imports,
    nodes,
    trials,
    workers,
)
from api.schemas import Problem
from api.settings import Settings
from api.sweeper import Sweeper, sweeping
from api.version import version
from results_db.store import Store

_DESCRIPTION: Final = """\
Tuning campaigns over parallel layouts for training large models: submit a campaign, watch its
trials, read its leaderboard, export its winner.

Every request under `/v1` but `/v1/health` carries the service's token as
`Authorization: Bearer <token>`. Errors are problem documents (RFC 9457).
"""

_PROBLEM: Final[dict[str, Any]] = {
    "description": "What was wrong with the request, and what to do",
    "content": {problems.MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
}


def create_app(settings: Settings, store: Store) -> FastAPI:
    """The service on an open store."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        sweeper = Sweeper(store, lease_s=settings.lease_s, interval_s=settings.sweep_interval_s)
        async with sweeping(sweeper):
            yield

    app = FastAPI(
        title="layout-tuner",
        version=version(),
        description=_DESCRIPTION,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        generate_unique_id_function=_operation_id,
    )
    app.state.store = store
    app.state.settings = settings
    app.include_router(health.router)
    for routes in (
        campaigns,
        imports,
        trials,
        analyses,
        exports,
        allocations,
        nodes,
        workers,
    ):
        app.include_router(
            routes.router,
            dependencies=[Depends(bearer_scheme)],
            responses={HTTPStatus.UNAUTHORIZED: _PROBLEM, "4XX": _PROBLEM, "5XX": _PROBLEM},
        )
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    app.add_middleware(BearerGate, token=settings.token)
    problems.install(app)
    etags.install(app)
    docs_page.install(app)
    _document_problems(app)
    refuse_undeclared(route.name or "" for route in iter_route_contexts(app.routes))
    return app


def _operation_id(route: APIRoute) -> str:
    """Functions' names are unique and read well: they are what generated clients call."""
    return route.name


def _document_problems(app: FastAPI) -> None:
    """Puts the problem document in the OpenAPI description, in place of FastAPI's own errors."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = generate()
            schemas = schema["components"]["schemas"]
            for name in ("HTTPValidationError", "ValidationError"):
                schemas.pop(name, None)
            problem = Problem.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas |= problem.pop("$defs", {})
            schemas["Problem"] = problem
            for path in schema["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)
        assert app.openapi_schema is not None
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
