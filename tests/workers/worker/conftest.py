"""The service of the worker that a test runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.fake_service import TOKEN, serve
from tests.kit.worker_loop import WorkedService
from workers.service.lease_client import LeaseClient


@pytest.fixture
def service(tmp_path: Path) -> Iterator[WorkedService]:
    with serve(WorkedService(tmp_path / "spool")) as service:
        yield service


@pytest.fixture
def client(service: WorkedService) -> Iterator[LeaseClient]:
    with LeaseClient(service.url, TOKEN) as client:
        yield client
