from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.api.dashboard.browser import Visitor, running_browser
from tests.api.dashboard.explored import Explored, explored_service
from tests.kit.postgres import upgraded


# Not for the session: while playwright runs, a process cannot run an event loop of its own.
@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    with running_browser() as browser:
        yield browser


@pytest.fixture(scope="package")
def explored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Explored]:
    """One service for all modules: their tests add campaigns of their own, and end them."""
    data_dir = upgraded(tmp_path_factory.mktemp("explored"))
    with explored_service(data_dir.database_url) as service:
        yield service


@pytest.fixture
def visitor(browser: Browser, explored: Explored) -> Iterator[Visitor]:
    """A window of an admin who is signed in."""
    with explored.visitor(browser) as visitor:
        yield visitor


@pytest.fixture
def served_url(sqlite_url: str) -> str:
    """No SQL dialect changes what pages show."""
    return sqlite_url
