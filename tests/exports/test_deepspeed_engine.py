"""DeepSpeed's engine trains with exported configurations, on two ranks with gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from layout_tuner.search_spaces.layouts.layout import Layout
from tests.exports.exported_files import written
from tests.exports.trainer_environments import HERE, installed

pytestmark = [pytest.mark.exports, pytest.mark.ranks, pytest.mark.timeout(600)]

STAGES = (0, 1, 2, 3)


def test_autotp_takes_two_steps_with_every_stage_of_zero(tmp_path: Path) -> None:
    num_microbatches = 2
    layouts = [
        Layout(
            tp=2,
            micro_batch_size=2,
            num_microbatches=num_microbatches,
            zero_stage=stage,
            precision="bf16",
        )
        for stage in STAGES
    ]
    files = written(tmp_path, "deepspeed", layouts)
    environment = os.environ | {
        "PYTHONPATH": str(installed("deepspeed")),
        "PYTHONWARNINGS": "ignore",
        "DS_ACCELERATOR": "cpu",
        "DS_BUILD_OPS": "0",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    meeting = tmp_path / "ranks"
    script = str(HERE / "readers" / "train_deepspeed.py")
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(meeting), str(rank), *map(str, files)],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate()[0][-4000:] for rank in ranks]
    trained = [Path(f"{meeting}.{rank}") for rank in range(2)]
    assert all(each.exists() for each in trained), said
    first, second = (json.loads(each.read_text()) for each in trained)
    assert first == second
    for stage, answer in zip(STAGES, first, strict=True):
        assert answer["steps"] == 2
        assert answer["zero_stage"] == stage
        assert answer["shard"] == [128, 64]  # half of the rows
        assert answer["accumulates"] == ("torch.float32" if stage else "torch.bfloat16")
        # Without ZeRO it accumulates in bf16: the losses after the first update differ.
        alike = slice(None) if stage else slice(num_microbatches)
        assert answer["losses"][alike] == pytest.approx(first[1]["losses"][alike], rel=1e-3)
        assert answer["losses"][0] > answer["losses"][-1]
