"""The commands as a user types them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from search_spaces.spec.layout import Layout
from search_spaces.spec.presets.models import model_preset
from tests.kit.waiting import wait_until
from tests.workers.process_checks import MARK, make_decoys, marked
from workers.commands.commands import probe, train, worker
from workers.trainer.job.job import TrainJob

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[3]


def run(command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own, as the entry point starts it."""
    program = f"from workers.commands.commands import {command}; {command}()"
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_probe_prints_one_json_object_with_every_iteration() -> None:
    ended = run(
        "probe",
        *("--model", "tiny", "--tp", "2", "--pp", "2", "--dp", "1"),
        *("--micro-batch-size", "2", "--num-microbatches", "4"),
        *("--steps", "3", "--seed", "0", "--precision", "fp32", "--json"),
    )
    assert ended.returncode == 0, ended.stderr
    (line,) = ended.stdout.splitlines()
    printed = json.loads(line)
    assert printed["status"] == "completed"
    assert len(printed["losses"]) == len(printed["grad_norms"]) >= 2 + 3, (
        "it warms up until it settles"
    )
    assert len(printed["step_times_s"]) == 3
    assert (
        printed["layout"] == Layout(tp=2, pp=2, micro_batch_size=2, num_microbatches=4).to_mapping()
    )
    for name in ("tokens_per_s", "peak_memory_bytes", "mfu"):
        assert printed[name] > 0
    assert isinstance(printed["oversubscribed"], bool)
    assert printed["environment"]["backend"] == "gloo"


def test_every_knob_of_the_command_reaches_the_probe() -> None:
    ended = run(
        "probe",
        *("--model", "tiny-llama", "--dp", "2", "--micro-batch-size", "2", "--zero-stage", "1"),
        *("--global-batch-size", "4"),
        *("--recompute", "full", "--precision", "bf16", "--warmup", "3", "--steps", "2", "--json"),
    )
    assert ended.returncode == 0, ended.stderr
    printed = json.loads(ended.stdout)
    expected = Layout(
        dp=2, micro_batch_size=2, zero_stage=1, recompute="full", precision="bf16"
    ).to_mapping()
    assert printed["layout"] == expected
    assert len(printed["step_times_s"]) == 2
    assert len(printed["losses"]) >= 3 + 2, "three to warm up at least"
    assert printed["hardware_tflops_per_device"] > printed["model_tflops_per_device"]


def test_packages_of_our_names_in_the_current_directory_are_left_alone(tmp_path: Path) -> None:
    program = "from workers.commands.commands import probe; probe()"
    ended = subprocess.run(  # -P: an entry point's script does not look there either
        [
            sys.executable,
            "-P",
            "-c",
            program,
            *("--model", "tiny", "--steps", "1", "--num-microbatches", "1"),
        ],
        cwd=make_decoys(tmp_path),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr


def test_a_failed_probe_exits_1_and_says_why() -> None:
    ended = run(
        "probe",
        "--model",
        "tiny",
        "--num-microbatches",
        "1",
        "--memory-limit-gb",
        "0.002",
        "--json",
    )
    assert ended.returncode == 1
    printed = json.loads(ended.stdout)
    assert printed["status"] == "out_of_memory"
    assert printed["reason"] == "out_of_memory"
    assert "over the limit of 2147483 bytes" in printed["message"]
    assert "Traceback" in printed["log_tail"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--model", "tiny", "--tp", "3"], "num_heads=4 is not divisible by tp=3"),
        (["--model", "tiny", "--pp", "0"], "pp=0 is not a whole number of at least 1"),
        (["--model", "tiny", "--steps", "0"], "0 is not a whole number of at least 1"),
        (["--model", "tinny"], "did you mean 'tiny'?"),
        (["--model", "nowhere.yaml"], "nowhere.yaml is not a readable JSON or YAML file"),
        (["--model", "tiny", "--memory-limit-gb", "nan"], "'nan' is not a valid float"),
        (["--model", "tiny", "--memory-limit-gb", "inf"], "'inf' is not a valid float"),
        (["--model", "tiny", "--memory-limit-gb", "0"], "is not in the range"),
        (["--model", "tiny", "--deadline", "nan"], "'nan' is not a valid float"),
        (["--model", "tiny", "--deadline", "1e11"], "is not in the range"),
    ],
)
def test_an_impossible_probe_exits_2_with_a_sentence(arguments: list[str], sentence: str) -> None:
    ended = CliRunner().invoke(probe, [*arguments, "--num-microbatches", "1"])
    assert ended.exit_code == 2
    assert sentence in ended.stderr
    assert ended.stdout == ""


def test_a_model_may_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "model.yaml"
    path.write_text("preset: tiny\nnum_heads: 5\n")
    ended = CliRunner().invoke(probe, ["--model", str(path)])
    assert ended.exit_code == 2
    assert "hidden_size=128 is not divisible by num_heads=5" in ended.stderr


def make_job(tmp_path: Path, **changes: Any) -> Path:
    job = TrainJob(model=model_preset("tiny"), layout=Layout(dp=2), steps=4, warmup=1)
    path = tmp_path / "job.json"
    path.write_text(json.dumps({**job.to_mapping(), **changes}))
    return path


@pytest.mark.slow
def test_train_prints_a_line_a_step_and_the_tokens_per_s(tmp_path: Path) -> None:
    ended = run("train", "--config", str(make_job(tmp_path)), "--steps", "3")
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert [line.split("  loss")[0] for line in lines[:-1]] == [
        "step    0",
        "step    1",
        "step    2",
    ]
    assert lines[-1].startswith("tokens/s: ")
    assert lines[-1].endswith("(median of 2 steps)")


def test_train_prints_one_json_object_with_the_progress_aside(tmp_path: Path) -> None:
    ended = run("train", "--config", str(make_job(tmp_path)), "--steps", "3", "--json")
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout)
    assert result["steps"] == 3
    assert result["tokens_per_s"] > 0
    assert [line.split("  loss")[0] for line in ended.stderr.splitlines()][-1] == "step    2"


@pytest.mark.slow
def test_train_appends_what_happens_to_a_log_as_lines_of_json(tmp_path: Path) -> None:
    config = str(make_job(tmp_path, checkpoint={"directory": "saved", "every": 3}))
    log = tmp_path / "log.jsonl"
    for steps in ("3", "4"):
        ended = run("train", "--config", config, "--steps", steps, "--log", str(log), "--json")
        assert ended.returncode == 0, ended.stderr
    events = [json.loads(line) for line in log.read_text().splitlines()]
    assert [event["event"] for event in events] == [
        *("step", "step", "step", "checkpoint", "result"),
        *("resume", "step", "checkpoint", "result"),
    ]
    steps_told = [event for event in events if event["event"] == "step"]
    assert [event["index"] for event in steps_told] == [0, 1, 2, 3]
    assert all({"loss", "tokens_per_s", "mfu"} < event.keys() for event in steps_told)
    assert json.loads(ended.stdout)["first_step"] == 3
    assert "resuming from" in ended.stderr
    assert (tmp_path / "saved/step-00000004").is_dir(), "paths are of the job file's folder"


def test_a_log_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    arguments = ["--config", str(make_job(tmp_path)), "--log", str(tmp_path)]
    ended = CliRunner().invoke(train, arguments)
    assert ended.exit_code == 2
    assert "can't be written" in ended.stderr


@pytest.mark.slow
def test_a_job_of_few_steps_can_be_had(tmp_path: Path) -> None:
    ended = run("train", "--config", str(make_job(tmp_path)), "--steps=1", "--warmup=0", "--json")
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["steps"] == 1


def test_ranks_that_share_devices_are_told_before_and_after(tmp_path: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    path = tmp_path / "cluster.yaml"
    path.write_text(f"{{preset: local-cpu, name: here, devices_per_node: {cores}}}")
    layout = Layout(dp=2 * cores).to_mapping()
    config = str(make_job(tmp_path, layout=layout))
    ended = run("train", "--config", config, "--cluster", str(path), "--steps=2", "--warmup=1")
    assert ended.returncode == 0, ended.stderr
    assert f"warning: {2 * cores} ranks share {cores} devices" in ended.stderr
    assert ended.stdout.splitlines()[-1].endswith("(median of 1 steps; ranks shared devices)")


def test_train_under_torchrun_prints_json_alone_where_asked_to(tmp_path: Path) -> None:
    program = "from workers.commands.commands import train; train()"
    config = str(make_job(tmp_path, layout=Layout().to_mapping()))
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    flags = ["--config", config, "--steps", "2", "--warmup", "1", "--json"]
    ended = subprocess.run(
        [sys.executable, "-c", program, *flags],
        cwd=ROOT,
        env={**os.environ, **alone},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout)
    assert (result["steps"], result["warmup"]) == (2, 1)
    assert "step    1  loss" in ended.stderr


def test_train_is_a_rank_under_torchrun(tmp_path: Path) -> None:
    program = "from workers.commands.commands import train; train()"
    config = str(make_job(tmp_path, layout=Layout().to_mapping()))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python"]
    ended = subprocess.run(
        [*torchrun, sys.executable, "-c", program, "--config", config],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout.splitlines()[-1])["steps"] == 4


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"version": 2}, "version=2 is not 'layout-tuner/trainer' version 1"),
        ({"colour": "green"}, "unknown job field 'colour'"),
        ({"steps": 0}, "steps=0 is not a whole number of at least 1"),
        ({"layout": Layout(tp=3).to_mapping()}, "num_heads=4 is not divisible by tp=3"),
        ({"layout": Layout(pp=3).to_mapping()}, "num_layers=4 is not divisible by pp*vpp=3*1=3"),
        ({"seed": -1}, "seed=-1 is not a whole number of at least 0"),
    ],
)
def test_a_malformed_job_exits_2_with_a_sentence(
    tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    config = make_job(tmp_path, **changes)
    ended = CliRunner(env={"RANK": None, "WORLD_SIZE": None}).invoke(
        train, ["--config", str(config)]
    )
    assert ended.exit_code == 2
    assert sentence in ended.stderr


def test_a_worker_without_its_token_file_says_so(tmp_path: Path) -> None:
    missing = str(tmp_path / "token")
    ended = CliRunner().invoke(worker, ["--url", "http://127.0.0.1:9", "--token-file", missing])
    assert ended.exit_code == 1
    sentence = f"the token file {missing} cannot be read (No such file or directory): name another with --token-file"
    assert ended.stderr == f"error: {sentence}\n"


def test_a_worker_that_shall_start_steps_outside_of_slurm_says_so(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    command = ["--url", "http://127.0.0.1:9", "--token-file", str(tmp_path / "token")]
    ended = CliRunner(env={"SLURM_JOB_ID": None}).invoke(worker, [*command, "--launcher", "srun"])
    assert ended.exit_code == 1
    assert ended.stderr.startswith("error: launcher=srun works inside a Slurm job")


def test_help_imports_neither_torch_nor_ray() -> None:
    program = (
        "import sys, workers.commands.commands; "
        "sys.exit(bool({'torch', 'ray', 'httpx', 'numpy', 'yaml'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


@pytest.mark.sampled(3)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_probe_that_is_interrupted_leaves_no_process(number: signal.Signals) -> None:
    mark = uuid.uuid4().hex
    arguments = ["--model", "tiny", "--steps", "100000", "--num-microbatches", "1"]
    with subprocess.Popen(
        [sys.executable, "-m", "api.cli", "probe", *arguments],
        cwd=ROOT,
        env={**os.environ, MARK: mark},
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
    wait_until("nothing is left", lambda: not marked(mark), 5)


def test_a_probe_needs_its_batch() -> None:
    ended = CliRunner().invoke(probe, ["--model", "tiny"])
    assert ended.exit_code == 2
    assert ended.stderr.startswith("error: the batch is missing: give --num-microbatches or")
