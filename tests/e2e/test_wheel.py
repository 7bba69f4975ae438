"""The wheel, installed outside of the clone: the base install, and a campaign on all extras."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path
from typing import Any

import pytest

from layout_tuner.cli.command_table import COMMANDS, NEEDS
from tests.e2e.conftest import CAMPAIGN, Service
from tests.kit.waiting import wait_until
from tests.workers.process_checks import kill

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]

ROOT = Path(__file__).parents[2]
BENCHMARK_TABLE = ROOT / "benchmarks" / "data" / "tiny_local_cpu.csv"
FOLDERS = ("api", "results_db", "search_spaces", "tuner", "workers")
"""Folders of the repository's top that are links in layout_tuner/."""
DECOYS = (*FOLDERS, "docs", "tests")
"""Names of folders that users have, too."""
NO_INDEX = ("No matching distribution found", "NewConnectionError", "Could not fetch URL")
"""What pip prints where it reaches no package index."""


class Installed:
    """A virtual environment that holds the wheel, and commands that see nothing else."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
        self.python = str(folder / "bin" / "python")
        self.command = str(folder / "bin" / "layout-tuner")
        (self.site_packages,) = folder.glob("lib/python3*/site-packages")
        self.empty = folder / "empty"
        """A directory with nothing but packages of a user, which refuse to be imported."""
        for name in DECOYS:
            (self.empty / name).mkdir(parents=True)
            decoy = f"raise SystemExit('the decoy {name} was imported')\n"
            (self.empty / name / "__init__.py").write_text(decoy)
        self.environment = {
            name: value for name, value in os.environ.items() if name != "PYTHONPATH"
        } | {"LAYOUT_TUNER_DATA_DIR": str(folder / "data")}

    def install(self, wheel: Path, *options: str) -> None:
        pip("--python", self.python, "install", "--no-compile", *options, str(wheel))

    def done(self, *arguments: str) -> str:
        """What a command of the command line prints that ends well, in an empty directory."""
        return self._done(self.command, *arguments)

    def evaluate(self, program: str) -> Any:
        """What a program prints as JSON."""
        return json.loads(self._done(self.python, "-c", program))

    def _done(self, *command: str) -> str:
        done = self.run(*command)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            env=self.environment,
            cwd=self.empty,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )


def pip(*arguments: str) -> None:
    """Runs pip; skips the test where no package index can be reached."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    printed = done.stdout + done.stderr
    if done.returncode and any(sentence in printed for sentence in NO_INDEX):
        pytest.skip(f"pip reaches no package index: {printed.strip().splitlines()[-1]}")
    assert done.returncode == 0, printed


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, as it would be published."""
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT))
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def base(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """An environment with what `pip install layout-tuner` brings."""
    installed = Installed(tmp_path_factory.mktemp("base") / "venv")
    installed.install(wheel, "--constraint", str(ROOT / "constraints.txt"))
    return installed


@pytest.fixture
def full(wheel: Path, tmp_path: Path) -> Installed:
    """An environment with the wheel on top of the dependencies that this test runs with.

    A line of a .pth file adds them. The .pth files among them, which lead to the clone, are not
    read.
    """
    installed = Installed(tmp_path / "venv")
    folders = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    folders |= {folder for folder in sys.path if Path(folder).name.endswith("-packages")}
    (installed.site_packages / "dependencies.pth").write_text("\n".join(sorted(folders)) + "\n")
    installed.install(wheel, "--no-deps", "--no-index", "--ignore-installed")
    return installed


def home(installed: Installed) -> str:
    """The folder that the one package is imported from."""
    return str(
        installed.evaluate(
            "import json, pathlib, layout_tuner.cli.main\n"
            "print(json.dumps(str(pathlib.Path(layout_tuner.__file__).parents[1])))"
        )
    )


def importable(folder: Path) -> set[str]:
    """The names that a folder on Python's path lets one import."""
    return {each.name for each in folder.iterdir() if each.is_dir() or each.suffix == ".py"}


def tracked_files() -> set[str]:
    """Every tracked file of the package, by its path in an installation."""
    listed = subprocess.run(
        ["git", "ls-files", "layout_tuner", *FOLDERS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    files = {name for name in listed if not (ROOT / name).is_symlink()}
    return {name if name.startswith("layout_tuner/") else f"layout_tuner/{name}" for name in files}


def test_the_wheel_holds_every_file_of_the_package_and_the_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
        (metadata,) = [name for name in held if name.endswith(".dist-info/METADATA")]
        described = message_from_bytes(archive.read(metadata))
        licence = archive.read(metadata.replace("METADATA", "licenses/LICENSE"))
    tracked = tracked_files()
    assert len(tracked) > 400
    assert {name for name in held if ".dist-info/" not in name} == tracked
    assert "layout_tuner/py.typed" in tracked
    assert described["License-Expression"] == "Apache-2.0"
    assert licence == (ROOT / "LICENSE").read_bytes()


def test_a_source_distribution_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    builder = Installed(tmp_path / "builder")
    pip("--python", builder.python, "install", "--no-compile", "hatchling")
    program = f"from hatchling.build import build_sdist; print(build_sdist({str(tmp_path)!r}))"
    built = subprocess.run(
        [builder.python, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    archive = tmp_path / built.stdout.split()[-1]
    with tarfile.open(archive) as members:
        assert not [member.name for member in members if member.issym()]
    pip("wheel", "--no-deps", "--wheel-dir", str(tmp_path / "again"), str(archive))
    (again,) = (tmp_path / "again").glob("*.whl")
    with zipfile.ZipFile(wheel) as first, zipfile.ZipFile(again) as second:
        assert {e.filename: e.CRC for e in first.filelist if ".dist-info/" not in e.filename} == {
            e.filename: e.CRC for e in second.filelist if ".dist-info/" not in e.filename
        }


def test_an_editable_install_adds_one_name_by_a_line_that_editors_follow(tmp_path: Path) -> None:
    installed = Installed(tmp_path / "venv")
    pip("--python", installed.python, "install", "--no-deps", "--editable", str(ROOT))
    (line,) = [path for path in installed.site_packages.glob("*.pth") if "layout" in path.name]
    folder = Path(line.read_text().strip())
    assert folder.is_dir(), "a .pth file with a folder, not an import hook"
    assert importable(folder) == {"layout_tuner"}
    assert not importable(installed.site_packages) & {"layout_tuner", *DECOYS}
    assert installed.evaluate(
        "import json, layout_tuner.workers.errors as found; print(json.dumps(found.__file__))"
    ) == str(folder / "layout_tuner/workers/errors.py")


def test_the_base_install_has_the_client_and_no_heavy_packages(base: Installed) -> None:
    installed = base.evaluate(
        "import json; from importlib.metadata import distributions\n"
        "print(json.dumps([each.name.lower() for each in distributions()]))"
    )
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "layout-tuner" in installed
    heavy = {"torch", "ray", "deephyper", "scikit-learn", "scipy", "sqlalchemy", "fastapi"}
    assert not heavy & set(installed), installed
    assert len(installed) < 3 * len(pyproject["dependencies"]), installed
    assert home(base) == str(base.site_packages)
    assert not importable(base.site_packages) & set(DECOYS)
    names = base.evaluate(
        "import json, layout_tuner\n"
        "print(json.dumps([name for name in layout_tuner.__all__ if getattr(layout_tuner, name)]))"
    )
    assert {"Client", "ServiceError", "__version__"} <= set(names)


def test_the_base_install_lists_every_command_and_says_what_is_missing(base: Installed) -> None:
    commands = sorted(COMMANDS)
    listed = base.done("--help")
    for command in commands:
        assert f"\n  {command} " in listed
    refused = base.run(base.command, "worker")
    assert refused.returncode == 1
    assert refused.stderr == (
        "Error: `layout-tuner worker` needs torch, which is not installed; "
        "run: pip install 'layout-tuner[worker]'\n"
    )
    # What the others lack is said as in test_cli.py; those that lack nothing, in one process.
    shown = base.evaluate(
        "import json; from layout_tuner.cli.main import main; from click.testing import CliRunner\n"
        f"codes = {{name: CliRunner().invoke(main, [name, '--help']).exit_code\n"
        f"         for name in {sorted(set(commands) - set(NEEDS))}}}\n"
        "print(json.dumps(codes))"
    )
    assert shown == dict.fromkeys(shown, 0)
    assert {"estimate", "plan", "campaign", "export"} <= set(shown)


def test_the_base_install_estimates_and_renders_a_batch_script(base: Installed) -> None:
    layout = ("--tp", "2", "--micro-batch-size", "2", "--num-microbatches", "4")
    estimated = json.loads(base.done("estimate", "--model", "tiny", *layout, "--json"))
    assert estimated["step_time_s"] > 0
    table = ("--calibrate-from", str(BENCHMARK_TABLE))
    base.done("estimate", "--model", "tiny", *layout, *table)
    token = base.folder / "token"
    token.write_text("a-worker-s-token\n")
    token.chmod(0o600)
    job = ("--cluster", "frontier", "--account", "ABC123", "--nodes", "2", "--time", "1h")
    service = ("--url", "http://127.0.0.1:1", "--worker-token-file", str(token))
    script = base.done("allocation", "submit", *job, *service, "--dry-run")
    assert "#SBATCH --account=ABC123" in script


PROGRAM = """
import layout_tuner, time
from layout_tuner import report_step
{more}
for _ in range(14):
    time.sleep(0.05)
    report_step(loss=2.0)
"""


def test_a_program_reports_its_steps_with_and_without_the_package(full: Installed) -> None:
    """In the worker's environment it has the client, too; in a bare one the one file alone."""
    bare = Installed(full.folder / "bare")
    programs = {
        full.python: "from layout_tuner import Client, plan",
        bare.python: "assert layout_tuner.__file__.endswith('/layout_tuner.py')",
    }
    for number, (python, more) in enumerate(programs.items()):
        program = full.folder / f"program{number}.py"
        program.write_text(PROGRAM.format(more=more))
        trainers = full.folder / f"trainers{number}.json"
        entry = {"name": "theirs", "version": "1", "command": [python, str(program)]}
        trainers.write_text(json.dumps({"trainers": [entry]}))
        knobs = ("--model", "tiny", "--num-microbatches", "1", "--steps", "4")
        found = json.loads(full.done("probe", *knobs, "--trainers", str(trainers), "--json"))
        assert (found["trainer"], found["tokens"]) == ("theirs", "assumed")


@pytest.mark.ranks
def test_the_installed_service_runs_a_campaign_from_an_empty_directory(full: Installed) -> None:
    assert home(full) == str(full.site_packages)
    service = Service(full.folder / "data", command=full.command, cwd=full.empty)
    service.environment.pop("PYTHONPATH", None)
    description = full.empty / "campaign.json"
    description.write_text(json.dumps({**CAMPAIGN, "strategy": "guided", "budget": {"trials": 2}}))
    service.start()
    try:
        service.done("campaign", "submit", str(description))
        ended = service.wait_for_end("e2e")
        assert (ended["state"], ended["reason"]) == ("COMPLETED", "budget"), service.logs()
        board = json.loads(service.done("leaderboard", "e2e", "--json"))
        assert [trial["rank"] for trial in board["trials"]] == [1, 2]
        service.done("export", "e2e", "--format", "trainer", "--out", "job")
        job = full.empty / "job" / "job.json"
        layout = json.loads(job.read_text())["layout"]
        ranks = layout["tp"] * layout["pp"] * layout["dp"]
        under_torchrun = (
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={ranks}",
        )
        trained = full.run(
            *(full.python, *under_torchrun, "-m", "layout_tuner.workers.trainer.train"),
            *("--config", str(job), "--steps", "3", "--json"),
        )
        assert trained.returncode == 0, trained.stdout + trained.stderr
        service.stop()
        wait_until("every process of the service is gone", lambda: not service.processes())
        service.done("db", "check")
    finally:
        service.http.close()
        kill(service.processes())
