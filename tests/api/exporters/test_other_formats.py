"""Exports to other trainers than Megatron-LM: the shell runs them, and they start every rank."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from api.exporters import ALIASES, FORMATS, export
from api.exporters.base import ExportBundle, ExportSource
from search_spaces.spec.layout import Layout
from search_spaces.spec.presets.models import model_preset
from search_spaces.trainers.base import TrainerJob
from search_spaces.trainers.placeholders import environment_values

LAYOUTS = {
    "torchtitan-0.2": Layout(num_nodes=2, tp=2, pp=4, sequence_parallel=True, num_microbatches=8),
    "torchtitan-0.3": Layout(num_nodes=2, tp=2, pp=2, dp=2, vpp=2, num_microbatches=4),
    "torchtitan-main": Layout(num_nodes=2, tp=2, pp=2, dp=2, vpp=2, num_microbatches=4),
    "nanotron": Layout(num_nodes=2, tp=2, pp=2, dp=2, zero_stage=1, precision="bf16"),
    "deepspeed": Layout(num_nodes=2, pp=2, dp=4, zero_stage=1, precision="bf16"),
    "axonn": Layout(num_nodes=2, tp=2, tp_columns=2, dp=2, zero_stage=3, precision="bf16"),
    "accelerate": Layout(num_nodes=2, tp=2, pp=2, dp=2, recompute="full", precision="bf16"),
    "command": Layout(num_nodes=2, tp=2, pp=2, dp=2, vpp=2, zero_stage=1, precision="fp16"),
}
"""Eight ranks on two nodes, with knobs that each trainer has."""

USERS = {
    "TOKENIZER_DIR": "/the user's/tokenizer",
    "NANOTRON_DIR": "/the user's/nanotron",
    "TRAIN_SCRIPT": "/the user's/train.py",
}
SAYS = """#!/bin/sh
for word in "$@"; do printf "%s\\n" "$word"; done
env | grep -E "^(LAYOUT_|RANK|WORLD_SIZE|LOCAL_RANK|MASTER_ADDR|ACCELERATE_|PYTHONPATH)" | sort
"""
SRUN = """#!/bin/bash
echo "srun $*"
while [ "$1" != bash ]; do shift; done
for rank in 0 7; do
    SLURM_PROCID=$rank SLURM_LOCALID=$((rank % 4)) SLURM_NODEID=$((rank / 4)) "$@"
done
"""


def source_of(name: str) -> ExportSource:
    job = TrainerJob(model=model_preset("tiny-llama"), layout=LAYOUTS[name], seed=3)
    return ExportSource(
        campaign="wide", trial=7, job=job, comments=("10 % faster than the baseline",)
    )


def bundle_of(name: str) -> ExportBundle:
    return export(name, source_of(name))


def started(
    name: str, folder: Path, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs the launch script of a format with stand-ins, which print arguments and environment."""
    for file in bundle_of(name).files:
        (folder / file.name).write_text(file.content)
    stand_ins = folder / "stand-ins"
    stand_ins.mkdir(exist_ok=True)
    # A reader that stops after the first line would end it with SIGPIPE, and the script with it.
    scontrol = "#!/bin/sh\necho first-node\nfor n in $(seq 5000); do echo node-$n; done\n"
    programs = {"torchrun": SAYS, "python": SAYS, "accelerate": SAYS, "srun": SRUN}
    for program, content in {**programs, "scontrol": scontrol}.items():
        (stand_ins / program).write_text(content)
        (stand_ins / program).chmod(0o755)
    (script,) = folder.glob("*.sh")
    return subprocess.run(
        ["bash", str(script), *arguments],
        env={"PATH": f"{stand_ins}:{os.environ['PATH']}", **USERS, **environment},
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
    )


def words_of(name: str, folder: Path, *arguments: str, **environment: str) -> list[str]:
    done = started(name, folder, *arguments, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def value_after(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_file_parses_and_says_where_it_comes_from(name: str) -> None:
    layout = LAYOUTS[name]
    for file in bundle_of(name).files:
        if not file.name.endswith(".json"):
            assert f"# campaign wide, trial 7: {layout.key}\n" in file.content
            assert "# 10 % faster than the baseline\n" in file.content
        suffix = file.name.partition(".")[2]
        if suffix == "sh":
            checked = subprocess.run(["bash", "-n"], input=file.content, text=True, check=False)
            assert checked.returncode == 0
            assert file.executable
        elif suffix == "py":
            ast.parse(file.content)
        else:
            reader = {"json": json.loads, "yaml": yaml.safe_load, "toml": tomllib.loads}[suffix]
            assert reader(file.content) == FORMATS[name].adapter.values(source_of(name).job)


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "accelerate"])
def test_torchrun_or_srun_starts_the_ranks_of_each_node(name: str, tmp_path: Path) -> None:
    arguments = ("python", "train.py") if name == "command" else ()
    words = words_of(name, tmp_path, *arguments, NODE_RANK="1", MASTER_ADDR="host")
    assert value_after(words, "--nnodes") == "2"
    assert value_after(words, "--nproc-per-node") == "4"
    assert value_after(words, "--node-rank") == "1"
    assert value_after(words, "--master-addr") == "host"
    words = words_of(name, tmp_path, *arguments, LAUNCH="srun", SLURM_JOB_NODELIST="n[1-2]")
    assert words[0].startswith("srun -N 2 -n 8 --ntasks-per-node 4 bash -c")
    assert [word for word in words if word.startswith("RANK=")] == ["RANK=0", "RANK=7"]
    assert [word for word in words if word.startswith("LOCAL_RANK=")][-1] == "LOCAL_RANK=3"
    assert words.count("WORLD_SIZE=8") == words.count("MASTER_ADDR=first-node") == 2


def test_accelerate_is_launched_once_a_node(tmp_path: Path) -> None:
    words = words_of("accelerate", tmp_path, "--epochs", "2", NODE_RANK="1")
    assert words[:3] == ["launch", "--machine_rank", "1"]
    config = Path(value_after(words, "--config_file"))
    assert yaml.safe_load(config.read_text())["num_processes"] == 8
    script = words.index("/the user's/train.py")
    assert words[script + 1 : script + 3] == ["--epochs", "2"]
    words = words_of("accelerate", tmp_path, LAUNCH="srun", SLURM_JOB_NODELIST="n[1-2]")
    assert words[0].startswith("srun -N 2 -n 2 --ntasks-per-node 1 bash -c")
    assert value_after(words, "--machine_rank") == "0"
    assert value_after(words[::-1], "1") == "--machine_rank"
    assert value_after(words, "--main_process_ip") == "first-node"


def test_the_script_names_the_file_beside_it(tmp_path: Path) -> None:
    for name, flag, file in (
        ("torchtitan-0.2", "--job.config_file", "torchtitan.toml"),
        ("nanotron", "--config-file", "nanotron.yaml"),
        ("deepspeed", "--deepspeed_config", "ds_config.json"),
        ("axonn", "/the user's/train.py", "axonn.json"),
    ):
        folder = tmp_path / f"{name}'s job"
        folder.mkdir()
        assert value_after(words_of(name, folder), flag) == str(folder / file)


@pytest.mark.parametrize("name", ["torchtitan-0.2", "torchtitan-0.3", "torchtitan-main"])
def test_torchtitan_can_import_the_files_beside_the_script(name: str, tmp_path: Path) -> None:
    words = words_of(name, tmp_path, PYTHONPATH="/other")
    assert f"PYTHONPATH={tmp_path}:/other" in words
    assert value_after(words, "-m") == "torchtitan.train"
    assert "/the user's/tokenizer" in words
    if name != "torchtitan-0.2":
        assert value_after(words, "--module") == "torchtitan_layout"
        assert (tmp_path / "torchtitan_layout.py").exists()


@pytest.mark.parametrize("name", ["deepspeed", "accelerate", "command"])
def test_a_users_own_script_gets_every_number_in_its_environment(name: str, tmp_path: Path) -> None:
    arguments = ("train",) if name == "command" else ()
    words = words_of(name, tmp_path, *arguments)
    found = dict(word.split("=", 1) for word in words if word.startswith("LAYOUT_"))
    assert found == environment_values(source_of(name).job)


def test_a_command_is_filled_with_the_layout_and_refused_with_an_unknown_placeholder(
    tmp_path: Path,
) -> None:
    template = ("./train", "--tp={tp}", "{pp}x{dp} {model}", '{"zero": {zero_stage}}', "", "a  b*")
    words = words_of("command", tmp_path, *template)
    filled = ["--no-python", "./train", "--tp=2", "2x2 tiny-llama", '{"zero": 1}', "", "a  b*"]
    start = words.index("--no-python")
    assert words[start : start + len(filled)] == filled
    once = words_of("command", tmp_path, "torchrun", "--nproc={num_devices}", LAUNCH="once")
    assert once[0] == "--nproc=8"

    unknown = started("command", tmp_path, "./train", "--tp={tpp}")
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert "{tpp} is no placeholder" in unknown.stderr
    empty = started("command", tmp_path)
    assert (empty.returncode, empty.stdout) == (2, "")
    assert "say which program to start" in empty.stderr


@pytest.mark.parametrize("name", LAYOUTS)
def test_another_launcher_and_what_is_not_set_are_refused_in_words(
    name: str, tmp_path: Path
) -> None:
    done = started(name, tmp_path, "train", LAUNCH="mpirun")
    assert done.returncode == 2
    assert "LAUNCH=mpirun is not" in done.stderr
    assert "srun" in done.stderr
    if name == "deepspeed":
        unset = started(name, tmp_path, TRAIN_SCRIPT="")
        assert "set it to your training script" in unset.stderr


def test_torchtitan_alone_is_its_newest_release() -> None:
    assert ALIASES["torchtitan"] == "torchtitan-0.3"
    source = source_of("torchtitan-0.3")
    assert export("torchtitan", source) == export("torchtitan-0.3", source)
