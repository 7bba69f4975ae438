"""Commands whose packages are not installed."""

import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from api.cli import main
from api.command_packages import COMMANDS, NEEDS, missing_packages, missing_packages_of

PROJECT: dict[str, Any] = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())[
    "project"
]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]


def names(requirements: list[str]) -> dict[str, str]:
    """Requirements by the name of what is required."""
    return {re.split(r"[\[<>=]", each)[0]: each for each in requirements}


@pytest.fixture
def nothing_but_the_base(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every package that a command needs look as if it were not installed."""
    heavy = {package for need in NEEDS.values() for package in need.packages}
    find = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name in heavy else find(name, package)

    monkeypatch.setattr("api.command_packages.find_spec", find_spec)


@pytest.mark.parametrize("command", sorted(NEEDS))
def test_a_command_says_in_one_line_which_extra_it_needs(
    nothing_but_the_base: None, command: str
) -> None:
    refused = CliRunner().invoke(main, [command])
    assert refused.exit_code == 1
    assert len(refused.stderr.splitlines()) == 1
    assert f"pip install 'layout-tuner[{NEEDS[command].extra}]'" in refused.stderr


def test_help_is_printed_without_the_extra_and_the_message_names_what_is_missing(
    nothing_but_the_base: None,
) -> None:
    shown = CliRunner().invoke(main, ["worker", "--help"])
    assert shown.exit_code == 0
    assert "Run trials of the service's campaigns" in shown.output

    said = missing_packages("layout-tuner worker", ["not_there", "sys"], extra="worker")
    assert said == (
        "`layout-tuner worker` needs not_there, which is not installed; "
        "run: pip install 'layout-tuner[worker]'"
    )
    said = missing_packages("layout-tuner up", ["a_", "b_", "sys", "c_"], extra="all")
    assert said is not None
    assert "needs a_, b_ and c_, which are not installed" in said


def test_a_command_that_cannot_be_imported_names_its_extra(
    nothing_but_the_base: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "api.commands.serve", raising=False)
    monkeypatch.setitem(sys.modules, "fastapi", None)  # importing it raises ModuleNotFoundError
    refused = CliRunner().invoke(main, ["serve", "--help"])
    assert refused.exit_code == 1
    assert refused.stderr == (
        "Error: `layout-tuner serve` needs fastapi, sqlalchemy and uvicorn, which are not installed; "
        "run: pip install 'layout-tuner[service]'\n"
    )


def test_estimates_and_plans_need_numpy_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for package in ("scipy", "sqlalchemy", "fastapi", "torch"):
        monkeypatch.setitem(sys.modules, package, None)
    campaign = str(Path(__file__).parents[3] / "examples" / "tiny.yaml")
    shown = CliRunner().invoke(main, ["plan", campaign, "--json", "--data-dir", str(tmp_path)])
    assert shown.exit_code == 0, shown.stderr
    assert json.loads(shown.output)["num_legal"] > 0

    measured = str(Path(__file__).parents[3] / "benchmarks" / "data" / "tiny_local_cpu.csv")
    layout = ["--model", "tiny", "--num-microbatches", "2", "--json"]
    shown = CliRunner().invoke(main, ["estimate", *layout, "--calibrate-from", measured])
    assert shown.exit_code == 0, shown.stderr
    assert json.loads(shown.output)


def test_every_extra_brings_what_its_commands_need_in_one_range() -> None:
    brought = {extra: set(names(EXTRAS[extra])) for extra in ("service", "driver", "worker")}
    brought["all"] = set().union(*brought.values())
    assert EXTRAS["all"] == ["layout-tuner[service,driver,worker]"]
    for command, need in NEEDS.items():
        assert command in COMMANDS
        assert set(need.packages) <= brought[need.extra], command

    found: dict[str, str] = names(PROJECT["dependencies"])
    for extra in ("service", "driver", "worker"):
        for name, requirement in names(EXTRAS[extra]).items():
            assert found.setdefault(name, requirement) == requirement

    assert [missing_packages_of(command) for command in NEEDS] == [None] * len(NEEDS)
    assert missing_packages_of("estimate") is None


BLOCKED = """\
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocked())
import {modules}
"""
IMPORT_NAMES = {
    "fastapi-swagger": "fastapi_swagger",
    "prometheus-client": "prometheus_client",
    "scikit-learn": "sklearn",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("extra", "modules"),
    [
        ("service", "api.commands.serve, results_db.admin.restore, results_db.admin.integrity"),
        ("driver", "tuner.driver.process, tuner.strategies.deephyper, tuner.replay.run"),
        (
            "worker",
            "workers.worker.run_worker, workers.rank_jobs.rank, workers.launchers.ray.launcher",
        ),
    ],
)
def test_an_extra_does_without_the_others(extra: str, modules: str) -> None:
    wanted = set(names(EXTRAS[extra]))
    others = set().union(*(names(EXTRAS[other]) for other in ("service", "driver", "worker")))
    blocked = {IMPORT_NAMES.get(name, name) for name in others - wanted} | {"starlette"}
    if extra == "service":
        blocked.remove("starlette")
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED.format(blocked=blocked, modules=modules)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
