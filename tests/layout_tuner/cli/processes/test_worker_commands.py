"""The commands as a user types them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import layout_tuner.cli.main  # noqa: F401 (has click read numbers as the documents' readers do)
from layout_tuner.cli.processes.worker import probe, train, worker
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_presets import model_preset
from layout_tuner.workers.trainer.job.job import TrainJob
from tests.kit.api import ends
from tests.kit.python_process import ROOT, printed_by, run_python
from tests.kit.waiting import wait_until
from tests.workers.process_checks import make_decoys, marked

pytestmark = pytest.mark.ranks


def run(command: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own, as the entry point starts it."""
    program = f"from layout_tuner.cli.processes.worker import {command}; {command}()"
    return run_python(program, *arguments, **options)


def test_probe_prints_json_and_imports_nothing_from_here(tmp_path: Path) -> None:
    ended = run(
        "probe",
        *("--model", "tiny", "--tp", "2", "--pp", "2", "--dp", "1"),
        *("--micro-batch-size", "2", "--num-microbatches", "4"),
        *("--steps", "3", "--seed", "0", "--precision", "fp32", "--json"),
        options=["-P"],  # an entry point's script does not look here either
        cwd=make_decoys(tmp_path),
    )
    assert ended.returncode == 0, ended.stderr
    (line,) = ended.stdout.splitlines()
    printed = json.loads(line)
    assert printed["status"] == "completed"
    # It warms up until it settles.
    assert len(printed["losses"]) == len(printed["grad_norms"]) >= 2 + 3
    assert len(printed["step_times_s"]) == 3
    layout = Layout(tp=2, pp=2, micro_batch_size=2, num_microbatches=4)
    assert printed["layout"] == layout.to_mapping()
    assert min(printed[name] for name in ("tokens_per_s", "peak_memory_bytes", "mfu")) > 0
    assert isinstance(printed["oversubscribed"], bool)
    assert printed["environment"]["backend"] == "gloo"


def test_a_failed_probe_exits_1_and_says_why() -> None:
    limited = ("--num-microbatches", "1", "--memory-limit-gb", "0.002", "--json")
    ended = run("probe", "--model", "tiny", *limited)
    assert ended.returncode == 1
    printed = json.loads(ended.stdout)
    assert (printed["status"], printed["reason"]) == ("out_of_memory", "out_of_memory")
    assert "over the limit of 2.048 MiB" in printed["message"]
    assert "Traceback" in printed["log_tail"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--model", "tiny", "--tp", "3"], "num_heads=4 is not divisible by tp=3"),
        (["--model", "tiny", "--pp", "0"], "pp=0 is not a whole number of at least 1"),
        (["--model", "tiny", "--steps", "0"], "0 is not a whole number of at least 1"),
        (["--model", "tinny"], "did you mean 'tiny'?"),
        (["--model", "nowhere.yaml"], "nowhere.yaml: cannot be read: "),
        (["--model", "tiny", "--memory-limit-gb", "nan"], "'nan' is not a valid float"),
        (["--model", "tiny", "--memory-limit-gb", "inf"], "'inf' is not a valid float"),
        (["--model", "tiny", "--memory-limit-gb", "0"], "is not in the range"),
        (["--model", "tiny", "--deadline", "nan"], "'nan' is not a valid float"),
        (["--model", "tiny", "--deadline", "1e11"], "is not in the range"),
    ],
)
def test_an_impossible_probe_exits_2_with_a_sentence(arguments: list[str], sentence: str) -> None:
    ended = CliRunner().invoke(probe, [*arguments, "--num-microbatches", "1"])
    assert ends(ended, 2, sentence).stdout == ""


def make_job(tmp_path: Path, **changes: Any) -> Path:
    job = TrainJob(model=model_preset("tiny"), layout=Layout(dp=2), steps=4, warmup=1)
    path = tmp_path / "job.json"
    path.write_text(json.dumps({**job.to_mapping(), **changes}))
    return path


@dataclass(frozen=True, kw_only=True)
class TwoRuns:
    """A training job of three steps, and the same resumed for a fourth."""

    folder: Path
    results: list[dict[str, Any]]
    events: list[dict[str, Any]]
    stderr: str
    """Of the second run."""


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> TwoRuns:
    folder = tmp_path_factory.mktemp("resumed")
    saved = {"directory": "saved", "every": 3}
    config = str(make_job(folder, layout=Layout().to_mapping(), checkpoint=saved))
    log, results = folder / "log.jsonl", []
    for steps in ("3", "4"):
        ended = run("train", "--config", config, "--steps", steps, "--log", str(log), "--json")
        assert ended.returncode == 0, ended.stderr
        results.append(json.loads(ended.stdout))
    events = [json.loads(line) for line in log.read_text().splitlines()]
    return TwoRuns(folder=folder, results=results, events=events, stderr=ended.stderr)


@pytest.mark.slow
def test_train_logs_what_happens_over_its_runs(resumed: TwoRuns) -> None:
    assert [event["event"] for event in resumed.events] == [
        *("step", "step", "step", "checkpoint", "result"),
        *("resume", "step", "checkpoint", "result"),
    ]


@pytest.mark.slow
def test_train_logs_the_figures_of_each_step_once(resumed: TwoRuns) -> None:
    steps = [event for event in resumed.events if event["event"] == "step"]
    assert [event["index"] for event in steps] == [0, 1, 2, 3]
    assert all({"loss", "tokens_per_s", "mfu"} < event.keys() for event in steps)


@pytest.mark.slow
def test_train_prints_the_result_of_its_own_steps(resumed: TwoRuns) -> None:
    first, second = resumed.results
    assert [(each["first_step"], each["steps"]) for each in (first, second)] == [(0, 3), (3, 1)]
    assert first["tokens_per_s"] > 0


@pytest.mark.slow
def test_train_tells_its_progress_beside_its_result(resumed: TwoRuns) -> None:
    assert "resuming from" in resumed.stderr
    assert "step    3  loss" in resumed.stderr


@pytest.mark.slow
def test_train_saves_below_the_folder_of_the_job_file(resumed: TwoRuns) -> None:
    assert (resumed.folder / "saved/step-00000004").is_dir()


def test_a_log_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    arguments = ["--config", str(make_job(tmp_path)), "--log", str(tmp_path)]
    ends(CliRunner().invoke(train, arguments), 2, "can't be written")


def test_ranks_that_share_devices_are_told_before_and_after(tmp_path: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    path = tmp_path / "cluster.yaml"
    path.write_text(f"{{preset: local-cpu, name: here, devices_per_node: {cores}}}")
    layout = Layout(dp=2 * cores).to_mapping()
    config = str(make_job(tmp_path, layout=layout))
    ended = run("train", "--config", config, "--cluster", str(path), "--steps=2", "--warmup=1")
    assert ended.returncode == 0, ended.stderr
    assert f"warning: {2 * cores} ranks share {cores} devices" in ended.stderr
    told = r"tokens/s: [\d,]+ \(median of 1 steps; ranks shared devices\)"
    assert re.fullmatch(told, ended.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"colour": "green"}, "unknown job field 'colour'"),
        ({"layout": Layout(pp=3).to_mapping()}, "num_layers=4 is not divisible by pp*vpp=3*1=3"),
    ],
)
def test_a_malformed_job_exits_2(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    config = str(make_job(tmp_path, **changes))
    alone = CliRunner(env={"RANK": None, "WORLD_SIZE": None})
    ends(alone.invoke(train, ["--config", config]), 2, sentence)


def test_a_worker_that_cannot_start_says_why(tmp_path: Path) -> None:
    token = tmp_path / "token"
    command = ["--url", "http://127.0.0.1:9", "--token-file", str(token)]
    ended = ends(CliRunner().invoke(worker, command), 1)
    why = f"the token file {token} cannot be read (No such file or directory): name another with"
    assert ended.stderr == f"Error: {why} --token-file or $LAYOUT_TUNER_TOKEN_FILE\n"
    token.write_text("secret")
    ended = CliRunner(env={"SLURM_JOB_ID": None}).invoke(worker, [*command, "--launcher", "srun"])
    ends(ended, 1, "Error: launcher=srun works inside a Slurm job")


def test_help_imports_neither_torch_nor_ray() -> None:
    printed_by(
        "import sys, layout_tuner.cli.processes.worker\n"
        "assert not {'torch', 'ray', 'httpx', 'numpy', 'yaml'} & set(sys.modules)"
    )


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("cli.processes.up", {"fastapi", "httpx", "numpy", "pydantic", "sqlalchemy", "tenacity"}),
        ("tuner.driver.process", {"deephyper", "optuna", "pandas", "scipy", "sklearn"}),
    ],
)
def test_a_process_that_idles_has_not_imported_what_it_needs_seldom(
    module: str, absent: set[str]
) -> None:
    printed_by(f"import sys, layout_tuner.{module}\nassert not {absent} & sys.modules.keys()")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_probe_that_is_interrupted_leaves_no_process(mark: str, number: signal.Signals) -> None:
    arguments = ["--model", "tiny", "--steps", "100000", "--num-microbatches", "1"]
    with subprocess.Popen(
        [sys.executable, "-m", "layout_tuner", "probe", *arguments],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    ) as interrupted:
        # The command, its warden, the zygote, the keeper of the group and a rank.
        wait_until("a rank runs", lambda: len(marked(mark)) == 5, 60)
        interrupted.send_signal(number)
        said = interrupted.communicate(timeout=10)[1]
        assert interrupted.returncode != 0
    if number == signal.SIGINT:
        assert interrupted.returncode == 130
        assert "the probe was interrupted: its ranks have ended, nothing was measured" in said
        assert "Aborted" not in said


def test_a_probe_needs_its_batch_and_takes_a_model_from_a_file(tmp_path: Path) -> None:
    ended = CliRunner().invoke(probe, ["--model", "tiny"])
    ends(ended, 2, "Error: the batch is missing: give num_microbatches or")
    (tmp_path / "model.yaml").write_text("preset: tiny\nnum_heads: 5\n")
    ended = CliRunner().invoke(probe, ["--model", str(tmp_path / "model.yaml")])
    ends(ended, 2, "hidden_size=128 is not divisible by num_heads=5")
