"""Health, readiness and metrics of the service."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from http import HTTPStatus
from typing import Final

from fastapi import Response
from starlette.responses import PlainTextResponse

from layout_tuner.api.campaigns.progress_and_waiting import driver_is_alive
from layout_tuner.api.dependencies import MetricsDep, SettingsDep, StoreDep
from layout_tuner.api.http.lazy_routes import LazyRouter
from layout_tuner.api.process.metrics import CONTENT_TYPE
from layout_tuner.api.schemas.campaigns_and_trials import Health, Readiness
from layout_tuner.api.settings import Settings
from layout_tuner.results_db.errors import DatabaseUnavailableError
from layout_tuner.results_db.store import Store
from layout_tuner.version import version

LEAST_FREE_BYTES: Final = 64 << 20
"""With less free space on the data directory's disk, the next outcome may not be stored."""

router = LazyRouter(prefix="/v1", tags=["health"])
metrics_router = LazyRouter(tags=["health"])


@router.get("/health", responses={503: {"model": Health}})
def read_health(store: StoreDep, response: Response) -> Health:
    """Say whether the database answers, and whether a driver and workers are running."""
    try:
        driver_seen_at, workers = store.driver.lease().seen_at, len(store.workers.find())
        database = True
    except DatabaseUnavailableError:
        response.status_code = HTTPStatus.SERVICE_UNAVAILABLE
        driver_seen_at, workers, database = None, 0, False
    return Health(
        status="ok" if database else "degraded",
        version=version(),
        database=database,
        driver_seen_at=driver_seen_at,
        driver_alive=driver_is_alive(driver_seen_at, store.now()),
        workers=workers,
    )


@router.get("/ready", responses={503: {"model": Readiness}})
def read_readiness(store: StoreDep, settings: SettingsDep, response: Response) -> Readiness:
    """Say whether the process can take requests; a proxy asks this first.

    503, with the reasons, while the process ends, if the database does not answer, is read-only or
    has the schema of another version, and if the data directory's disk is nearly full.
    """
    reasons = list(_why_not_ready(store, settings))
    if reasons:
        response.status_code = HTTPStatus.SERVICE_UNAVAILABLE
    return Readiness(is_ready=not reasons, reasons=reasons)


@metrics_router.get("/metrics", response_class=PlainTextResponse)
def read_metrics(metrics: MetricsDep, store: StoreDep) -> Response:
    """Read metrics in the format of Prometheus: of this process's requests and of the service.

    Campaigns, trials and node-seconds are those that the token's owner sees.
    """
    return Response(metrics.text(store), headers={"Content-Type": CONTENT_TYPE})


def _why_not_ready(store: Store, settings: Settings) -> Iterator[str]:
    if settings.stopping.is_set():
        yield "the process ends"
    try:
        for reason in store.statistics.why_not_usable():
            yield f"the database cannot be worked on: {reason}"
    except DatabaseUnavailableError:
        # The message may name hosts and paths, and /ready needs no token; the log has it.
        yield "the database does not answer"
    if settings.data_dir is not None:
        try:
            free = shutil.disk_usage(settings.data_dir).free
        except OSError as error:
            yield f"the data directory cannot be used: {error.strerror}"
        else:
            if free < LEAST_FREE_BYTES:
                yield f"the data directory's disk is nearly full: {free >> 20} MiB are free"
