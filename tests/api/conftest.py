from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import closing

import pytest

with warnings.catch_warnings():
    # Starlette's test client asks for the successor of httpx, which nothing else here needs yet.
    warnings.filterwarnings("ignore", message="Using `httpx` with `starlette.testclient`")
    from fastapi.testclient import TestClient

from api.app import create_app
from api.settings import Settings
from tests.api.local_api import HEADERS, TOKEN, Api
from tests.results_db.factories import TimelyStore


@pytest.fixture
def settings() -> Settings:
    return Settings(token=TOKEN, lease_poll_s=0.02)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def served_url(request: pytest.FixtureRequest) -> str:
    """URL of the service's database: SQLite, and PostgreSQL in the slow suite."""
    kind = "sqlite" if request.param == "sqlite" else "postgres"
    return str(request.getfixturevalue(f"{kind}_url"))


@pytest.fixture
def http(settings: Settings, served_url: str) -> Iterator[TestClient]:
    """Speaks to a service in this process, with its token."""
    with (
        closing(TimelyStore(served_url)) as store,
        TestClient(
            create_app(settings, store), headers=HEADERS, raise_server_exceptions=False
        ) as client,
    ):
        yield client


@pytest.fixture
def api(http: TestClient) -> Api:
    return Api(http)
