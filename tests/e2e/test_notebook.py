"""The notebook of the examples, run as a reader would run it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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
    printed = _printed(executed)
    assert "ok, version" in printed
    assert "COMPLETED (budget)" in printed
    assert "1. n1-tp" in printed
    assert "job.json" in printed
    assert "trials [1, 2, 3, 4, 5, 6" in printed


def _printed(notebook: Path) -> str:
    cells = json.loads(notebook.read_text())["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    return "".join("".join(output.get("text", "")) for output in outputs)
