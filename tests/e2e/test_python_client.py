"""The examples of the Python client, run as a reader would run them: docstrings and the guide."""

from __future__ import annotations

import inspect
import re
import shutil
from pathlib import Path

import pytest

import layout_tuner
from layout_tuner import Client
from tests.e2e.conftest import Service
from tests.kit.markdown import ROOT
from tests.kit.python_process import run_python

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.timeout(300)]


def examples(text: str) -> list[str]:
    """The blocks of Python in a text."""
    return re.findall(r"```python\n(.*?)```", inspect.cleandoc(text), flags=re.DOTALL)


def test_the_examples_of_docstrings_and_of_the_guide_run(service: Service, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "here" / "examples")
    campaign = tmp_path / "here" / "examples" / "tiny.yaml"
    campaign.write_text(campaign.read_text().replace("trials: 16", "trials: 2"))
    guide = (ROOT / "docs/guides/notebook.md").read_text()
    in_docstrings = [examples(str(each.__doc__)) for each in (layout_tuner, Client)]
    blocks = [*in_docstrings[0], *in_docstrings[1], *examples(guide)]
    assert [len(each) for each in in_docstrings] == [2, 1]
    assert len(blocks) == 7

    ended = run_python(
        "\n".join(blocks),
        cwd=tmp_path / "here",
        timeout_s=200,
        LAYOUT_TUNER_DATA_DIR=str(service.data_dir),
    )
    assert ended.returncode == 0, ended.stderr + service.logs()
    assert re.search(r"^1 n1-tp\S+ \d", ended.stdout, flags=re.MULTILINE), ended.stdout
    assert "COMPLETED" in ended.stdout
    assert "rank  trial  tokens_per_s" in ended.stdout
