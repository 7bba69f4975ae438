"""The launch scripts of the Megatron family pass exactly the adapters' arguments to the ranks."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml

from api.exporters import export
from api.exporters.base import ExportSource
from search_spaces.spec.layout import Layout
from search_spaces.spec.presets.models import model_preset
from search_spaces.trainers.base import TrainerJob
from search_spaces.trainers.registry import ADAPTERS

PLACED = {"num_nodes": 2, "tp": 4, "pp": 2, "dp": 2, "num_microbatches": 8}
LAYOUT = Layout(**PLACED, zero_stage=1, recompute="full", precision="bf16")
PROGRAMS = {
    "megatron-lm": ("MEGATRON_DIR", "pretrain_gpt.py"),
    "megatron-deepspeed": ("MEGATRON_DEEPSPEED_DIR", "pretrain_gpt.py"),
    "megatron-bridge": ("BRIDGE_DIR", "scripts/training/run_recipe.py"),
}


def launched(folder: Path, name: str, source: ExportSource, **environment: str) -> list[str]:
    """Writes the files, and runs the script with a torchrun that prints its arguments."""
    for file in export(name, source).files:
        (folder / file.name).write_text(file.content)
    torchrun = folder / "torchrun"
    torchrun.write_text('#!/bin/sh\nfor word in "$@"; do printf "%s\\n" "$word"; done\n')
    torchrun.chmod(0o755)
    done = subprocess.run(
        ["bash", str(folder / f"{name}.sh"), "--further", "two words"],
        env={"PATH": f"{folder}:{os.environ['PATH']}", **environment},
        cwd="/",
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout.splitlines()


def make_source(model: str = "llama-8b") -> ExportSource:
    job = TrainerJob(model=model_preset(model), layout=LAYOUT)
    return ExportSource(campaign="wide", trial=7, job=job)


@pytest.mark.parametrize("model", ["gpt-22b", "llama-8b"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_ranks_get_the_arguments_of_the_adapter(name: str, model: str, tmp_path: Path) -> None:
    variable, program = PROGRAMS[name]
    source = make_source(model)
    environment = {variable: "/a checkout", "DATA_ARGS": "--data-path /data/tokens"}
    words = launched(tmp_path, name, source, **environment)
    assert f"/a checkout/{program}" in words
    assert words[-2:] == ["--further", "two words"]
    own = list(ADAPTERS[name].arguments(source.job))
    start = words.index(own[0])
    assert words[start : start + len(own)] == own
    assert words[words.index("--nnodes") + 1] == "2"
    assert words[words.index("--nproc-per-node") + 1] == "8"
    if name != "megatron-bridge":
        assert words[words.index("--data-path") + 1] == "/data/tokens"


def test_megatron_deepspeed_finds_its_configuration_and_does_not_start_without_data(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "a job"
    folder.mkdir()
    environment = {"MEGATRON_DEEPSPEED_DIR": "/megatron", "DATA_ARGS": "--data-path /data"}
    words = launched(folder, "megatron-deepspeed", make_source(), **environment)
    config = Path(words[words.index("--deepspeed_config") + 1])
    assert config.parent == folder
    job = make_source().job
    assert json.loads(config.read_text()) == ADAPTERS["megatron-deepspeed"].values(job)

    with pytest.raises(subprocess.CalledProcessError) as caught:
        launched(tmp_path, "megatron-deepspeed", make_source(), MEGATRON_DEEPSPEED_DIR="/megatron")
    assert "there is no mock data" in caught.value.stderr


def test_the_overrides_in_yaml_are_those_of_the_script(tmp_path: Path) -> None:
    words = launched(tmp_path, "megatron-bridge", make_source(), BRIDGE_DIR="/bridge")
    values = yaml.safe_load((tmp_path / "megatron-bridge.yaml").read_text())
    assert values == ADAPTERS["megatron-bridge"].values(make_source().job)
    for section, fields in values.items():
        if isinstance(fields, dict):
            assert sum(word.startswith(f"{section}.") for word in words) == len(fields)
