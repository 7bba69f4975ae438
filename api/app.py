"""The application: routes, errors, authentication, documentation, put together."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any, Final

from fastapi import Depends, FastAPI
from fastapi.routing import APIRoute

from api import docs_page, etags, problems
from api.access import refuse_undeclared
from api.body_limit import BodyLimit
from api.browser_guard import BrowserGuard
from api.described import describe_fields
from api.event_hub import EventHub, handing_out
from api.gate import Gate, bearer_scheme, judged, make_limits
from api.guesses import Guesses
from api.known_query import refuse_unknown_query
from api.metrics import MeasuredRequests, Metrics
from api.owners import Owners
from api.pruner import pruning
from api.route_map import RouteMap
from api.routes import (
    access,
    allocations,
    analyses,
    campaigns,
    catalogue,
    events,
    exports,
    health,
    imports,
    leaderboard,
    nodes,
    reports,
    trials,
    workers,
)
from api.schemas import Problem
from api.settings import Settings
from api.stated_filter import describe_filters
from api.sweeper import Sweeper, sweeping
from api.token_book import TokenBook, local_holders
from api.token_use import noting_uses
from api.version import version
from api.worker_batches import WorkerBatches
from results_db.store import Store

_DESCRIPTION: Final = """\
Tuning campaigns over parallel layouts for training large models: submit a campaign, watch its
trials, read its leaderboard, export its winner.

Requests under `/v1` carry a token as `Authorization: Bearer <token>`; health and readiness take none.
A token has a role: viewer (reads), submitter (also submits campaigns, and changes its own), admin
(everything) or worker (leases trials and reports them). Errors are problem documents (RFC 9457).
"""

_PROBLEM: Final[dict[str, Any]] = {
    "description": "What was wrong with the request, and what to do",
    "content": {problems.MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
}

_REFUSALS: Final[dict[int | str, dict[str, Any]]] = {
    HTTPStatus.UNAUTHORIZED: _PROBLEM,
    "4XX": _PROBLEM,
    "5XX": _PROBLEM,
}


def create_app(settings: Settings, store: Store) -> FastAPI:
    """The service on an open store."""
    local = local_holders(settings.token, settings.worker_token)
    book = TokenBook(store, local, clock=lambda: store.now())

    app = FastAPI(
        title="layout-tuner",
        version=version(),
        description=_DESCRIPTION,
        lifespan=lambda app: _at_work(app, settings, store, book),
        docs_url=None,
        redoc_url=None,
        generate_unique_id_function=_operation_id,
    )
    app.state.store = store
    app.state.settings = settings
    app.state.batches = WorkerBatches.of(store, settings)
    app.state.book = book
    app.state.metrics = Metrics(store, lambda: app.state.hub.num_watchers)
    _include_routes(app)
    problems.install(app)
    etags.install(app)
    docs_page.install(app)
    _document_problems(app)
    _guard(app, settings, store)
    return app


@asynccontextmanager
async def _at_work(
    app: FastAPI, settings: Settings, store: Store, book: TokenBook
) -> AsyncIterator[None]:
    """What goes on beside the requests, from before the first to after the last."""
    sweeper = Sweeper(store, lease_s=settings.lease_s, interval_s=settings.sweep_interval_s)
    hub = EventHub(
        store,
        stopping=settings.stopping,
        interval_s=settings.event_poll_s,
        idle_interval_s=settings.event_idle_poll_s,
        max_watchers=settings.max_watchers,
        max_waiting=settings.max_waiting_events,
    )
    app.state.hub = hub
    async with (
        sweeping(sweeper),
        noting_uses(book, store),
        handing_out(hub),
        pruning(store, settings.retention),
    ):
        yield


def _include_routes(app: FastAPI) -> None:
    # Workers ask most often, and routes are looked through in this order.
    for routes in (
        workers,
        campaigns,
        imports,
        reports,
        catalogue,
        trials,
        leaderboard,
        analyses,
        events,
        exports,
        allocations,
        nodes,
        access,
    ):
        app.include_router(
            routes.router,
            dependencies=[Depends(bearer_scheme), Depends(judged), Depends(refuse_unknown_query)],
            responses=_REFUSALS,
        )
    app.include_router(health.router)
    app.include_router(
        health.metrics_router,
        dependencies=[Depends(bearer_scheme), Depends(judged)],
        responses=_REFUSALS,
    )


def _guard(app: FastAPI, settings: Settings, store: Store) -> None:
    """Puts the gate before all routes, which are there by now; what is added last comes first."""
    app.state.routes = routes = RouteMap.of(app.routes)
    refuse_undeclared(routes.operations)
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    app.add_middleware(
        Gate,
        routes=routes,
        book=app.state.book,
        owners=Owners(store),
        guesses=Guesses(settings.wrong_tokens),
        limits=make_limits(settings.requests_per_s),
    )
    app.add_middleware(
        BrowserGuard,
        local_hosts_only=settings.local_hosts_only,
        is_behind_proxy=settings.is_behind_proxy,
    )
    app.add_middleware(MeasuredRequests, metrics=app.state.metrics, routes=routes)


def _operation_id(route: APIRoute) -> str:
    """Functions' names are unique and read well: they are what generated clients call."""
    return route.name


def _document_problems(app: FastAPI) -> None:
    """Puts the problem document in the OpenAPI description, in place of FastAPI's own errors."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = generate()
            describe_filters(
                schema,
                "/v1/campaigns/{campaign}/leaderboard",
                like="/v1/campaigns/{campaign}/trials",
            )
            schemas = schema["components"]["schemas"]
            for name in ("HTTPValidationError", "ValidationError"):
                schemas.pop(name, None)
            problem = Problem.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas |= problem.pop("$defs", {})
            schemas["Problem"] = problem
            describe_fields(schemas)
            for path in schema["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)
        assert app.openapi_schema is not None
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
