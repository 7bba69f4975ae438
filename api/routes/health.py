"""Health, readiness and metrics: whether the service is there, can work, and how it stands."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from http import HTTPStatus
from typing import Annotated, Final, cast

from fastapi import APIRouter, Depends, Request, Response
from starlette.responses import PlainTextResponse

from api.dependencies import SettingsDep, StoreDep
from api.metrics import CONTENT_TYPE, Metrics
from api.progress import driver_is_alive
from api.schemas import Health, Readiness
from api.settings import Settings
from api.version import version
from results_db.errors import DatabaseUnavailableError
from results_db.store import Store

LEAST_FREE_BYTES: Final = 64 << 20
"""With less on the data directory's disk, the next outcome may not be kept."""

router = APIRouter(prefix="/v1", tags=["health"])
metrics_router = APIRouter(tags=["health"])


@router.get("/health", responses={503: {"model": Health}})
def read_health(store: StoreDep, response: Response) -> Health:
    """Say whether the database answers, and whether a driver and workers are there."""
    try:
        driver_seen_at = store.driver_seen_at()
        workers = len(store.workers())
    except DatabaseUnavailableError:
        response.status_code = HTTPStatus.SERVICE_UNAVAILABLE
        return Health(
            status="degraded",
            version=version(),
            database=False,
            driver_seen_at=None,
            driver_alive=False,
            workers=0,
        )
    return Health(
        status="ok",
        version=version(),
        database=True,
        driver_seen_at=driver_seen_at,
        driver_alive=driver_is_alive(driver_seen_at, store.now()),
        workers=workers,
    )


@router.get("/ready", responses={503: {"model": Readiness}})
def read_readiness(store: StoreDep, settings: SettingsDep, response: Response) -> Readiness:
    """Say whether requests may be sent here: a proxy asks this before it does.

    503, with the reasons, while the process ends, where the database does not answer, is read only or has
    another version's schema, and where the data directory's disk is nearly full.
    """
    reasons = list(_why_not_ready(store, settings))
    if reasons:
        response.status_code = HTTPStatus.SERVICE_UNAVAILABLE
    return Readiness(is_ready=not reasons, reasons=reasons)


def get_metrics(request: Request) -> Metrics:
    """The application's metrics."""
    return cast("Metrics", request.app.state.metrics)


@metrics_router.get("/metrics", response_class=PlainTextResponse)
def read_metrics(metrics: Annotated[Metrics, Depends(get_metrics)]) -> Response:
    """Metrics as Prometheus reads them: of this process's requests, and of the whole service."""
    return Response(metrics.text(), headers={"Content-Type": CONTENT_TYPE})


def _why_not_ready(store: Store, settings: Settings) -> Iterator[str]:
    if settings.stopping.is_set():
        yield "the process ends"
    try:
        for reason in store.why_not_usable():
            yield f"the database cannot be worked on: {reason}"
    except DatabaseUnavailableError:
        # Its words may name hosts and paths, which whoever asks here need not know; the log has them.
        yield "the database does not answer"
    if settings.data_dir is not None:
        try:
            free = shutil.disk_usage(settings.data_dir).free
        except OSError as error:
            yield f"the data directory cannot be used: {error.strerror}"
        else:
            if free < LEAST_FREE_BYTES:
                yield f"the data directory's disk is nearly full: {free >> 20} MiB are free"
