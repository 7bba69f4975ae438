"""The application: assembles routes, errors, authentication and documentation."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager, closing
from http import HTTPStatus
from typing import Any, Final

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute

from layout_tuner.api.background_loops import in_background
from layout_tuner.api.dashboard import pages
from layout_tuner.api.dashboard.problem_pages import ProblemPages
from layout_tuner.api.http import docs_page, error_responses
from layout_tuner.api.http.body_limits import BoundedBodies, FairQueue
from layout_tuner.api.http.browser_guard import BrowserGuard
from layout_tuner.api.http.lazy_routes import with_checks
from layout_tuner.api.http.query_parameters import FILTER_NAMES, refuse_unknown_query
from layout_tuner.api.http.rate_limit import GuessLimit, make_limits
from layout_tuner.api.http.request_bodies import BODIES_AT_ONCE
from layout_tuner.api.http.route_map import HeadRequests, RouteMap
from layout_tuner.api.http.url_prefix import UrlPrefix, refuse_taken_prefix
from layout_tuner.api.leases.worker_batches import WorkerBatches
from layout_tuner.api.live.database_changes import DatabaseChanges
from layout_tuner.api.live.event_hub import EventHub
from layout_tuner.api.process.background_jobs import Sweeper, prune, send_messages, sweeping
from layout_tuner.api.process.metrics import MeasuredRequests, Metrics
from layout_tuner.api.routes import (
    access,
    allocations,
    campaigns,
    etags,
    events,
    exports,
    health,
    imports,
    leaderboard,
    models_and_clusters,
    plans,
    reports,
    trainers,
    trials,
    usage,
    workers,
)
from layout_tuner.api.schemas.campaigns_and_trials import Problem
from layout_tuner.api.schemas.openapi_descriptions import describe_fields
from layout_tuner.api.security.access_check import (
    BEARER_SCHEME,
    AccessCheck,
    check_again,
    refuse_unchecked,
)
from layout_tuner.api.security.authentication import Authentication
from layout_tuner.api.security.holders import SessionBook, TokenBook, local_holders, noting_uses
from layout_tuner.api.security.owner_sign_in import OwnerSignIn
from layout_tuner.api.security.roles import OwnersOfThings, refuse_undeclared
from layout_tuner.api.security.session_cookie import SessionCookie
from layout_tuner.api.settings import Settings
from layout_tuner.results_db.store import Store
from layout_tuner.version import version

_DESCRIPTION: Final = """\
Tuning campaigns over parallel layouts for training large models: submit a campaign, watch its
trials, read its leaderboard, export its winner.

Requests under `/v1` need a token, `Authorization: Bearer <token>`, except health and readiness.
The role of a token is viewer (reads), submitter (also submits campaigns, and changes its own), admin
(everything) or worker (leases trials and reports them). Errors are problem documents (RFC 9457).
"""

_PROBLEM: Final[dict[str, Any]] = {
    "description": "The problem with the request, and what to do",
    "content": {error_responses.MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
}

_REFUSALS: Final[dict[int | str, dict[str, Any]]] = {
    HTTPStatus.UNAUTHORIZED: _PROBLEM,
    "4XX": _PROBLEM,
    "5XX": _PROBLEM,
}


def create_app(settings: Settings, store: Store) -> FastAPI:
    local = local_holders(settings.token, settings.worker_token)
    book = TokenBook(store, local)
    sessions = SessionBook(store)

    app = FastAPI(
        title="layout-tuner",
        version=version(),
        description=_DESCRIPTION,
        lifespan=lambda app: _at_work(app, settings, store, book, sessions),
        docs_url=None,
        redoc_url=None,
        generate_unique_id_function=_operation_id,
    )
    app.state.store = store
    app.state.settings = settings
    app.state.batches = WorkerBatches.of(store)
    app.state.changes = DatabaseChanges(
        store.change_mark(),
        stopping=settings.stopping,
        look_s=min(settings.lease_poll_s, settings.event_poll_s),
    )
    app.state.book = book
    app.state.authentication = Authentication(
        book=book,
        sessions=sessions,
        guess_limit=GuessLimit(settings.wrong_codes),
        cookie=SessionCookie(
            is_behind_proxy=settings.is_behind_proxy, url_prefix=settings.url_prefix
        ),
    )
    cookie = app.state.authentication.cookie
    app.state.owner_sign_in = OwnerSignIn(settings.sign_in, store, cookie)
    app.state.owners = OwnersOfThings(store)
    app.state.readers = FairQueue(at_once=BODIES_AT_ONCE)
    app.state.metrics = Metrics(store, lambda: len(app.state.hub.streams))
    app.router.routes.extend(_ROUTES)
    error_responses.install(app)
    etags.install(app)
    docs_page.install(app)
    app.router.routes.extend(_PAGES)
    _document_problems(app)
    _guard(app, settings)
    return app


@asynccontextmanager
async def _at_work(
    app: FastAPI, settings: Settings, store: Store, book: TokenBook, sessions: SessionBook
) -> AsyncIterator[None]:
    """Runs the background jobs of the service while it answers requests."""
    changes: DatabaseChanges = app.state.changes
    sweeper = Sweeper(store, interval_s=settings.sweep_interval_s, changes=changes)
    hub = EventHub(store, changes, settings, app.state.authentication)
    app.state.hub = hub
    with closing(changes):
        async with (
            aclosing(app.state.owner_sign_in),
            sweeping(sweeper),
            noting_uses(book, sessions, store),
            in_background(hub.run()),
            in_background(hub.streams.run()),
            in_background(prune(store, settings.retention)),
            in_background(send_messages(store, settings)),
        ):
            yield


def _operation_id(route: APIRoute) -> str:
    """The name of the function; generated clients name their methods after it."""
    return route.name


def _all_routes() -> Sequence[BaseRoute]:
    """Every route under `/v1`, and those of health and metrics."""
    # The first route that matches answers, and workers send the most requests.
    modules = (
        workers,
        campaigns,
        plans,
        imports,
        reports,
        models_and_clusters,
        trainers,
        trials,
        leaderboard,
        events,
        exports,
        allocations,
        access,
        usage,
    )
    routers = [module.router for module in modules]
    named: dict[str, Any] = {"generate_unique_id_function": _operation_id}
    checked = {**named, "responses": _REFUSALS, "openapi_extra": {"security": [{"bearer": []}]}}
    return (
        *with_checks(routers, check_again, refuse_unknown_query, **checked),
        *with_checks((health.router,), **named),
        *with_checks((health.metrics_router,), check_again, **checked),
    )


_ROUTES: Final = _all_routes()
"""Shared by all applications of a process: FastAPI reads the functions' signatures only once."""

_PAGES: Final = tuple(pages.routes())
"""The dashboard, shared in the same way; they come last, after the page of the API."""


def _guard(app: FastAPI, settings: Settings) -> None:
    """Adds the middleware; all routes must be there. What is added last runs first."""
    app.state.routes = routes = RouteMap.of(app.routes)
    refuse_undeclared(routes.operations)
    refuse_unchecked(app.routes)
    app.add_middleware(BoundedBodies, routes=routes)
    app.add_middleware(
        AccessCheck,
        routes=routes,
        authentication=app.state.authentication,
        owners=app.state.owners,
        limits=make_limits(settings.requests_per_s),
    )
    app.add_middleware(
        BrowserGuard,
        local_hosts_only=settings.local_hosts_only,
        is_behind_proxy=settings.is_behind_proxy,
    )
    app.add_middleware(ProblemPages)
    app.add_middleware(MeasuredRequests, metrics=app.state.metrics, routes=routes)
    app.add_middleware(HeadRequests)
    if settings.url_prefix:
        refuse_taken_prefix(settings.url_prefix, app.routes)
        app.add_middleware(UrlPrefix, prefix=settings.url_prefix)


def _document_problems(app: FastAPI) -> None:
    """Describes problem documents in the OpenAPI document, instead of FastAPI's own errors."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = generate()
            # The document is compared with the one of earlier versions: there the filters are last.
            leaderboard = schema["paths"]["/v1/campaigns/{campaign}/leaderboard"]["get"]
            leaderboard["parameters"].sort(key=lambda each: each["name"] in FILTER_NAMES)
            schema["components"]["securitySchemes"] = {"bearer": BEARER_SCHEME}
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
