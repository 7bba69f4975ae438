"""What many tests of workers start from."""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.fake_service import FakeService, serve


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


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Marks every process that the test starts; none may be left when it ends."""
    # Not above: tests of the trainer on GPUs do without psutil.
    from tests.kit.waiting import wait_until
    from tests.workers.process_checks import MARK, kill, marked

    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    try:
        yield mark
        wait_until("no process is left", lambda: not marked(mark), 20)
    finally:
        kill(marked(mark))
