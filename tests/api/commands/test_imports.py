"""What commands import; each import is a share of the time that every command takes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.kit.services import ServeProcess

SERVICE = {"sqlalchemy", "fastapi", "numpy", "torch", "ray"}
TALK = {"httpx", "pydantic", "tenacity", "yaml", "ssl", "importlib.metadata"}


def imported(*words: str, **environment: str) -> set[str]:
    """The modules that a command has imported when it has ended well."""
    program = (
        "import sys\nfrom api.cli import main\n"
        f"main({list(words)}, standalone_mode=False)\n"
        "print('\\n' + ' '.join(sys.modules))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, **environment},
    )
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    "words",
    [(), ("campaign",), ("model",), ("cluster",), ("trial",), ("token",)],
    ids=lambda words: " ".join(words) or "root",
)
def test_the_help_of_a_group_imports_none_of_its_commands(words: tuple[str, ...]) -> None:
    found = imported(*words, "--help")
    assert not found & (SERVICE | TALK)
    assert not {name for name in found if name.startswith(("results_db.records", "api.schemas"))}


@pytest.mark.parametrize(
    "words", [("campaign", "show"), ("trial", "list"), ("leaderboard",), ("report",), ("login",)]
)
def test_the_help_of_a_command_imports_nothing_that_talks_to_a_service(
    words: tuple[str, ...],
) -> None:
    assert not imported(*words, "--help") & (SERVICE | {"httpx", "api.client"})


@pytest.mark.parametrize("words", [("campaign", "list"), ("token", "list"), ("model", "list")])
def test_a_command_that_talks_to_a_service_imports_what_talks_alone(
    words: tuple[str, ...], service: ServeProcess
) -> None:
    """`rich` and `tornado` are imported by httpx and by tenacity where they are installed."""
    found = imported(*words, LAYOUT_TUNER_DATA_DIR=str(service.data_dir))
    assert "httpx" in found
    unneeded = SERVICE | {
        "rich",
        "pygments",
        "tornado",
        "asyncio",
        "search_spaces.trainers.registry",
    }
    if words == ("campaign", "list"):
        unneeded.add("yaml")
    assert not found & unneeded
