"""The store and the command line of the service that is a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from typing import Any

import pytest
from click.testing import CliRunner, Result

from layout_tuner.cli.main import main
from layout_tuner.results_db.database.data_dir import DataDir
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.layouts.layout import Layout
from tests.kit.api import CAMPAIGN, Command
from tests.kit.service_fixtures import (
    api,
    client,
    command,
    data_dir,
    http,
    lasting,
    module_api,
    service,
    settings,
    shared,
    tls,
)
from tests.kit.services import ServeProcess
from tests.kit.store import TimelyStore, completed, make_worker, run_trial

__all__ = [
    "api",
    "client",
    "command",
    "data_dir",
    "http",
    "lasting",
    "module_api",
    "service",
    "settings",
    "shared",
    "tls",
]


@pytest.fixture(scope="module")
def store(service: ServeProcess) -> Iterator[Store]:
    """The database behind the service's back, as the driver has it."""
    with closing(TimelyStore(DataDir(service.data_dir).database_url)) as store:
        yield store


@pytest.fixture(scope="module")
def measured(service: ServeProcess, store: Store) -> Callable[..., int]:
    """Submits a campaign and measures layouts at so many tokens a second; returns its id."""

    def measure(name: str, speeds: Iterable[tuple[Layout, float]] = (), **changes: Any) -> int:
        service.post("/campaigns", {**CAMPAIGN, "name": name, **changes})
        campaign = store.campaigns.by_name(name).id
        worker = make_worker(store, "w1", devices_per_node=4).id
        for layout, tokens_per_s in speeds:
            outcome = completed(layout, tokens_per_s=tokens_per_s, duration_s=16.0)
            run_trial(store, campaign, layout, outcome, worker=worker)
        return campaign

    return measure


@pytest.fixture(scope="module")
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
