"""Health: whether the service's parts are there. Needs no token."""

from __future__ import annotations

from datetime import UTC, datetime
from http import HTTPStatus

from fastapi import APIRouter, Response

from api.dependencies import StoreDep
from api.progress import driver_is_alive
from api.schemas import Health
from api.version import version
from results_db.errors import DatabaseUnavailableError

router = APIRouter(prefix="/v1", tags=["health"])


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
        driver_alive=driver_is_alive(driver_seen_at, datetime.now(UTC)),
        workers=workers,
    )
