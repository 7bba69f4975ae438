"""What holds for every test."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
from collections import Counter
from collections.abc import Generator
from functools import cache
from pathlib import Path
from typing import Any

import httpx._transports.default
import pytest
from hypothesis import settings

from layout_tuner.timing_mark import SHARED_CORES_VARIABLE, TIMING_VARIABLE, default_mark
from layout_tuner.workers.launchers.ray.cluster import prepare_environment
from tests.kit.postgres import (
    database_url,
    empty_databases,
    empty_postgres_url,
    postgres_server,
    postgres_url,
    sqlite_url,
)
from tests.kit.run_warden import go_on_below_a_warden

__all__ = [
    "INSTRUCTION_SET",
    "database_url",
    "empty_databases",
    "empty_postgres_url",
    "postgres_server",
    "postgres_url",
    "sqlite_url",
]

# An example that takes long on a busy machine has not failed.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# A database, a service or a token of the user's must not be what tests work on.
for _word in (
    "DATABASE_URL",
    "DATA_DIR",
    "URL",
    "TOKEN_FILE",
    "WORKER_TOKEN_FILE",
    "CERTIFICATE",
    "KEEP",
    "DEFAULT_VISIBILITY",
):
    os.environ.pop(f"LAYOUT_TUNER_{_word}", None)

# Ranks of a test must not make another test's driver wait.
os.environ[TIMING_VARIABLE] = f"{default_mark()}-tests-{os.getpid()}"
atexit.register(Path(os.environ[TIMING_VARIABLE]).unlink, missing_ok=True)
os.environ[SHARED_CORES_VARIABLE] = "1"

# Processes of pytest-xdist ignore SIGINT, and whatever a test started would ignore it too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Two tests run side by side: threads of numpy's linear algebra would spin on the other one's core.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Each client of httpx reads a file of authorities anew, in 24 ms: here all share what they trust.
httpx._transports.default.create_ssl_context = cache(httpx._transports.default.create_ssl_context)

# Ray reads its authentication from the environment while it is imported, once a process; DeepHyper
# imports Ray, and the tests of the tuner import DeepHyper.
prepare_environment()

SQLITE_IS_ENOUGH = "sqlite_is_enough"
"""Marker of tests that run on PostgreSQL in the slow suite only: no SQL dialect changes the result.

In a module that has the marker, a test with `sqlite_is_enough(False)` keeps both runs: its result
depends on constraints, locks or types.
"""

SAMPLED = "sampled"
"""Marker of tests with many alike cases: `sampled(n)` leaves every n-th case in the fast suite.

A number that no parameter's number of values is a multiple of leaves the most different ones.
"""

RANKS = "ranks"
"""Marker of tests that start ranks, Ray or whole systems: but for the trainer's, one at a time."""

_TRAINER = "tests/workers/trainer/"
"""Its tests fork their ranks themselves, and judge what was computed and not when."""

_STARTS_RANKS = {
    "layout_tuner.workers.ranks.zygote",
    "layout_tuner.workers.ray_node",
    "torch.distributed.run",
}
"""Modules that, run in a process of their own, start ranks or Ray."""

INSTRUCTION_SET = "instruction set"
"""Property of a test's report: what the numeric tests ran under, and how that went."""


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Has the tests run below a warden, which ends the processes that they leave."""
    if not hasattr(config, "workerinput"):  # a process of pytest-xdist has that of the whole run
        go_on_below_a_warden()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints under which instruction sets the numeric tests ran, and which this processor lacks."""
    told = [
        dict(report.user_properties)[INSTRUCTION_SET]
        for outcome in ("passed", "failed", "skipped")
        for report in terminalreporter.getreports(outcome)
        if report.when == "call" and INSTRUCTION_SET in dict(report.user_properties)
    ]
    if told:
        terminalreporter.section("instruction sets of the numeric tests")
        for line in told:
            terminalreporter.write_line(str(line))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts tests that start ranks first, and some runs into the slow suite.

    Ranks are forked from the test's process, which must not have run OpenMP's threads by then, as
    scikit-learn does in tests of the tuner.
    """
    cases = Counter[str]()
    for item in items:
        sampled = item.get_closest_marker(SAMPLED)
        is_left_out = sampled is not None and cases[_test_of(item)] % sampled.args[0] != 0
        cases[_test_of(item)] += 1
        if is_left_out or (_is_sqlite_enough(item) and _runs_on_postgresql(item)):
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: item.get_closest_marker(RANKS) is None)


def _test_of(item: pytest.Item) -> str:
    """The test that an item is a case of."""
    return item.nodeid.split("[", 1)[0]


def _is_sqlite_enough(item: pytest.Item) -> bool:
    marker = item.get_closest_marker(SQLITE_IS_ENOUGH)
    return marker is not None and marker.args != (False,)


def _runs_on_postgresql(item: pytest.Item) -> bool:
    return isinstance(item, pytest.Function) and (
        hasattr(item, "callspec") and "postgresql" in item.callspec.params.values()
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hands out the files whose tests start ranks as one unit, then the others one by one.

    Those of the trainer come first among the others: see `pytest_collection_modifyitems`.
    """
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    @cache
    def starts_ranks(file: str) -> bool:
        # The process that hands out tests collects none, and knows no markers.
        return f"pytest.mark.{RANKS}" in (config.rootpath / file).read_text()

    class RanksTogether(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::", 1)[0]
            is_alone = starts_ranks(file) and not file.startswith(_TRAINER)
            return RANKS if is_alone else file

    config.option.loadscopereorder = False  # the longest unit comes first as it is
    return RanksTogether(config, log)


def pytest_collection_finish() -> None:
    """Spares garbage collections, and pages of forked ranks, what stays anyway."""
    gc.collect()
    gc.freeze()


_running: list[pytest.Item] = []
"""The test that runs now, for the audit hook below, to which nothing can be passed."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Notes which test runs, from its first fixture to its last."""
    _running[:] = [item]
    try:
        return (yield)
    finally:
        _running.clear()


def _refuse_ranks_of_unmarked_tests(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "os.fork" or (
        event == "subprocess.Popen" and not _STARTS_RANKS.isdisjoint(arguments[1])
    ):
        for item in _running:
            if item.get_closest_marker(RANKS) is None:
                pytest.fail(
                    f"{item.nodeid} starts ranks; mark it with pytest.mark.{RANKS}, so that it "
                    "runs before tests with threads of OpenMP, and not beside a whole system"
                )


sys.addaudithook(_refuse_ranks_of_unmarked_tests)
