"""The commands of README, tutorial and guides, run in order as a reader would run them.

So is the notebook of the examples.

Each page runs in an empty directory with a copy of `examples/`, with a home of its own, against a
service on loopback. A page that starts no service finds one that runs. The commands must end with
exit code 0. Blocks after a line `<!-- not run: ... -->` are left out.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any, Final

import pytest

from tests.kit.markdown import ROOT, Markdown, guides
from tests.kit.waiting import wait_until
from tests.workers.process_checks import MARK, kill, marked

PATIENCE_S: Final = 840

PORTS: Final = ("8080", "8443")
"""Ports that the documents name; each is replaced by one that is free."""

SERVICE: Final = re.compile(r"layout-tuner (up|serve)\b")

WAIT_FOR_SERVICE: Final = """\
for _ in $(seq 300); do layout-tuner whoami >/dev/null 2>&1 && break; sleep 0.2; done
"""

PAGES: Final = [
    pytest.param(page, marks=() if page.name == "README.md" else pytest.mark.nightly, id=page.name)
    for page in guides()
    if page.run_commands()
]
"""README in the slow suite; the tutorial and the guides take minutes each."""


@pytest.mark.slow
@pytest.mark.timeout(PATIENCE_S + 60)
@pytest.mark.parametrize("page", PAGES)
def test_documented_commands_work_in_order(page: Markdown, tmp_path: Path) -> None:
    commands = page.run_commands()
    if not any(SERVICE.search(command) for command in commands):
        commands = ["layout-tuner up &", *commands]
    home, directory = tmp_path / "home", tmp_path / "empty"
    home.mkdir()
    directory.mkdir()
    shutil.copytree(ROOT / "examples", directory / "examples")
    if page.name == "README.md":  # all trials of its campaign run with the tutorial
        campaign = directory / "examples" / "tiny.yaml"
        campaign.write_text(campaign.read_text().replace("trials: 16", "trials: 4"))
    mark = uuid.uuid4().hex
    printed = tmp_path / "printed"
    try:
        with printed.open("w") as output:
            ended = subprocess.run(
                ["bash", "-c", _script(commands)],
                cwd=directory,
                env=_environment(home, mark),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=PATIENCE_S,
                check=False,
            )
        assert ended.returncode == 0, f"{printed.read_text()[-6000:]}\n{_logs(home)}"
        wait_until("no process is left", lambda: not marked(mark), 30.0)
    finally:
        kill(marked(mark))


def _script(commands: list[str]) -> str:
    """A script that ends at the first command that fails, and ends what runs beside it."""
    lines = ["trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT"]
    ports = {named: str(_free_port()) for named in PORTS}
    for command in commands:
        placed = re.sub(r"layout-tuner up\b", "layout-tuner up --port 8080", command)
        for named, port in ports.items():
            placed = re.sub(rf"\b{named}\b", port, placed)
        lines += [
            f"printf '%s\\n' '=== {command.replace(chr(39), '')}'",
            placed,
            'code=$?; if [ $code -ne 0 ]; then echo "=== exit code $code"; exit $code; fi',
        ]
        if SERVICE.search(command):
            lines.append(WAIT_FOR_SERVICE)
    return "\n".join(lines)


def _environment(home: Path, mark: str) -> dict[str, str]:
    """The reader's environment: a home of its own, and nothing that names another service."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("LAYOUT_TUNER_", "XDG_", "SLURM_"))
    }
    path = f"{Path(sys.executable).parent}{os.pathsep}{inherited['PATH']}"
    return {**inherited, "HOME": str(home), "PATH": path, MARK: mark}


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _logs(home: Path) -> str:
    return "\n".join(
        f"--- {log.name}\n{log.read_text()[-2000:]}"
        for log in sorted(home.glob(".local/share/layout-tuner/logs/*.log"))
    )


pytestmark = pytest.mark.ranks

NOTEBOOK = Path(__file__).parents[2] / "examples" / "campaign.ipynb"

RUN = """\
import sys, nbclient, nbformat
notebook = nbformat.read(sys.argv[1], as_version=4)
try:
    nbclient.NotebookClient(notebook, timeout=180, kernel_name="python3").execute()
finally:
    nbformat.write(notebook, sys.argv[2])
"""
"""In a process of its own: a kernel's libraries warn of each other, and nobody is asked."""


def test_the_notebook_is_stored_with_what_it_printed() -> None:
    """`jupyter execute --inplace examples/campaign.ipynb` writes it, beside `layout-tuner up`."""
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert len([cell for cell in code if cell["outputs"]]) >= 8
    outputs = json.dumps([cell["outputs"] for cell in code])
    assert '"output_type": "error"' not in outputs
    assert not re.search(r"/(home|root|tmp|Users)/", outputs), "a path of the machine it ran on"


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_the_notebook_goes_from_a_submission_to_a_winner(service: Any, tmp_path: Path) -> None:
    executed = tmp_path / "executed.ipynb"
    folders = {
        name: str(tmp_path / name)
        for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR")
    }
    result = subprocess.run(
        [sys.executable, "-c", RUN, str(NOTEBOOK), str(executed)],
        env={**service.environment, **folders, "PYTHONPATH": ":".join(filter(None, sys.path))},
        cwd=NOTEBOOK.parents[1],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:] + service.logs()
    cells = json.loads(executed.read_text())["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    printed = "".join("".join(output.get("text", "")) for output in outputs)
    assert "ok, version" in printed
    assert "COMPLETED (budget)" in printed
    assert "1. n1-tp" in printed
    assert "job.json" in printed
    assert "trials [1, 2, 3, 4, 5, 6" in printed
