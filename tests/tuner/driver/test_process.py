"""The driver as a process: killed, told to stop, started twice, over a newer database."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from results_db.database.data_dir import DataDir
from results_db.store import Store
from tests.kit.postgres import upgraded
from tests.tuner.factories import FakeWorker, ended, layouts_of, make_spec, submit, wait_for
from tuner.driver.commands import driver as driver_command

DEADLINE_S = 60.0


@pytest.fixture
def data_dir(tmp_path: Path) -> DataDir:
    return upgraded(tmp_path / "data")


@pytest.fixture
def store(data_dir: DataDir) -> Iterator[Store]:
    store = Store.open(data_dir)
    yield store
    store.close()


@contextmanager
def running_driver(data_dir: DataDir) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tuner", "--data-dir", str(data_dir.path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def line_of(process: subprocess.Popen[str], words: str) -> str:
    assert process.stderr is not None
    for line in process.stderr:
        if words in line:
            return line
    raise AssertionError(f"the driver ended without saying {words!r}")


_THREADS = """
import click
from tuner.driver.commands import driver
try:
    driver.main(["--data-dir", "/dev/null/nowhere"], standalone_mode=False)
except click.ClickException:
    import numpy, scipy.linalg, threadpoolctl
    print(sorted({each["num_threads"] for each in threadpoolctl.threadpool_info()}))
"""


def test_its_linear_algebra_has_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others would spin on cores that probes may have."""
    monkeypatch.delenv("OPENBLAS_NUM_THREADS")
    found = subprocess.run([sys.executable, "-c", _THREADS], capture_output=True, text=True)
    assert found.stdout.strip() == "[1]", found.stderr


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["random", pytest.param("deephyper", marks=pytest.mark.slow)])
def test_killed_in_the_middle_and_started_again_it_completes_the_campaign(
    data_dir: DataDir, store: Store, strategy: str
) -> None:
    campaign = submit(store, make_spec(strategy=strategy, budget={"trials": 18}))
    worker = FakeWorker(store)
    for num_done in (4, 11):
        with running_driver(data_dir) as process:
            wait_for(
                lambda bound=num_done: (
                    store.campaigns.count_trials(campaign.id)["COMPLETED"] >= bound
                ),
                worker.run_one,
            )
            process.kill()
            assert process.wait(DEADLINE_S) == -signal.SIGKILL
        assert not ended(store, campaign)
    with running_driver(data_dir):
        wait_for(lambda: ended(store, campaign), worker.run_one)
    trials = store.trials.find(campaign.id)
    assert store.campaigns.get(campaign.id).reason == "budget"
    assert [trial.state for trial in trials] == ["COMPLETED"] * 18
    assert [trial.attempt for trial in trials] == [1] * 18
    assert len(set(layouts_of(trials))) == 18


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly(data_dir: DataDir, number: signal.Signals) -> None:
    with running_driver(data_dir) as process:
        line_of(process, "driver started")
        process.send_signal(number)
        line_of(process, "driver stopped")
        assert process.wait(DEADLINE_S) == 0


def test_a_database_of_a_newer_version_is_refused_and_left_as_it_is(data_dir: DataDir) -> None:
    Store.open(data_dir).close()
    path = data_dir.database_url.removeprefix("sqlite:///")
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = 'f00d'")
    result = CliRunner().invoke(driver_command, ["--data-dir", str(data_dir.path)])
    assert result.exit_code == 1
    assert "revision f00d" in result.output
    assert "newer version of layout-tuner" in result.output
    assert result.output.count("\n") == 1
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT version_num FROM alembic_version").fetchone() == ("f00d",)


def test_help_needs_neither_the_database_nor_deephyper() -> None:
    code = (
        "import sys\nfrom tuner.driver.commands import driver\n"
        "driver(['--help'], standalone_mode=False)\n"
        "sys.exit(bool({'sqlalchemy', 'deephyper', 'numpy'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert "Drive the campaigns" in result.stdout
