"""What many tests of workers start from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.workers.fake_service import FakeService, serve


@pytest.fixture
def service() -> Iterator[FakeService]:
    with serve(FakeService()) as service:
        yield service
