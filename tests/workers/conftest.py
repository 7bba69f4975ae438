"""What many tests of workers start from."""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.kit.fake_service import TOKEN, serve

if TYPE_CHECKING:
    from layout_tuner.workers.launchers.local import LocalNodes
    from layout_tuner.workers.service.lease_client import LeaseClient
    from tests.kit.local_ranks import SeveralLocalNodes
    from tests.kit.worker_loop import WorkedService

# Imported where they are used: tests of the trainer on GPUs do without psutil.


@pytest.fixture
def service(tmp_path: Path) -> Iterator[WorkedService]:
    from tests.kit.worker_loop import WorkedService

    with serve(WorkedService(tmp_path / "spool")) as service:
        yield service


@pytest.fixture
def client(service: WorkedService) -> Iterator[LeaseClient]:
    from layout_tuner.workers.service.lease_client import LeaseClient

    with LeaseClient(service.url, TOKEN) as client:
        yield client


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
    from tests.kit.waiting import wait_until
    from tests.workers.process_checks import MARK, kill, marked

    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    try:
        yield mark
        wait_until("no process is left", lambda: not marked(mark), 20)
    finally:
        kill(marked(mark))


@pytest.fixture(scope="session")
def orders_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the ranks of the nodes below do oddly."""
    path = tmp_path_factory.mktemp("orders") / "orders"
    path.write_text("{}")
    return path


@pytest.fixture
def orders(orders_file: Path) -> Iterator[Path]:
    """The file of `tests.workers.odd_rank`, for one test."""
    yield orders_file
    orders_file.write_text("{}")


@pytest.fixture(scope="session")
def nodes(orders_file: Path) -> Iterator[LocalNodes]:
    """This machine as a node of two devices whose ranks train, for modules that have no own one.

    They share it, since a zygote takes two seconds of a core to import torch. It stands for a
    worker with secrets, and with a path of modules.
    """
    from layout_tuner.protocol.connection.service_address import PRIVATE_VARIABLES
    from tests.kit.local_ranks import local_nodes
    from tests.kit.python_process import ROOT
    from tests.workers.odd_rank import ODD_ENTRY, ORDERS

    secrets = dict.fromkeys(PRIVATE_VARIABLES, "a-secret-of-the-worker")
    path = f"{ROOT}:{ROOT}/:/elsewhere"
    environment = {**secrets, "PYTHONPATH": path, "LC_ALL": "C.utf8", ORDERS: str(orders_file)}
    with local_nodes(rank_entry=ODD_ENTRY, **environment) as nodes:
        yield nodes


@pytest.fixture(scope="session")
def two_nodes(orders_file: Path) -> Iterator[SeveralLocalNodes]:
    """The same as two nodes."""
    from tests.kit.local_ranks import several_nodes
    from tests.workers.odd_rank import ODD_ENTRY, ORDERS

    with several_nodes([ODD_ENTRY] * 2, **{ORDERS: str(orders_file)}) as nodes:
        yield nodes
