"""The command line: its help, its imports, and commands whose packages are not installed."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import tomllib
from collections.abc import Sequence
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from layout_tuner.cli.command_table import (
    COMMANDS,
    NEEDS,
    missing_packages_of,
    short_help,
)
from layout_tuner.cli.main import INTERRUPTED, main
from layout_tuner.version import missing_packages
from tests.kit.api import ends, refused_line
from tests.kit.python_process import ROOT, printed_by
from tests.kit.services import ServeProcess, run_here


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    found = {
        "serve": "layout_tuner.cli.processes.serve:serve",
        "broken": "broken_command:broken",
        "missing": "nowhere.to_be_found:missing",
        "odd": "layout_tuner.version:version",
    }
    monkeypatch.setattr(main, "sources", found)
    return found


def test_help_lists_every_command_with_the_first_sentence_that_click_would_show() -> None:
    shown = ends(CliRunner().invoke(main, ["--help"]), 0)
    rows = {
        line.split()[0]: line.split()[1:]
        for line in shown.stdout.partition("Commands:")[2].splitlines()
        if line.startswith("  ") and not line.startswith("   ")
    }
    for name in (
        *("campaign", "driver", "export", "leaderboard", "probe"),
        *("replay", "serve", "train", "up", "worker"),
    ):
        assert len(rows[name]) > 3, f"{name} has no help"

    for name in ("campaign", "export", "leaderboard", "serve"):
        command = main.get_command(click.Context(main), name)
        first_line = (command.help or "").partition("\n")[0]
        assert short_help(COMMANDS[name]) == first_line


def test_a_command_that_cannot_be_imported_breaks_only_itself(
    sources: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_command.py").write_text(
        'import not_there\n\n\ndef broken() -> None:\n    """Break."""\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    ends(CliRunner().invoke(main, ["--help"]), 0, "Break.", "Run the HTTP service")
    for name, why in [("broken", "not_there"), ("missing", "nowhere"), ("odd", "not one")]:
        assert why in refused_line(CliRunner().invoke(main, [name]))
    assert CliRunner().invoke(main, ["serve", "--help"]).exit_code == 0


def test_the_version_is_that_of_the_package() -> None:
    done = CliRunner().invoke(main, ["--version"])
    assert done.output == f"layout-tuner {metadata.version('layout-tuner')}\n"


def test_a_command_that_ctrl_c_ends_says_so_by_its_name(
    sources: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def be_interrupted(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("layout_tuner.cli.processes.serve.serve.callback", be_interrupted)
    interrupted = CliRunner().invoke(main, ["serve", "--port", "0"])
    assert interrupted.exit_code == INTERRUPTED
    assert interrupted.stderr == "\nserve was interrupted\n"


SERVICE = {"sqlalchemy", "fastapi", "numpy", "torch", "ray", "deephyper"}
TALK = {"httpx", "pydantic", "tenacity", "yaml", "ssl", "importlib.metadata", "rich"}
SHOWING = ["campaign show", "trial list", "leaderboard", "report", "login"]
PROGRAM = """
import contextlib, io, json, sys
from layout_tuner.cli.main import main
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()):
        main(words.split(), standalone_mode=False)
    print(*sys.modules)
"""


def imported(commands: Sequence[str], **environment: str) -> list[set[str]]:
    """The modules that are there after each of some commands in one process, which end well."""
    printed = printed_by(PROGRAM, json.dumps([*commands]), **environment)
    return [set(line.split()) for line in printed.splitlines()]


@pytest.mark.parametrize(
    ("commands", "unneeded"),
    [
        (["", "campaign", "model", "cluster", "trial", "token"], SERVICE | TALK),
        (SHOWING, SERVICE | {"httpx", "layout_tuner.client.clients"}),
    ],
    ids=["groups", "commands"],
)
def test_help_imports_nothing_that_talks_to_a_service(
    commands: list[str], unneeded: set[str]
) -> None:
    helps = [f"{each} --help" for each in commands]
    for words, found in zip(commands, imported(helps), strict=True):
        assert not found & unneeded, words
        if unneeded >= TALK:
            of_commands = ("layout_tuner.results_db.records", "layout_tuner.api.schemas")
            assert not [name for name in found if name.startswith(of_commands)], words


def test_a_command_that_talks_to_a_service_imports_what_talks_alone(service: ServeProcess) -> None:
    """`rich` and `tornado` are imported by httpx and by tenacity where they are installed."""
    others = {"rich", "pygments", "tornado", "asyncio", "layout_tuner.trainers.registry"}
    commands = ["campaign list", "token list", "model list"]
    first, *rest = imported(commands, LAYOUT_TUNER_DATA_DIR=str(service.data_dir))
    assert "httpx" in first
    assert not first & (SERVICE | others | {"yaml"})
    for words, found in zip(commands[1:], rest, strict=True):
        assert not found & (SERVICE | others), words


PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
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

    monkeypatch.setattr("layout_tuner.version.find_spec", find_spec)


@pytest.mark.parametrize("command", sorted(NEEDS))
def test_a_command_says_in_one_line_which_extra_it_needs(
    nothing_but_the_base: None, command: str
) -> None:
    line = refused_line(CliRunner().invoke(main, [command]))
    assert f"pip install 'layout-tuner[{NEEDS[command].extra}]'" in line


def test_help_is_printed_without_the_extra_and_the_message_names_what_is_missing(
    nothing_but_the_base: None,
) -> None:
    ends(CliRunner().invoke(main, ["worker", "--help"]), 0, "Run trials of the service's campaigns")

    said = missing_packages("layout-tuner worker", ["not_there", "sys"], extra="worker")
    assert said == (
        "`layout-tuner worker` needs not_there, which is not installed; "
        "run: pip install 'layout-tuner[worker]'"
    )
    said = missing_packages("layout-tuner up", ["a_", "b_", "sys", "c_"], extra="all")
    assert "needs a_, b_ and c_, which are not installed" in said


@pytest.mark.parametrize("command", ["up", "worker"])
def test_without_ray_a_command_names_the_launcher_that_needs_none(
    command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    (tmp_path / "token").write_text("t" * 40)
    place = ("--url", "http://127.0.0.1:9", "--token-file", str(tmp_path / "token"))
    words = ["--launcher", "ray", "--data-dir", str(tmp_path)] if command == "up" else place
    line = refused_line(run_here(command, *words))
    assert "needs ray, which is not installed; run: pip install 'layout-tuner[worker]'" in line
    assert "--launcher" in line.partition("; or ")[2]


def test_a_command_that_cannot_be_imported_names_its_extra(
    nothing_but_the_base: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("layout_tuner.cli.processes.serve", "layout_tuner.api.app"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, "fastapi", None)  # importing it raises ModuleNotFoundError
    refused = ends(CliRunner().invoke(main, ["serve", "--help"]), 1)
    assert refused.stderr == (
        "Error: `layout-tuner serve` needs fastapi, sqlalchemy and uvicorn, which are not installed; "
        "run: pip install 'layout-tuner[service]'\n"
    )


def test_estimates_and_plans_need_numpy_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for package in ("scipy", "sqlalchemy", "fastapi", "torch"):
        monkeypatch.setitem(sys.modules, package, None)
    words = ["plan", str(ROOT / "examples" / "tiny.yaml"), "--data-dir", str(tmp_path), "--json"]
    shown = ends(CliRunner().invoke(main, words), 0)
    assert json.loads(shown.output)["num_legal"] > 0

    measured = str(ROOT / "benchmarks" / "data" / "tiny_local_cpu.csv")
    layout = ["--model", "tiny", "--num-microbatches", "2", "--json"]
    shown = ends(CliRunner().invoke(main, ["estimate", *layout, "--calibrate-from", measured]), 0)
    assert json.loads(shown.output)


def test_every_extra_brings_what_its_commands_need_in_one_range() -> None:
    brought = {extra: set(names(EXTRAS[extra])) for extra in ("service", "driver", "worker")}
    brought["all"] = set().union(*brought.values())
    assert EXTRAS["all"] == ["layout-tuner[service,driver,worker,notebook]"]
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("extra", "modules"),
    [
        (
            "service",
            "layout_tuner.cli.processes.serve, layout_tuner.results_db.admin.restore, layout_tuner.results_db.admin.integrity",
        ),
        (
            "driver",
            "layout_tuner.tuner.driver.process, layout_tuner.tuner.strategies.deephyper, layout_tuner.tuner.replay.run",
        ),
        (
            "worker",
            "layout_tuner.workers.worker.run_worker, layout_tuner.workers.rank_jobs.rank, layout_tuner.workers.launchers.ray.launcher",
        ),
    ],
)
def test_an_extra_does_without_the_others(extra: str, modules: str) -> None:
    wanted = set(names(EXTRAS[extra]))
    others = set().union(*(names(EXTRAS[other]) for other in ("service", "driver", "worker")))
    names_of_modules = {"scikit-learn": "sklearn"}
    blocked = {names_of_modules.get(each, each.replace("-", "_")) for each in others - wanted}
    if extra != "service":
        blocked.add("starlette")
    printed_by(BLOCKED.format(blocked=blocked, modules=modules))
