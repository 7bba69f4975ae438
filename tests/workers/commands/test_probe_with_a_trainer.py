"""`layout-tuner probe` and `worker` with a file of trainers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from workers.commands.commands import probe, worker

FILE = """
trainers:
  - name: mine
    version: "2"
    command: ["{python}", "{trainers_directory}/train.py", "{steps}", "{rate}"]
    parameters:
      rate: {type: float, minimum: 0, maximum: 1}
"""
OTHER = """
  - {name: other, version: "1", command: ["true"]}
"""
PROGRAM = """
import sys, time
from layout_tuner import report_step
for _ in range(int(sys.argv[1])):
    time.sleep(0.01)
    report_step(step_time_s=0.01, loss=float(sys.argv[2]))
"""


@pytest.fixture
def trainers(tmp_path: Path) -> Path:
    path = tmp_path / "trainers.yaml"
    path.write_text(FILE)
    (tmp_path / "train.py").write_text(PROGRAM)
    return path


def run(*arguments: str) -> Result:
    layout = ("--model", "tiny", "--num-microbatches", "1", "--steps", "3", "--json")
    return CliRunner().invoke(probe, [*layout, *arguments])


@pytest.mark.ranks
def test_a_probe_runs_the_only_trainer_of_a_file(trainers: Path) -> None:
    ended = run("--trainers", str(trainers), "--parameter", "rate=0.5")
    assert ended.exit_code == 0, ended.output
    printed = json.loads(ended.stdout)
    assert printed["trainer"] == "mine"
    assert printed["trainer_version"] == "2"
    assert printed["tokens"] == "assumed"
    assert printed["losses"][0] == 0.5


@pytest.mark.parametrize(
    ("more", "arguments", "why"),
    [
        (OTHER, (), "--trainers has 2 trainers; name one with --trainer: embedded, mine, other"),
        ("", ("--trainer", "min"), "--trainer=min is not one of embedded, mine"),
        ("", ("--parameter", "rate"), "--parameter=rate is not NAME=VALUE"),
        ("", ("--parameter", "=1"), "--parameter==1 is not NAME=VALUE"),
        ("    speed: 3", (), "trainers.mine: unknown field of a trainer 'speed'"),
        ("  - 5", (), "trainers.1: "),
        (": : :", (), "trainers.yaml"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(
    trainers: Path, more: str, arguments: tuple[str, ...], why: str
) -> None:
    trainers.write_text(FILE.rstrip() + "\n" + more.strip("\n") + "\n")
    ended = run("--trainers", str(trainers), *arguments)
    assert ended.exit_code == 2
    assert why in ended.stderr
    assert "Traceback" not in ended.output


def test_a_trainer_without_a_file_is_not_known() -> None:
    ended = run("--trainer", "mine")
    assert ended.exit_code == 2
    assert "--trainers FILE describes others" in ended.stderr


@pytest.mark.parametrize("name", ["missing.yaml", "trainers.txt"])
def test_a_worker_does_not_start_without_its_file(tmp_path: Path, name: str) -> None:
    (tmp_path / "trainers.txt").write_text(FILE)
    (tmp_path / "token").write_text("x" * 43)
    ended = CliRunner().invoke(
        worker,
        [
            *("--url", "http://127.0.0.1:9", "--token-file", str(tmp_path / "token")),
            *("--cluster", "local-cpu", "--trainers", str(tmp_path / name)),
        ],
    )
    assert ended.exit_code == 2
    assert name in ended.stderr
