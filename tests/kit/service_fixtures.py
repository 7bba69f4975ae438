"""Fixtures of a service: its settings, its database, its clients and commands."""

from __future__ import annotations

import ssl
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
import trustme
from click.testing import CliRunner

with warnings.catch_warnings():
    # Starlette's test client asks for the successor of httpx, which nothing else here needs yet.
    warnings.filterwarnings("ignore", message="Using `httpx` with `starlette.testclient`")
    from fastapi.testclient import TestClient

from layout_tuner.api.app import create_app
from layout_tuner.api.settings import Settings
from layout_tuner.cli.main import main
from layout_tuner.client.clients import Client
from layout_tuner.results_db.database.data_dir import DataDir
from layout_tuner.results_db.store import Store
from tests.kit.api import HEADERS, TOKEN, Api, Command, client_of
from tests.kit.populated import Populated, populated_service
from tests.kit.postgres import upgraded
from tests.kit.services import ServeProcess
from tests.kit.store import TimelyStore


@pytest.fixture
def settings() -> Settings:
    return Settings(token=TOKEN, lease_poll_s=0.02)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def served_url(request: pytest.FixtureRequest) -> str:
    """URL of the service's database: SQLite, and PostgreSQL in the slow suite."""
    kind = "sqlite" if request.param == "sqlite" else "postgres"
    return str(request.getfixturevalue(f"{kind}_url"))


@contextmanager
def serving(settings: Settings, url: str) -> Iterator[TestClient]:
    """Speaks to a service in this process, with its token."""
    with closing(TimelyStore(url)) as store:
        app = create_app(settings, store)
        with TestClient(app, headers=HEADERS, raise_server_exceptions=False) as client:
            yield client


@pytest.fixture
def http(settings: Settings, served_url: str) -> Iterator[TestClient]:
    with serving(settings, served_url) as client:
        yield client


@pytest.fixture
def data_dir(tmp_path: Path) -> DataDir:
    """A data directory whose database is of this version."""
    return upgraded(tmp_path / "data")


@pytest.fixture
def store(data_dir: DataDir) -> Iterator[Store]:
    """An empty database that a service or the test itself opens."""
    with closing(Store.open(data_dir)) as store:
        yield store


@pytest.fixture
def api(http: TestClient) -> Api:
    return Api(http)


@pytest.fixture
def client(api: Api) -> Client:
    """The Python client, connected to the service in this process."""
    return client_of(api)


@pytest.fixture
def command(api: Api, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs commands against the service in this process, in a wide terminal."""
    monkeypatch.setattr(
        "layout_tuner.cli.service.service_connection.connect", lambda *_, **__: client_of(api)
    )
    return lambda *arguments: CliRunner().invoke(main, arguments, env={"COLUMNS": "220"})


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """A service for the tests of a module, which do not depend on each other's changes."""
    url = upgraded(tmp_path_factory.mktemp("lasting")).database_url
    with serving(Settings(token=TOKEN, lease_poll_s=0.02, requests_per_s=1_000_000), url) as client:
        yield client


@pytest.fixture(
    scope="module", params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)]
)
def module_api(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Api]:
    """Like `api`, for tests that share what a module's fixture has made, or use names of their own.

    Modules name it `api`, so that `client` and `command` speak to it.
    """
    with ExitStack() as stack:
        if request.param == "sqlite":
            url = upgraded(tmp_path_factory.mktemp("module")).database_url
        else:
            url = stack.enter_context(request.getfixturevalue("empty_databases").lend())
        settings = Settings(token=TOKEN, lease_poll_s=0.02, requests_per_s=1_000_000)
        yield Api(stack.enter_context(serving(settings, url)))


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    """A service in a process of its own, for all tests that have names of their own in it."""
    service = ServeProcess(tmp_path_factory.mktemp("service") / "data")
    yield service
    service.end()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Populated]:
    """A service with something of everything, for tests that do not depend on each other."""
    with populated_service(upgraded(tmp_path_factory.mktemp("data")).database_url) as service:
        yield service
        service.assert_lists_answer()


@pytest.fixture(scope="module")
def tls() -> ssl.SSLContext:
    """Of a server whose certificate nobody knows."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("localhost").configure_cert(context)
    return context
