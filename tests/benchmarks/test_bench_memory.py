from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.bench_memory import main
from search_spaces.estimates.memory import stage_memory
from search_spaces.estimates.storage import MEGATRON_LIKE
from search_spaces.spec.layout import Layout
from search_spaces.spec.presets.models import model_preset

FLAGS = ["--model=llama-8b", "--tp=2", "--pp=4", "--dp=2", "--num-microbatches=8", "--json"]
LAYOUT = Layout(
    num_nodes=2,
    tp=2,
    pp=4,
    dp=2,
    num_microbatches=8,
    zero_stage=1,
    recompute="full",
    precision="fp16",
)


def peaks(path: Path, factor: float) -> Path:
    """Two ranks a stage, one of them a little lower."""
    lines = ["rank,stage,max_allocated_mib,max_reserved_mib"]
    for stage in stage_memory(LAYOUT, model_preset("llama-8b"), MEGATRON_LIKE):
        mib = factor * stage.total_bytes / (1 << 20)
        lines += [f"{2 * stage.stage + i},{stage.stage},{mib - i},{1.2 * mib}" for i in (0, 1)]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_errors_are_of_the_stages_that_were_not_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = peaks(tmp_path / "peaks.csv", factor=1.1)
    assert main([f"--table={table}", *FLAGS]) == 0
    judged = json.loads(capsys.readouterr().out)["max_allocated_mib"]
    assert judged["uncalibrated"]["median"] == pytest.approx(1 - 1 / 1.1, rel=1e-3)
    assert judged["calibrated_on_first_and_last_stage"]["worst"] < 0.02
    assert [row["stage"] for row in judged["stages"]] == [0, 1, 2, 3]


def test_a_table_of_another_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = peaks(tmp_path / "peaks.csv", factor=1.0)
    assert main([f"--table={table}", *FLAGS, "--pp=8"]) == 2
    assert "peaks of 4 stages, and pp=8" in capsys.readouterr().err
    assert main([f"--table={table}", *FLAGS, "--columns=peak"]) == 2
    assert "no column peak" in capsys.readouterr().err
    assert main([f"--table={tmp_path / 'none.csv'}", *FLAGS]) == 2
    assert "none.csv" in capsys.readouterr().err
