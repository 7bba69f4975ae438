"""The driver as a process: its threads, its imports, and a database that is newer than it."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.kit.postgres import upgraded
from tests.kit.python_process import printed_by
from tuner.driver.commands import driver as driver_command

THREADS = """
import click
from tuner.driver.commands import driver
try:
    driver.main(["--data-dir", "/dev/null/nowhere"], standalone_mode=False)
except click.ClickException:
    import numpy, scipy.linalg, threadpoolctl
    print(sorted({each["num_threads"] for each in threadpoolctl.threadpool_info()}))
"""
IMPORTS = """
import sys
from tuner.driver.commands import driver
driver(["--help"], standalone_mode=False)
assert not {"sqlalchemy", "deephyper", "numpy"} & set(sys.modules)
import tuner.driver.driver, tuner.strategies.registry
assert not {"deephyper", "pandas", "optuna"} & set(sys.modules)
"""


def test_the_linear_algebra_of_a_driver_has_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others would spin on cores that probes may have."""
    monkeypatch.delenv("OPENBLAS_NUM_THREADS")
    assert printed_by(THREADS).strip() == "[1]"


def test_help_imports_no_database_and_a_driver_imports_strategies_only_when_they_are_used() -> None:
    assert "Drive the campaigns" in printed_by(IMPORTS)


def test_a_database_of_a_newer_version_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    data_dir = upgraded(tmp_path / "data")
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
