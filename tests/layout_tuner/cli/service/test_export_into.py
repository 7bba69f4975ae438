"""`export --into` writes a layout into a copy of the user's own file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from layout_tuner.cli.main import main
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.trainers.found_jobs.completed_job import completed
from layout_tuner.trainers.found_jobs.job_file import JobFile
from layout_tuner.trainers.found_jobs.read_job import read_job
from tests.kit.api import ends

Run = Callable[..., Result]
OWN = Layout(
    num_nodes=2,
    tp=4,
    dp=4,
    micro_batch_size=2,
    num_microbatches=8,
    zero_stage=1,
    sequence_parallel=True,
    precision="bf16",
)
SCRIPT = """\
#!/bin/bash
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8
ARGS=(
    --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 11008
    --seq-length 4096 --max-position-embeddings 4096 --swiglu --normalization RMSNorm
    --disable-bias-linear --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0
    --untie-embeddings-and-output-weights --tokenizer-type NullTokenizer --vocab-size 32000
    --make-vocab-size-divisible-by 1
    --tensor-model-parallel-size 4
    --sequence-parallel
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --micro-batch-size 2 --global-batch-size 64 --bf16 # as always
)
torchrun --nnodes 2 --nproc_per_node 8 pretrain_gpt.py "${ARGS[@]}" --save /checkpoints
"""
MODEL = {
    "family": "llama",
    "name": "ours",
    "num_layers": 32,
    "hidden_size": 4096,
    "ffn_hidden_size": 11008,
    "num_heads": 32,
    "seq_length": 4096,
    "vocab_size": 32000,
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command where there is no service."""
    monkeypatch.setenv("LAYOUT_TUNER_DATA_DIR", str(tmp_path / "none"))
    for name in ("LAYOUT_TUNER_URL", "LAYOUT_TUNER_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    return lambda *words: CliRunner().invoke(main, [str(word) for word in words])


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (path := tmp_path / "job.sh").write_text(SCRIPT)
    path.chmod(0o750)
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (path := tmp_path / "model.json").write_text(json.dumps(MODEL))
    return path


def test_an_own_layout_is_no_difference_byte_for_byte(run: Run, script: Path, model: Path) -> None:
    of_layout = ("--model", model, "--cluster", "h100-sxm", "--layout", OWN.key)
    script.write_bytes(b"\xef\xbb\xbf" + SCRIPT.replace("\n", "\r\n").encode())

    done = ends(run("export", *of_layout, "--into", script), 0, "has this layout already")

    assert "+++" not in done.stdout
    assert script.with_name("job-tuned.sh").read_bytes() == script.read_bytes()


WANTED = Layout(
    num_nodes=2,
    tp=2,
    dp=8,
    num_microbatches=8,
    zero_stage=1,
    recompute="full",
    precision="bf16",
)


@pytest.fixture
def diff(run: Run, script: Path, model: Path) -> list[str]:
    """What the export of another layout than the script's prints, line by line."""
    of_layout = ("--model", model, "--cluster", "h100-sxm", "--layout", WANTED.key)
    done = ends(run("export", *of_layout, "--into", script), 0, "predicted, not measured")
    return list(done.stdout.splitlines())


@pytest.mark.usefixtures("diff")
def test_an_export_into_a_file_leaves_the_file_as_it_was(script: Path) -> None:
    assert script.read_text() == SCRIPT


@pytest.mark.usefixtures("diff")
def test_another_layout_is_written_into_a_copy(script: Path) -> None:
    copy = script.with_name("job-tuned.sh")
    assert copy.stat().st_mode & 0o777 == 0o750
    assert completed(read_job(JobFile.open(copy))).layout == WANTED
    assert "# as always" in copy.read_text()


def test_another_layout_is_printed_as_a_diff(diff: list[str]) -> None:
    assert diff[:2] == ["--- job.sh", "+++ job-tuned.sh"]
    assert {
        "-    --tensor-model-parallel-size 4",
        "+    --tensor-model-parallel-size 2",
        "-    --sequence-parallel",
        "+    --recompute-method uniform",
    } <= set(diff)


def test_a_diff_of_a_script_says_nothing_of_other_trainers(diff: list[str]) -> None:
    assert not [line for line in diff if "LAYOUT_*" in line or "is for command" in line]


def test_the_best_layout_of_a_plan_goes_into_the_script(
    run: Run, script: Path, tmp_path: Path
) -> None:
    campaign = {
        "name": "c",
        "model": MODEL,
        "cluster": {"preset": "h100-sxm", "num_nodes": 2},
        "space": {"global_batch_size": 64, "num_nodes": 2, "precision": "bf16"},
        "budget": {"trials": 4},
        "probe": {"trainer": "megatron-lm"},
    }
    (file := tmp_path / "c.yaml").write_text(yaml.safe_dump(campaign))
    planned = json.loads(run("plan", file, "--json", "--top", 1).stdout)
    best = Layout.from_mapping(planned["layouts"][0]["layout"])

    ends(run("export", "--plan", file, "--into", script, "--out", tmp_path / "out"), 0)

    copy = JobFile.open(tmp_path / "out" / "job.sh")
    assert completed(read_job(copy)).layout == best


def test_the_original_is_overwritten_by_force_alone(run: Run, script: Path, model: Path) -> None:
    words = ("export", "--model", model, "--cluster", "h100-sxm", "--layout", OWN.key)
    words = (*words, "--into", script, "--out", script.parent)

    ends(run(*words), 1, "exists")
    assert script.read_text() == SCRIPT
    ends(run(*words, "--force"), 0)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--into", "job.sh", "--format", "embedded"), "leave --format"),
        (("--into", "job.sh", "--json"), "leave --format"),
        (("--set", "tp=4", "--format", "embedded"), "are for --into"),
        (("--into", "job.sh", "--set", "tq=4"), "tq"),
        (("--into", "job.sh", "--job", "7"), "7"),
    ],
)
def test_what_contradicts_is_refused(
    run: Run,
    script: Path,
    model: Path,
    words: tuple[str, ...],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(script.parent)
    of_layout = ("--model", model, "--cluster", "h100-sxm", "--layout", OWN.key)

    done = run("export", *of_layout, *words)

    assert done.exit_code == 2
    assert says in done.stderr
    assert not script.with_name("job-tuned.sh").exists()
