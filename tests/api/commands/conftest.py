"""The store and the command line of the service that is a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
from click.testing import CliRunner, Result

from api.cli import main
from results_db.database.data_dir import DataDir
from results_db.store import Store
from tests.kit.api import Command
from tests.kit.services import ServeProcess
from tests.kit.store import TimelyStore


@pytest.fixture
def store(service: ServeProcess) -> Iterator[Store]:
    """The database behind the service's back, as the driver has it."""
    with closing(TimelyStore(DataDir(service.data_dir).database_url)) as store:
        yield store


@pytest.fixture
def run(service: ServeProcess) -> Command:
    """Runs commands against the service; `answer` is typed at their questions."""

    def run_it(*arguments: object, answer: str | None = None) -> Result:
        environment = {"LAYOUT_TUNER_DATA_DIR": str(service.data_dir)}
        words = [str(each) for each in arguments]
        return CliRunner().invoke(main, words, env=environment, input=answer)

    return run_it


@pytest.fixture
def served_url(sqlite_url: str) -> str:
    """No SQL dialect changes what commands send and print."""
    return sqlite_url
