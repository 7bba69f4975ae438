"""A service that persons sign in to."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.kit.api import CAMPAIGN, HEADERS, answered
from tests.kit.persons import Signing, served


@pytest.fixture(scope="package")
def signing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Signing]:
    """One service for the modules of signing in and of sessions, with a campaign."""
    path = tmp_path_factory.mktemp("sign-in")
    worker_token = "lt_worker_of_this_directory"
    with served(path, wrong_codes=1000, worker_token=worker_token) as signing:
        answered(httpx.post(f"{signing.url}/v1/campaigns", json=CAMPAIGN, headers=HEADERS), 201)
        yield signing
