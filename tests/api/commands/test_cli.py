import subprocess
import sys
from importlib import metadata
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from api import cli
from api.command_packages import COMMANDS
from api.lazy_group import short_help


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    found = {
        "serve": "api.commands.serve:serve",
        "broken": "broken_command:broken",
        "missing": "nowhere.to_be_found:missing",
        "odd": "api.version:version",
    }
    monkeypatch.setattr(cli.main, "sources", found)
    return found


def test_help_lists_every_command_with_the_first_sentence_that_click_would_show() -> None:
    shown = CliRunner().invoke(cli.main, ["--help"])
    assert shown.exit_code == 0
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
        command = cli.main.get_command(click.Context(cli.main), name)
        assert isinstance(command, click.Command)
        first_line = (command.help or "").partition("\n")[0]
        assert short_help(COMMANDS[name]) == first_line


def test_help_imports_no_command() -> None:
    program = (
        "import sys\nfrom api.cli import main\n"
        "main(['--help'], standalone_mode=False)\n"
        "heavy = {'torch', 'ray', 'deephyper', 'sqlalchemy', 'fastapi', 'numpy', 'httpx', 'rich'}\n"
        "print('heavy:', sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "heavy: []"


def test_a_command_that_cannot_be_imported_breaks_only_itself(
    sources: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_command.py").write_text(
        'import not_there\n\n\ndef broken() -> None:\n    """Break."""\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    shown = CliRunner().invoke(cli.main, ["--help"])
    assert shown.exit_code == 0
    assert "Break." in shown.output
    assert "Run the HTTP service" in shown.output
    for name, why in [("broken", "not_there"), ("missing", "nowhere"), ("odd", "not one")]:
        failed = CliRunner().invoke(cli.main, [name])
        assert failed.exit_code == 1
        assert why in failed.output
        assert len(failed.output.splitlines()) == 1
    assert CliRunner().invoke(cli.main, ["serve", "--help"]).exit_code == 0


def test_the_version_is_that_of_the_package() -> None:
    done = CliRunner().invoke(cli.main, ["--version"])
    assert done.output == f"layout-tuner {metadata.version('layout-tuner')}\n"


def test_a_command_that_ctrl_c_ends_says_so_by_its_name(
    sources: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def be_interrupted(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("api.commands.serve.serve.callback", be_interrupted)
    interrupted = CliRunner().invoke(cli.main, ["serve", "--port", "0"])
    assert interrupted.exit_code == cli.INTERRUPTED
    assert interrupted.stderr == "\nserve was interrupted\n"
