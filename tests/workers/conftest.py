"""What many tests of workers start from."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.workers.fake_service import FakeService, serve


@pytest.fixture
def service() -> Iterator[FakeService]:
    with serve(FakeService()) as service:
        yield service


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty directory for temporary files, with a short name."""
    with tempfile.TemporaryDirectory(prefix="lt-", dir="/tmp") as name:
        place = Path(name).resolve()
        place.chmod(0o1777)
        monkeypatch.setattr(tempfile, "tempdir", str(place))
        monkeypatch.setenv("TMPDIR", str(place))
        yield place
